"""`fairlead verify` on several dimensions at once: right ones are equal, and clipping over some of them is named."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.verify.models import SEQUENCE, SPLIT
from integration_tests.verify.training import Case, Judge

pytestmark = pytest.mark.full


def hybrid(mutation: str = "none", model: str = "Stack", accumulate: int = 1, **sizes: Any) -> Case:
    return Case(mutation, model, "hybrid", sizes, accumulate, 0.05)


PAIR: dict[str, Any] = {"shard": 2, "tensor": 2, "plan": SPLIT}
STAGES: dict[str, Any] = {"model": "Stages", "pipeline": 2, "micro_batches": 3, "split": [2]}
SHARED: dict[str, Any] = {"model": "Mixed", "shard": 2, "expert": 2, "tensor": 2, "plan": SPLIT}
SEQUENCES: dict[str, Any] = {**STAGES, "model": "SequenceStages", "shard": 1, "context": 2}
RIGHT = {
    "shard and tensor": hybrid(**PAIR),
    "pipeline and shard": hybrid(**STAGES, shard=2),
    "accumulating": hybrid(**PAIR, accumulate=2),
    "sequence": hybrid(shard=2, tensor=2, plan=SEQUENCE, sequence_parallel=True),
    "replicate and shard": hybrid(model="Net", replicate=2, shard=2),
    "replicate and tensor": hybrid(replicate=2, shard=1, tensor=2, plan=SPLIT),
    "shard and context": hybrid(model="Sequences", shard=2, context=2),
    "pipeline and tensor": hybrid(**STAGES, shard=1, tensor=2, plan=SPLIT),
    "pipeline and replicate": hybrid(**STAGES, shard=1, replicate=2),
    "experts and tensor": hybrid(**SHARED),
    "pipeline and experts": hybrid(**{**STAGES, "model": "Mixed"}, shard=2, expert=2),
    "pipeline and context": hybrid(**SEQUENCES),
}
FAULTS = {
    "over shard": hybrid("hybrid.clipped_over_shard", **PAIR),
    "over tensor": hybrid("hybrid.clipped_over_tensor", **PAIR),
    "counted twice": hybrid("hybrid.replicated_counted_twice", **PAIR),
    "own shard": hybrid("clipped_by_own_shard", **PAIR),
    "summed": hybrid("not_divided", **PAIR),
    "row bias": hybrid("row_bias_on_each_rank", **PAIR),
    "input gradient": hybrid("input_gradient_partial", **PAIR),
    "own stage": hybrid("pipeline.clipped_by_own_stage", **STAGES, shard=2),
    "tied apart": hybrid("pipeline.tied_apart", **STAGES, shard=2),
    "overwritten": hybrid("pipeline.overwritten", **STAGES, shard=1, replicate=2),
    "parts averaged": hybrid("hybrid.experts_of_parts_averaged", **SHARED),
    "router": hybrid("hybrid.router_of_a_part", **SHARED),
    "out of order": hybrid("hybrid.sequence_out_of_order", **SEQUENCES),
    "keys": hybrid("keys_of_own_queries", **SEQUENCES),
    "experts whole": hybrid("experts_not_divided", **{**STAGES, "model": "Mixed"}, shard=2, expert=2),
    "stage frozen": hybrid("pipeline.frozen_first", **STAGES, shard=1, replicate=2),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """The cases on four ranks, in one start of them."""
    return Judge(RIGHT | FAULTS, 4, tmp_path_factory.mktemp("cases"))


def require_named(said: dict[str, Any], first: str, cause: str) -> None:
    assert not said["ok"]
    assert said["first"]["name"] == first
    assert any(cause in one for one in said["causes"]), said["causes"]


def test_all_of_it_is_compared(found: Judge) -> None:
    said = found("shard and tensor")
    assert said["ok"], said
    assert said["alive"]["moved"] == 18
    counts = {kind: one["count"] for kind, one in said["compared"].items()}
    assert counts.pop("optimizer state") == 54
    assert counts.pop("learning rates") == 3
    each = dict.fromkeys(("gradients", "to the optimizer", "weights, step 1", "weights"), 18)
    assert counts == {**each, "clipping norm": 4, "losses": 3}


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_right_layout_is_equal(found: Judge, name: str) -> None:
    said = found(name)
    assert said["ok"], said
    assert said["alive"]["moved"] >= 10
    assert not said["alive"]["still"]


@pytest.mark.parametrize(
    ("name", "first", "cause"),
    [
        ("over shard", "rank 0", "it counts what the ranks of `shard` hold, not what those of `tensor` do"),
        ("over tensor", "rank 0", "it counts what the ranks of `tensor` hold, not what those of `shard` do"),
        ("counted twice", "rank 0", "it counts what the ranks of `tensor` hold alike once for each of them"),
        ("own shard", "rank 0", "it counts what this rank holds, not what the others do"),
        ("summed", "inlet.weight", "all gradients are 2 x those of one process: summed over the 2 replicas"),
        ("row bias", "inlet.weight", "added once by each of the 2 ranks of `tensor`"),
        ("input gradient", "inlet.weight", "a sum over the ranks of `tensor` is missing in the backward pass"),
        ("own stage", "rank 0", "it counts what the ranks of `shard` hold, not what those of `pipeline` do"),
        ("tied apart", "inlet.weight", "a weight that several stages hold: what each of them has is not added up"),
        ("overwritten", "inlet.weight", "only the last of the 3 micro-batches of a batch is in it"),
        ("parts averaged", "blocks.1.experts.0.0.weight", "16 of 27 parameters are 0.5 x those of one process"),
        ("router", "inlet.weight", "a sum over the ranks of `tensor` is missing in the backward pass"),
        ("out of order", "inlet.weight", "not known"),
        ("keys", "inlet.weight", "not known"),
        ("stage frozen", "blocks.0.norm.weight", "no gradient reaches 6 of 15 parameters"),
    ],
)
def test_a_fault_is_found_and_named(found: Judge, name: str, first: str, cause: str) -> None:
    require_named(found(name), first, cause)


def test_experts_that_no_stage_has_divided_are_noticed(found: Judge) -> None:
    """All is equal, and not what was asked for; a stage without a mixture divides none."""
    said = found("experts whole")
    assert not said["ok"]
    assert said["first"] is None
    assert said["wrong"] == ["expert 2: no mixture is divided, each rank has all experts"]
