"""`fairlead verify` finds each silent fault of FIELD.md's table, and finds nothing where there is none."""

from __future__ import annotations

import pytest

from fairlead.errors import ConfigError
from integration_tests.verify.models import SEQUENCE, SPLIT
from integration_tests.verify.training import Case, Judge

CASES = {
    "ddp": Case("none", clip=0.05),
    "ddp, accumulating": Case("none", accumulate=2, clip=0.05),
    "fsdp2": Case("none", strategy="fsdp2", clip=0.05),
    "fsdp2, accumulating": Case("none", strategy="fsdp2", accumulate=2, clip=0.05),
    "summed over replicas": Case("summed_over_replicas", clip=0.05),
    "summed over shards": Case("not_divided", strategy="fsdp2", clip=0.05),
    "nothing reduced": Case("nothing_reduced", clip=0.05),
    "a bucket not reduced": Case("bucket_not_reduced", fields={"bucket_cap_mb": 1}, clip=0.05),
    "doubled bias": Case("doubled_bias", clip=0.05),
    "frozen stage": Case("frozen_stage", clip=0.05),
    "frozen stage, sharded": Case("frozen_stage", strategy="fsdp2", clip=0.05),
    "micro-batches overwritten": Case("overwritten", accumulate=2, clip=0.05),
    "accumulation summed": Case("accumulation_summed", accumulate=2, clip=0.05),
    "clipping by the own shard": Case("clipped_by_own_shard", strategy="fsdp2", clip=0.05),
    "clipping that is not active": Case("clipped_by_own_shard", strategy="fsdp2", clip=1e6),
    "tensor": Case("none", "Stack", "tensor_parallel", {"plan": SPLIT}, clip=0.05),
    "sequence": Case("none", "Stack", "tensor_parallel", {"plan": SEQUENCE, "sequence_parallel": True}, clip=0.05),
    "row bias": Case("row_bias_on_each_rank", "Stack", "tensor_parallel", {"plan": SPLIT}, clip=0.05),
    "input gradient": Case("input_gradient_partial", "Stack", "tensor_parallel", {"plan": SPLIT}, clip=0.05),
    "norms under split sequences": Case(
        "sequence_gradients_partial",
        "Stack",
        "tensor_parallel",
        {"plan": SEQUENCE, "sequence_parallel": True},
        clip=0.05,
    ),
    "clipping by a part": Case("clipped_by_own_shard", "Stack", "tensor_parallel", {"plan": SPLIT}, clip=0.05),
    "context": Case("none", "Sequences", "hybrid", {"context": 2}, clip=0.05),
    "context off": Case("context_off", "Sequences", "hybrid", {"context": 2}, clip=0.05),
    "context summed": Case("not_divided", "Sequences", "hybrid", {"context": 2}, clip=0.05),
    "keys of own queries": Case("keys_of_own_queries", "Sequences", "hybrid", {"context": 2}, clip=0.05),
    "experts": Case("none", "Experts", "hybrid", {"expert": 2}, clip=0.05),
    "experts summed": Case("experts_summed", "Experts", "hybrid", {"expert": 2}, clip=0.05),
    "experts clipped by a part": Case("clipped_by_own_shard", "Experts", "hybrid", {"expert": 2}, clip=0.05),
    "experts off": Case("experts_not_divided", "Experts", "hybrid", {"expert": 2}, clip=0.05),
    "fsdp": Case("none", strategy="fsdp", clip=0.05),
    "decay": Case("none", "Decays", "fsdp"),
    "decay, flat": Case("none", "FlatDecays"),
    "own weights": Case("other_weights", strategy="fsdp2", clip=0.05),
    "a step left out": Case("step_lost", clip=0.05),
    "dead": Case("none", model="Dead", clip=0.05),
    "token mean": Case("none", model="Masked"),
    "batch norm": Case("none", model="Norm"),
    "random": Case("none", model="Random"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """All cases on two ranks, in one start of them."""
    return Judge(CASES, 2, tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("name", ["ddp", "ddp, accumulating", "fsdp", "fsdp2", "fsdp2, accumulating"])
def test_a_right_layout_is_equal(found: Judge, name: str) -> None:
    """All of it alive: 10 parameters, moved, and compared on both ranks."""
    said = found(name)
    assert said["ok"], said
    assert said["alive"]["moved"] == 10
    assert said["alive"]["gradient_norm"] > 0
    counts = {kind: one["count"] for kind, one in said["compared"].items()}
    tensors = {"gradients": 10, "to the optimizer": 10, "weights, step 1": 10, "weights": 10}
    assert counts == {**tensors, "optimizer state": 30, "clipping norm": 2, "learning rates": 3, "losses": 3}
    assert "what the optimizer holds" not in said["not_compared"]
    assert "dropout set to 0 (1 rates)" in said["remarks"][0]


@pytest.mark.parametrize(
    ("name", "first", "cause"),
    [
        ("summed over replicas", "inlet.weight", "all gradients are 2 x those of one process: summed over the 2"),
        ("summed over shards", "inlet.weight", "all gradients are 2 x those of one process: summed over the 2"),
        ("nothing reduced", "inlet.weight", "only the batch of replica 0 is in it: not reduced over the replicas"),
        ("doubled bias", "inlet.bias", "5 of 10 parameters, all of them biases are 2 x"),
        ("frozen stage", "blocks.0.0.weight", "no gradient reaches 2 of 10 parameters: blocks.0.0.weight"),
        ("frozen stage, sharded", "blocks.0.0.weight", "no gradient reaches 2 of 10 parameters: blocks.0.0.weight"),
        ("micro-batches overwritten", "inlet.weight", "only the last of the 2 batches of a step is in it"),
        ("accumulation summed", "inlet.weight", "summed over the 2 batches of a step, not averaged"),
        ("clipping by the own shard", "rank 0", "it counts what this rank holds, not what the others do"),
        ("clipping that is not active", "rank 0", "it counts what this rank holds, not what the others do"),
        (
            "row bias",
            "inlet.weight",
            "the bias of row-parallel layers is added once by each of the 2 ranks of `tensor`",
        ),
        ("input gradient", "inlet.weight", "a sum over the ranks of `tensor` is missing in the backward pass"),
        ("norms under split sequences", "blocks.0.norm.weight", "each holds a partial sum, not added up"),
        (
            "context summed",
            "inlet.weight",
            "all gradients are 2 x those of one process: summed over the 2 ranks of `context`",
        ),
        ("clipping by a part", "rank 0", "it counts what this rank holds, not what the others do"),
        ("experts summed", "blocks.0.experts.0.0.weight", "16 of 22 parameters are 2 x those of one process: summed"),
        ("experts clipped by a part", "rank 0", "it counts what this rank holds, not what the others do"),
        ("a step left out", "head.bias", "rank 1 and rank 0 do not hold the same weights any more"),
        ("token mean", "inlet.weight", "a mean over unequal counts, averaged a second time"),
    ],
)
def test_a_fault_is_found_and_named(found: Judge, name: str, first: str, cause: str) -> None:
    said = found(name)
    assert not said["ok"]
    assert said["first"]["name"] == first
    assert any(cause in one for one in said["causes"]), said["causes"]


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_split_layers_are_equal(found: Judge, name: str) -> None:
    said = found(name)
    assert said["ok"], said
    assert said["alive"]["moved"] == 18
    assert said["layout"]["replicas"] == 1


def test_a_bucket_that_is_not_reduced_is_named(found: Judge) -> None:
    """The first bucket holds the last layers: the others are right."""
    said = found("a bucket not reduced")
    assert not said["ok"]
    assert said["first"]["name"] in said["red"]


def test_ranks_that_begin_alone_are_found(found: Judge) -> None:
    """Parts of two models are one that trains well: no number differs."""
    said = found("own weights")
    assert not said["ok"]
    assert said["first"] is None
    assert said["wrong"][0].startswith("the layout does not begin with the weights that rank 0 has built: inlet.weight")


def test_a_split_sequence_is_equal(found: Judge) -> None:
    said = found("context")
    assert said["ok"], said
    assert said["layout"]["mesh"] == {"context": 2}


def test_context_parallelism_that_was_never_switched_on_is_red(found: Judge) -> None:
    """Each rank computes all of it, and every number is right."""
    said = found("context off")
    assert not said["ok"]
    assert said["first"] is None
    assert said["wrong"] == [
        "context 2: no attention was computed over the ranks, each had full sequences; "
        "context parallelism was never switched on"
    ]


def test_a_wrong_gradient_of_attention_is_red(found: Judge) -> None:
    """No share of any batch explains it; queries, and what is behind attention, are right."""
    said = found("keys of own queries")
    assert not said["ok"]
    assert said["first"]["name"] == "inlet.weight"
    assert "qkv.weight" in said["red"]
    assert "head.weight" not in said["red"][: said["compared"]["gradients"]["red"]]
    assert said["causes"][0].startswith("not known")


def test_divided_experts_are_equal(found: Judge) -> None:
    """All parameters of both ranks' experts, and all of them move."""
    said = found("experts")
    assert said["ok"], said
    assert said["alive"]["moved"] == 22
    assert said["layout"]["expert"] == 2
    assert said["compared"]["gradients"]["count"] == 22


def test_expert_parallelism_that_was_never_switched_on_is_red(found: Judge) -> None:
    said = found("experts off")
    assert not said["ok"]
    assert said["first"] is None
    assert said["wrong"] == ["expert 2: no mixture is divided, each rank has all experts"]


def test_weight_decay_by_shape_is_another_training_in_flat_shards(found: Judge) -> None:
    """No fault of the strategy: where a matrix has one dimension, it is decayed no more."""
    assert found("decay")["ok"]
    said = found("decay, flat")
    assert not said["ok"]
    assert said["first"]["what"] == "weight after step 1"
    assert "weight decay reaches other parameters" in said["causes"][0]
    assert said["compared"]["gradients"]["red"] == 0


def test_two_dead_models_do_not_agree(found: Judge) -> None:
    """No number differs, and it is red."""
    said = found("dead")
    assert not said["ok"]
    assert said["first"] is None
    assert said["wrong"] == [
        "no gradient at all in the layout",
        "no weight moves in the layout",
        "no gradient at all in one process",
        "no weight moves in one process",
    ]


def test_a_batch_norm_is_compared_replica_by_replica_and_said(found: Judge) -> None:
    said = found("batch norm")
    assert said["ok"], said
    assert any("batch norm computes over the batch of each replica (norm)" in one for one in said["remarks"])


def test_a_model_that_draws_random_numbers_cannot_be_verified(found: Judge) -> None:
    with pytest.raises(ConfigError, match="draws random numbers in its training step"):
        found("random")
