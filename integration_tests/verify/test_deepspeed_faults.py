"""`fairlead verify` under DeepSpeed: right stages are equal, and each fault of its own is found and named."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.verify.training import Case, Judge

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.full]

LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
"""What torchrun sets besides."""


def stage(number: int, mutation: str = "", **fields: Any) -> Case:
    """Three batches to a step, and two left over at the end of the epoch, with which the third step is made."""
    if number == 3:
        fields["stage3_param_persistence_threshold"] = 0  # else parameters as small as these stay whole
    name = f"deepspeed.{mutation}" if mutation else "none"
    return Case(name, "Net", "deepspeed", {"stage": number, **fields}, accumulate=3, clip=0.05)


RIGHT = {
    **{f"stage {number}": stage(number) for number in range(4)},
    "stage 2, offload": stage(2, offload_optimizer=True),
    "stage 3, offload": stage(3, offload_optimizer=True, offload_parameters=True),
}
FAULTS = {
    "divided twice": stage(2, "divided_twice"),
    "rest dropped": stage(1, "rest_of_the_epoch_dropped"),
    "clipping": stage(2, "clipped_before_the_division"),
    "summed": stage(2, "summed"),
    "not reduced": stage(1, "not_reduced"),
    "divided twice, stage 1": stage(1, "divided_twice"),
    "divided twice, stage 3": stage(3, "divided_twice"),
    "not reduced, stage 2": stage(2, "not_reduced"),
    "not reduced, stage 3": stage(3, "not_reduced_3"),
    "summed, stage 1": stage(1, "summed"),
    "clipping by the own shard": stage(3, "clipped_by_own_shard"),
    "rest dropped, stage 3": stage(3, "rest_of_the_epoch_dropped"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """The cases on two ranks, in one start of them."""
    return Judge(RIGHT | FAULTS, 2, tmp_path_factory.mktemp("cases"), LAUNCHER)


def require_named(said: dict[str, Any], first: str, cause: str) -> None:
    assert not said["ok"]
    assert said["first"]["name"] == first
    assert any(cause in one for one in said["causes"]), said["causes"]


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_right_stage_is_equal(found: Judge, name: str) -> None:
    """The norm that DeepSpeed clips by, too, where it tells one; the last step is of two batches."""
    said = found(name)
    assert said["ok"], said
    assert said["alive"]["moved"] == 10
    counts = {kind: one["count"] for kind, one in said["compared"].items()}
    norms = {} if name == "stage 0" else {"clipping norm": 2}
    tensors = dict.fromkeys(("gradients", "weights, step 1", "weights"), 10)
    assert counts == {**tensors, **norms, "optimizer state": 20, "learning rates": 3, "losses": 3}


@pytest.mark.parametrize(
    ("name", "first", "cause"),
    [
        ("divided twice", "inlet.weight", "divided by the 3 batches of a step once too often"),
        (
            "rest dropped",
            "inlet.weight",
            "after 2 of 3 steps: the last one is lost, which is of the 2 batches left over",
        ),
        ("clipping", "rank 0", "of gradients that are added up over the 3 batches of a step, and not averaged yet"),
        ("summed", "inlet.weight", "all gradients are 2 x those of one process: summed over the 2 replicas"),
        ("not reduced", "inlet.weight", "each number of it is of the batch of one replica alone: not reduced over the"),
        ("divided twice, stage 1", "inlet.weight", "divided by the 3 batches of a step once too often"),
        ("divided twice, stage 3", "inlet.weight", "divided by the 3 batches of a step once too often"),
        ("not reduced, stage 2", "inlet.weight", "of one replica alone: not reduced over the replicas"),
        ("not reduced, stage 3", "inlet.weight", "of one replica alone: not reduced over the replicas"),
        ("summed, stage 1", "inlet.weight", "summed over the 2 replicas"),
        ("clipping by the own shard", "rank 0", "it counts what this rank holds, not what the others do"),
        ("rest dropped, stage 3", "inlet.weight", "after 2 of 3 steps: the last one is lost"),
    ],
)
def test_a_fault_is_found_and_named(found: Judge, name: str, first: str, cause: str) -> None:
    require_named(found(name), first, cause)
