"""Faults that gradients of the first step do not show: data, buffers, optimizers; and right jobs like them."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead.errors import ConfigError
from integration_tests.verify.training import Case, Judge

CONTEXT: dict[str, Any] = {"strategy": "hybrid", "fields": {"context": 2}}
CASES = {
    "buffer": Case("none", "Averaged"),
    "buffer of own batches": Case("average_of_own_batches", "Averaged"),
    "buffer on rank 0": Case("average_on_rank_0", "Averaged"),
    "same data": Case("same_data"),
    "parameter missed": Case("parameter_missed"),
    "parameter missed, clipping": Case("parameter_missed", clip=0.05),
    "head alone": Case("none", "HeadAlone", clip=0.05),
    "head alone, fsdp2": Case("none", "HeadAlone", "fsdp2", clip=0.05),
    "head alone, doubled": Case("doubled_in_hook", "HeadAlone", clip=0.05),
    "parameter missed, fsdp2": Case("parameter_missed", strategy="fsdp2"),
    "scheduled": Case("none", "ScheduledNet"),
    "scheduled twice": Case("scheduled_twice", "ScheduledNet"),
    "rate by ranks": Case("none", "ScaledRate"),
    "rate by ranks, doubled": Case("doubled_in_hook", "ScaledRate"),
    "rate by their root": Case("none", "RootOfRanks"),
    "gradual warm-up": Case("none", "GradualWarmup"),
    "counted": Case("none", "Counted", **CONTEXT),
    "counted by each rank": Case("positions_of_each_rank", "Counted", **CONTEXT),
    "counted from one": Case("none", "CountedFromOne", **CONTEXT),
    "shuffled": Case("none", loader="shuffled"),
    "own seed of a sampler": Case("none", loader="own seed of a sampler"),
    "own seed of a stream": Case("none", loader="own seed of a stream"),
    "later doubled": Case("later_doubled"),
    "later doubled, fsdp": Case("later_doubled", strategy="fsdp"),
    "doubled in a hook": Case("doubled_in_hook"),
    "drift": Case("drifting_copy"),
    "warming up": Case("none", "WarmingUp"),
    "complex": Case("none", "Complex"),
    "imaginary": Case("imaginary_part_tripled", "Complex"),
    "normalized": Case("none", "Normalized"),
    "normalized, doubled": Case("doubled_in_hook", "Normalized"),
    "whole batch": Case("none", "WholeBatch"),
    "whole batch, doubled": Case("doubled_in_hook", "WholeBatch"),
    "counting": Case("none", "Counting", accumulate=2),
    "later random": Case("none", "LaterRandomNet"),
    "own generator": Case("none", "OwnGenerator"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """All cases on two ranks, in one start of them."""
    return Judge(CASES, 2, tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize(
    "name",
    [
        "buffer",
        "scheduled",
        "complex",
        "normalized",
        "whole batch",
        "counting",
        "warming up",
        "head alone",
        "head alone, fsdp2",
        "counted",
        "shuffled",
    ],
)
def test_a_right_job_is_equal(found: Judge, name: str) -> None:
    said = found(name)
    assert said["ok"], said


@pytest.mark.parametrize(
    ("name", "what", "first", "cause"),
    [
        ("buffer of own batches", "buffer", "average", "it follows the batches of each rank"),
        ("buffer on rank 0", "buffer", "average", "one rank alone changes it"),
        (
            "parameter missed",
            "weight after step 1",
            "head.bias",
            "rank 1 does not move head.bias: its optimizer does not",
        ),
        ("parameter missed, clipping", "clipping norm", "rank 1", "rank 1 does not move head.bias: its optimizer does"),
        ("head alone, doubled", "gradient", "inlet.weight", "all gradients are 2 x those of one process"),
        ("parameter missed, fsdp2", "weight after step 1", "head.bias", ""),
        ("scheduled twice", "learning rate", "step 2", "a scheduler that is stepped twice a step"),
        ("later doubled", "weight", None, "gradients of the first step agree"),
        ("later doubled, fsdp", "weight", None, "gradients of the first step agree"),
        (
            "counted by each rank",
            "gradient",
            "inlet.weight",
            "it may be positions that each rank counts from 0",
        ),
        (
            "counted from one",
            "gradient",
            "inlet.weight",
            "it may be positions that each rank counts from 0",
        ),
        ("rate by ranks, doubled", "gradient", "inlet.weight", "all gradients are 2 x those of one process"),
        ("doubled in a hook", "gradient", "inlet.weight", "all gradients are 2 x those of one process"),
        ("drift", "weight after step 1", "inlet.weight", "do not hold the same weights any more"),
        ("imaginary", "gradient", "phases", "not known"),
        ("normalized, doubled", "gradient", "inlet.weight", "are 2 x those of one process"),
        ("whole batch, doubled", "gradient", "inlet.weight", "are 2 x those of one process"),
    ],
)
def test_a_fault_is_found_and_named(found: Judge, name: str, what: str, first: str | None, cause: str) -> None:
    said = found(name)
    assert not said["ok"]
    assert said["first"]["what"] == what, said["first"]
    assert first in (None, said["first"]["name"])
    assert any(cause in one for one in said["causes"]), said["causes"]


def test_what_the_optimizer_holds_shows_a_factor(found: Judge) -> None:
    """Also in shards."""
    for name in ("later doubled", "later doubled, fsdp"):
        one = found(name)["compared"]["optimizer state"]
        assert (one["count"], one["red"]) == (30, 20)


def test_replicas_that_read_the_same_are_red(found: Judge) -> None:
    """Every number is right: one process trains on each sample twice as well."""
    said = found("same data")
    assert not said["ok"]
    assert said["first"] is None
    assert said["wrong"][0].startswith("2 replicas read the same samples: 18 of 36")


@pytest.mark.parametrize(
    ("name", "rates", "proof"),
    [
        ("rate by ranks", "are 0.01 on 2 ranks and 0.005 in one process", "one process that sees 2 ranks has"),
        ("rate by their root", "are 0.01 on 2 ranks and 0.01 in one process", "one factor in all steps"),
        (
            "gradual warm-up",
            "are 0.005, 0.00625, 0.0075 on 2 ranks and 0.005 in one process",
            "one process that sees 2 ranks has them, too",
        ),
    ],
)
def test_rates_that_are_made_of_the_ranks_are_taken(found: Judge, name: str, rates: str, proof: str) -> None:
    """Everything else is compared at the same rates."""
    said = found(name)
    assert said["ok"], said
    (line,) = (one for one in said["remarks"] if one.startswith("learning rates"))
    assert f"learning rates {rates}, made of the number of ranks ({proof}" in line
    assert "learning rates" not in said["compared"]
    assert "learning rates, which are made of the number of ranks" in said["not_compared"]
    assert said["compared"]["optimizer state"]["count"] == 30


@pytest.mark.parametrize("name", ["own seed of a sampler", "own seed of a stream"])
def test_ranks_that_each_shuffle_leave_out_samples(found: Judge, name: str) -> None:
    """No number differs: one process trains on the same batches."""
    said = found(name)
    assert not said["ok"]
    assert said["first"] is None
    assert any(one.startswith("samples are missing: of ") for one in said["wrong"])


def test_what_was_not_compared_is_said(found: Judge) -> None:
    """A warm-up that moves weights by less than float32 tells; a loss of whole batches; gradients that are zero."""
    assert "weights, which hardly moved" in found("warming up")["not_compared"]
    assert any("depends on the full batch of a replica" in one for one in found("whole batch")["remarks"])
    assert any("zero by construction" in one and "convolution.0.bias" in one for one in found("normalized")["remarks"])
    assert "statistics of local batch norms" in found("counting")["not_compared"]
    assert not any("which samples" in one for one in found("shuffled")["not_compared"])


@pytest.mark.parametrize(
    ("name", "why"),
    [("later random", "from step 2 on"), ("own generator", "draws random numbers in its training step")],
)
def test_random_models_are_refused_whenever_they_begin(found: Judge, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        found(name)
