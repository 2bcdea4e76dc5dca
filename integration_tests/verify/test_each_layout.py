"""Each kind of fault in each layout: all are found; and right jobs like them, which are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from fairlead.errors import ConfigError
from integration_tests.verify.models import SPLIT
from integration_tests.verify.training import Case, Judge

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.full]

LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
"""What torchrun sets besides, for DeepSpeed."""


@dataclass(frozen=True)
class Kind:
    """A fault, or none.

    Attributes:
        mutation: As a `Case` has it.
        adds: What is added to the layout's model.
        first: What is to be named first; empty: anything.
    """

    mutation: str
    adds: str = ""
    accumulate: int = 1
    clip: float | None = None
    first: str = ""

    def of(self, model: str, strategy: str, fields: Mapping[str, Any]) -> Case:
        """This kind in a layout."""
        name = f"{self.adds} of {model}" if self.adds else model
        return Case(self.mutation, name, strategy, dict(fields), self.accumulate, self.clip)


RIGHT = {
    "buffer": Kind("none", "Averaging"),
    "schedule": Kind("none", "Scheduled"),
    "accumulation and clipping": Kind("none", accumulate=2, clip=0.05),
}
FAULTS = {
    "buffer": Kind("average_on_rank_0", "Averaging", first="buffer"),
    "data": Kind("same_data"),
    "missed parameter": Kind("parameter_missed"),
    "missed parameter, clipping": Kind("parameter_missed", clip=0.05),
    "accumulation": Kind("accumulation_summed", accumulate=2, first="gradient"),
    "clipping": Kind("clipped_by_hand", clip=0.05),
    "schedule": Kind("scheduled_twice", "Scheduled", first="learning rate"),
    "noise of each rank": Kind("noise_of_each_rank"),
    "later doubled": Kind("later_doubled"),
    "doubled in a hook": Kind("doubled_in_hook", first="gradient"),
    "step lost": Kind("step_lost"),
}
TWO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("Net", "ddp", {}),
    "fsdp": ("Net", "fsdp", {}),
    "tensor": ("Stack", "tensor_parallel", {"plan": SPLIT}),
    "context": ("Sequences", "hybrid", {"context": 2}),
    "expert": ("Experts", "hybrid", {"expert": 2}),
    "pipeline": ("Stages", "pipeline_parallel", {}),
}
FOUR: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hsdp": ("Net", "fsdp", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}),
    "shard and tensor": ("Stack", "hybrid", {"shard": 2, "tensor": 2, "plan": SPLIT}),
    "pipeline and shard": ("Stages", "hybrid", {"pipeline": 2, "shard": 2}),
}
STAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stage 1": ("Net", "deepspeed", {"stage": 1}),
    "stage 2": ("Net", "deepspeed", {"stage": 2}),
    "stage 3": ("Net", "deepspeed", {"stage": 3, "stage3_param_persistence_threshold": 0}),
}
ONE_REPLICA = ("tensor", "context", "pipeline")
"""Layouts whose ranks all read the same batches."""
OF_DEEPSPEED = {
    "accumulation": Kind("deepspeed.divided_twice", accumulate=3, first="gradient"),
    "clipping": Kind("deepspeed.clipped_before_the_division", accumulate=3, clip=0.05, first="clipping norm"),
    "later doubled": Kind("deepspeed.later_doubled"),
    "doubled in a hook": Kind("deepspeed.doubled_in_hook", first="gradient"),
}
"""DeepSpeed's engine has its own places for these; an optimizer that misses a parameter fails in it."""


def cases(layouts: Mapping[str, tuple[str, str, dict[str, Any]]]) -> dict[str, Case]:
    """All kinds in some layouts, by `kind, layout`."""
    found = {}
    for layout, (model, strategy, fields) in layouts.items():
        kinds = {f"right {name}": kind for name, kind in RIGHT.items()} | FAULTS
        if strategy == "deepspeed":
            kinds = {name: kind for name, kind in (kinds | OF_DEEPSPEED).items() if not name.startswith("missed")}
        if layout == "stage 3":
            kinds["clipping"] = Kind("deepspeed.clipped_by_own_shard", clip=0.05)
        if layout == "ddp":
            kinds["clipping"] = Kind("clipped_before_it_is_reduced")
        if layout in ONE_REPLICA:
            del kinds["data"]
        kinds["late randomness"] = Kind("none", "LaterRandom")
        found.update({f"{name}, {layout}": kind.of(model, strategy, fields) for name, kind in kinds.items()})
    return found


EVERY = [cases(layouts) for layouts in (TWO, FOUR, STAGES)]


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> list[Judge]:
    """Two ranks, four, and two of DeepSpeed, each in one start of them."""
    ranks, environs = (2, 4, 2), (None, None, LAUNCHER)
    settings = zip(EVERY, ranks, environs, strict=True)
    return [Judge(some, count, tmp_path_factory.mktemp("each"), environ) for some, count, environ in settings]


def verdict(judges: list[Judge], name: str) -> dict[str, Any]:
    return next(judge(name) for judge, some in zip(judges, EVERY, strict=True) if name in some)


NAMES = [name for some in EVERY for name in some]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("right ")])
def test_a_right_job_is_equal(judges: list[Judge], name: str) -> None:
    said = verdict(judges, name)
    assert said["ok"], said
    assert said["compared"]["optimizer state"]["count"] > 0


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("right ", "late randomness"))])
def test_a_fault_is_found(judges: list[Judge], name: str) -> None:
    said = verdict(judges, name)
    assert not said["ok"], said
    kind, _, layout = name.rpartition(", ")
    first = (OF_DEEPSPEED if layout in STAGES and kind in OF_DEEPSPEED else FAULTS)[kind].first
    if first:
        assert said["first"]["what"] == first, said
    if kind == "data":
        assert any("read the same samples" in one for one in said["wrong"])
    assert said["causes"] or said["wrong"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("late randomness")])
def test_late_randomness_is_refused(judges: list[Judge], name: str) -> None:
    with pytest.raises(ConfigError, match="from step 2 on"):
        verdict(judges, name)
