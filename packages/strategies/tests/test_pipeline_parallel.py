"""Pipelines in the Trainer on real processes over gloo, against one process with the same batches."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  # so that the ranks, which are forked, need not import it each
import pytest

from fairlead.engines import too_old
from fairlead_distributed.testing import run_ranks

OLD = too_old("pipeline")
pytestmark = pytest.mark.skipif(OLD is not None, reason=str(OLD))
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
CLOSE = 2e-6
"""Largest difference of any weight after AdamW's steps: the order of float32 additions differs."""
WHOLE: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
HEADS = {"blocks.*.qkv": "packed:1,1,1", "blocks.*.out": "rowwise"}


def two(rank: int) -> dict[str, Any]:
    p = _quiet()
    found = {one: p.compare(p.config(schedule=one, micro_batches=4), **WHOLE) for one in SCHEDULES}
    return found | {
        "sequential": p.compare(p.config(first_stage_less_layers=1), p.Plain),
        "recomputed": p.compare(p.config(split=[1, 5], activation_checkpointing=(p.Block,))),
        "named": p.compare(p.config(split=["blocks.3"], micro_batches=2), max_epochs=1),
        "gradients": p.gradients(p.config()),
        "checkpoint": p.checkpoint(p.config()),
        "evaluations": p.evaluations(p.config()),
        "dropout": p.dropout(p.config()),
    }


def four(rank: int) -> dict[str, Any]:
    p = _quiet()
    hybrid = {"hybrid": True, "pipeline": 2, "micro_batches": 4}
    return {
        "pipeline 4": p.compare(p.config(micro_batches=4), **WHOLE),
        "pipeline 2 x replicate 2": p.compare(p.config(pipeline=2, replicate=2, micro_batches=4), **WHOLE),
        "pipeline 2 x shard 2": p.compare(p.config(**hybrid, shard=2), **WHOLE),
        # The second stage has only the last layer, which no pattern of the plan names.
        "pipeline 2 x tensor 2": p.compare(p.config(**hybrid, shard=1, tensor=2, plan=PLAN, split=[5, 1]), **WHOLE),
        "pipeline 2 x context 2": p.compare(p.config(**hybrid, shard=1, context=2), p.Attending, **WHOLE),
        "pipeline 2 x expert 2": p.compare(p.config(**hybrid, shard=2, expert=2), p.Mixed, **WHOLE),
        # The last stage has no mixture, and two stages lie on a rank.
        "expert 2 of interleaved stages": p.compare(
            p.config(**hybrid, shard=2, expert=2, schedule="interleaved_1f1b", split=[2, 2, 2]), p.Mixed, **WHOLE
        ),
        "gradients of experts": p.gradients(p.config(**hybrid, shard=2, expert=2), p.Mixed),
        "checkpoint of experts": p.checkpoint(p.config(**hybrid, shard=2, expert=2), p.Mixed),
        "evaluations of shards": p.evaluations(p.config(**hybrid, shard=2), p.Tokens),
        "evaluations of sequences": p.evaluations(p.config(**hybrid, shard=1, context=2), p.Attending),
        "inattentive": p._error(lambda: p._fit(p.config(**hybrid, shard=1, context=2), p.Tokens)),
        "checkpoint": p.checkpoint(p.config(**hybrid, shard=2)),
        "tied": p._error(lambda: p._fit(p.config(**hybrid, shard=2, schedule="zbv_zero_bubble"), p.Tokens)),
    }


def eight(rank: int) -> dict[str, Any]:
    p = _quiet()
    cube = p.config(True, pipeline=2, shard=2, tensor=2, plan=PLAN, micro_batches=4)
    sizes = {"hybrid": True, "pipeline": 2, "micro_batches": 4}
    experts = p.config(**sizes, shard=2, expert=2, tensor=2, plan=HEADS)
    sequences = p.config(**sizes, shard=1, context=2, tensor=2, plan=PLAN)
    return {
        "cube": p.compare(cube, max_epochs=1, **WHOLE),
        "experts": p.compare(experts, p.Mixed, max_epochs=1, **WHOLE),
        "sequences": p.compare(sequences, p.Attending, max_epochs=1, **WHOLE),
    }


def refused(rank: int) -> dict[str, str]:
    found: dict[str, str] = _quiet().refusals()
    return found


def _quiet() -> Any:
    warnings.simplefilter("ignore")  # Lightning's advice on loaders and loggers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.path.insert(0, str(Path(__file__).parent))  # tests folders are not packages
    return importlib.import_module("pipelined")


@pytest.fixture(scope="module")
def on_two() -> dict[str, Any]:
    return run_ranks(two, 2, timeout=240)[0]


@pytest.fixture(scope="module")
def on_four() -> dict[str, Any]:
    return run_ranks(four, 4, timeout=240)[0]


@pytest.mark.parametrize("name", [*SCHEDULES, "sequential", "recomputed", "named"])
def test_two_stages_equal_one_process(on_two: dict[str, Any], name: str) -> None:
    """Weights and the logged losses: tied weights, other widths between layers, padding, a short last batch."""
    found = on_two[name]
    assert found["apart"] < CLOSE
    assert found["losses"] < CLOSE
    assert found["moved"] > 0.02
    assert found["own"] < found["whole"]  # of this rank's
    assert found["name"] == "pipeline_parallel"


def test_every_gradient_of_the_first_step_is_that_of_one_process(on_two: dict[str, Any]) -> None:
    found = on_two["gradients"]
    assert found["apart"] < CLOSE
    assert found["least"] > 0.01  # none of them is zero


def test_checkpoints_are_those_of_one_process(on_two: dict[str, Any]) -> None:
    """Names, groups and numbers of the optimizer's state; a run goes on from them as a pipeline and in one process."""
    found = on_two["checkpoint"]
    assert found["resumed"] == 0.0
    assert found["in_one_process"] < CLOSE
    assert found["from_one_process"] < CLOSE
    assert found["same_keys"] is found["same_groups"] is found["same_numbers"] is True
    assert found["moments"] < CLOSE


def test_validation_prediction_and_calls_go_through_all_stages(on_two: dict[str, Any]) -> None:
    """Also before a fit, which then finds a module that is split already."""
    found = on_two["evaluations"]
    assert found["before"] < CLOSE
    assert found["after"] < CLOSE
    assert found["fell"] > 0.5
    assert found["predicted"] is True
    assert found["called"] < 1e-5
    assert found["weights"] < CLOSE


def test_stages_drop_out_other_places_and_draw_alike_afterwards(on_two: dict[str, Any]) -> None:
    assert on_two["dropout"] == {"same_masks": False, "same_generator": True, "finite": True}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        *("pipeline 4", "pipeline 2 x replicate 2", "pipeline 2 x shard 2", "pipeline 2 x tensor 2"),
        *("pipeline 2 x context 2", "pipeline 2 x expert 2", "expert 2 of interleaved stages"),
    ],
)
def test_four_ranks_equal_one_process(on_four: dict[str, Any], name: str) -> None:
    """Token means over replicas with other numbers of tokens too: clipped, accumulated."""
    found = on_four[name]
    assert found["apart"] < CLOSE
    assert found["moved"] > 0.02


@pytest.mark.full
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint of experts"])
def test_a_sharded_pipeline_saves_and_resumes(on_four: dict[str, Any], name: str) -> None:
    found = on_four[name]
    assert found["resumed"] == 0.0
    assert max(found["in_one_process"], found["from_one_process"]) < 2 * CLOSE
    assert found["same_keys"] is found["same_groups"] is found["same_numbers"] is True
    assert found["moments"] < CLOSE


@pytest.mark.full
def test_every_gradient_of_experts_in_stages_is_that_of_one_process(on_four: dict[str, Any]) -> None:
    found = on_four["gradients of experts"]
    assert found["apart"] < CLOSE
    assert found["least"] > 0  # each expert has been chosen


@pytest.mark.full
def test_a_sharded_pipeline_is_trained_after_an_evaluation(on_four: dict[str, Any]) -> None:
    """Which leaves the first and the last layers gathered."""
    assert on_four["evaluations of shards"]["weights"] < CLOSE


@pytest.mark.full
def test_calls_of_stages_that_share_sequences_return_whole_ones(on_four: dict[str, Any]) -> None:
    found = on_four["evaluations of sequences"]
    assert max(found["before"], found["after"], found["weights"]) < 2 * CLOSE
    assert found["fell"] > 0.1
    assert found["predicted"] is True
    assert found["called"] < 1e-5


@pytest.mark.full
def test_stages_without_attention_share_no_sequences(on_four: dict[str, Any]) -> None:
    assert "did nothing in any stage: no attention came by" in on_four["inattentive"]


@pytest.mark.full
def test_tied_weights_of_two_stages_on_one_rank_are_not_sharded(on_four: dict[str, Any]) -> None:
    assert "embedding.weight is shared by the stages 0 and 3" in on_four["tied"]


@pytest.mark.full
def test_two_by_two_by_two_equals_one_process() -> None:
    """Stages x shards x split layers; with divided experts in place of shards; with shared sequences."""
    for name, found in run_ranks(eight, 8, timeout=240)[0].items():
        assert found["apart"] < CLOSE, name
        assert found["moved"] > 0.01, name


def test_what_cannot_be_a_pipeline_is_refused_on_all_ranks() -> None:
    """Each on both ranks, with what to do, and none of them hangs."""
    both = run_ranks(refused, 2, timeout=240)
    expected = {
        "manual": "manual optimization does not work",
        "silent": "def pipeline_layers(self)",
        "loose": "the parameter scale is in no layer",
        "uses": "training_step uses the output of the model",
        "forgets": "has not computed the loss with self.pipeline_loss",
        "lbfgs": "LBFGS does not work",
        "unweighed": "pipeline_weight",
        "stages": "5 layers cannot be split into 6 stages",
        "counts": "1 + 2 layers do not make 2 stages of a model of 5 layers",
        "names": "no layer of the pipeline is called 'net.9'",
        "batches": "were given different batches",
    }
    for name, words in expected.items():
        assert [words in said[name] for said in both] == [True, True], (name, both)
