"""`fairlead verify` on pipelines: right ones are equal, and each fault of their own is found and named."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.verify.training import Case, Judge

pytestmark = pytest.mark.full


def pipeline(
    mutation: str = "none", model: str = "Stages", clip: float = 0.05, accumulate: int = 1, **fields: Any
) -> Case:
    fields = {"micro_batches": 3, "split": [3], **fields}
    return Case(mutation, model, "pipeline_parallel", fields, accumulate, clip)


INTERLEAVED: dict[str, Any] = {"schedule": "interleaved_1f1b", "split": "parameters", "micro_batches": 2}
RIGHT = {
    "1f1b": pipeline(),
    "interleaved, accumulating": pipeline(accumulate=2, **INTERLEAVED),
    "gpipe": pipeline(schedule="gpipe"),
    "interleaved": pipeline(**INTERLEAVED),
    "zero bubble": pipeline(schedule="zbv_zero_bubble", split="parameters", micro_batches=6),
    "interleaved zero bubble": pipeline(schedule="interleaved_zero_bubble", split="parameters", micro_batches=2),
}
FAULTS = {
    "summed": pipeline("pipeline.summed_over_micro_batches"),
    "divided twice": pipeline("pipeline.divided_twice"),
    "accumulation summed": pipeline("accumulation_summed", accumulate=2),
    "overwritten": pipeline("pipeline.overwritten"),
    "first stage frozen": pipeline("pipeline.frozen_first"),
    "tied apart": pipeline("pipeline.tied_apart"),
    "clipping": pipeline("pipeline.clipped_by_own_stage"),
    "copy not stepped": pipeline("pipeline.copy_not_stepped"),
    "tied counted twice": pipeline("pipeline.tied_counted_twice"),
    "moving average": pipeline("pipeline.moving_average", accumulate=2),
    "last stage frozen": pipeline("pipeline.frozen"),
    "clipping that is not active": pipeline("pipeline.clipped_by_own_stage", clip=1e6),
    "token mean": pipeline(model="MaskedStages", check_loss=False),
    "overwritten, interleaved": pipeline("pipeline.overwritten", **INTERLEAVED),
    "summed, accumulating": pipeline("pipeline.summed_over_micro_batches", accumulate=2),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """The cases on two ranks, in one start of them."""
    return Judge(RIGHT | FAULTS, 2, tmp_path_factory.mktemp("cases"))


def require_equal(said: dict[str, Any]) -> None:
    """All of it alive: 15 parameters, moved, and compared under the names of the whole model."""
    assert said["ok"], said
    assert said["alive"]["moved"] == 15
    counts = {kind: one["count"] for kind, one in said["compared"].items()}
    assert counts.pop("optimizer state") == 45
    assert counts.pop("learning rates") == 3
    fifteen = dict.fromkeys(("gradients", "to the optimizer", "weights, step 1", "weights"), 15)
    assert counts == {**fifteen, "clipping norm": 2, "losses": 3}


def require_named(said: dict[str, Any], first: str, cause: str) -> None:
    assert not said["ok"]
    assert said["first"]["name"] == first
    assert any(cause in one for one in said["causes"]), said["causes"]


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_right_pipeline_is_equal(found: Judge, name: str) -> None:
    require_equal(found(name))


@pytest.mark.parametrize(
    ("name", "first", "cause"),
    [
        (
            "summed",
            "inlet.weight",
            "3 x those of one process: summed over the 3 micro-batches of a batch, not averaged",
        ),
        ("divided twice", "inlet.weight", "divided by the 3 micro-batches of a batch once too often"),
        ("accumulation summed", "inlet.weight", "summed over the 2 batches of a step, not averaged"),
        ("overwritten", "inlet.weight", "only the last of the 3 micro-batches of a batch is in it"),
        ("first stage frozen", "blocks.0.norm.weight", "no gradient reaches 12 of 15 parameters: blocks.0.norm.weight"),
        ("tied apart", "inlet.weight", "a weight that several stages hold: what each of them has is not added up"),
        ("clipping", "rank 0", "it counts what this rank holds, not what the others do"),
        ("copy not stepped", "inlet.weight", "rank 1 and rank 0 do not hold the same weights any more"),
        ("tied counted twice", "rank 0", "what the ranks of `pipeline` hold alike once for each of them"),
        ("moving average", "inlet.weight", "the batches have other shares in it than in one process: 0.13 for 0.5"),
        ("last stage frozen", "head.weight", "no gradient reaches 2 of 15 parameters: head.weight, head.bias"),
        ("clipping that is not active", "rank 0", "it counts what this rank holds, not what the others do"),
        ("token mean", "inlet.weight", "each micro-batch's mean counts the same"),
        ("overwritten, interleaved", "inlet.weight", "only the last of the 2 micro-batches of a batch is in it"),
        ("summed, accumulating", "inlet.weight", "summed over the 3 micro-batches of a batch, not averaged"),
    ],
)
def test_a_fault_is_found_and_named(found: Judge, name: str, first: str, cause: str) -> None:
    require_named(found(name), first, cause)


def test_the_stage_of_the_first_wrong_parameter_is_said(found: Judge) -> None:
    assert found("first stage frozen")["first"]["held"] == "by rank 0"
    assert found("tied apart")["first"]["held"] == "by ranks 0, 1"
