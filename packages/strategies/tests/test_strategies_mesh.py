"""Real ranks over gloo, laid out in every way that two and four ranks can be, against one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_distributed.testing import run_ranks
from fairlead_strategies import (
    FSDP2StrategyConfig,
    FSDPStrategyConfig,
    HybridStrategyConfig,
    TensorParallelStrategyConfig,
)
from fairlead_strategies.mesh.config import MeshStrategyConfig

LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
PLAN: Any = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TEXT: Any = {**PLAN, "embedding": "vocab", "head": "vocab"}
SEQUENCE: Any = {**TEXT, "blocks.0": "sequence_begin", "blocks.*.norm": "sequence", "norm": "sequence_end"}
ATTENTION: Any = {**PLAN, "blocks.*.qkv": "packed:1,1,1", "blocks.*.out": "rowwise"}
CLOSE = 2e-6
"""Largest difference of anything after a dozen steps: the order of float32 additions differs."""
CLIP = 0.05
ROOT = 84 + 26
ALL = ROOT + 3 * 636
"""Parameters of the network: three blocks, and what is around them."""

STRATEGIES: tuple[Any, ...] = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRIDS: tuple[Any, ...] = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

EQUAL: dict[int, dict[str, tuple[MeshStrategyConfig, dict[str, Any]]]] = {
    2: {
        "tensor 2": (TensorParallelStrategyConfig(plan=PLAN), {}),
        "tensor 2, accumulated": (TensorParallelStrategyConfig(plan=PLAN), {"accumulate_grad_batches": 2}),
        "loss parallel": (TensorParallelStrategyConfig(plan=TEXT, loss_parallel=True), {"net": {"kind": "Text"}}),
        "sequence parallel": (
            TensorParallelStrategyConfig(plan=SEQUENCE, sequence_parallel=True),
            {"net": {"kind": "Text"}},
        ),
        **{name: (FSDPStrategyConfig(sharding_strategy=name), {}) for name in STRATEGIES},
        "units by torch's wrap": (FSDPStrategyConfig(), {"net": {"kind": "Wraps"}}),
        "units by both": (FSDPStrategyConfig(auto_wrap_policy=("mesh_runs:Block",)), {"net": {"kind": "Wraps"}}),
        "half sharded by itself": (FSDP2StrategyConfig(), {"net": {"kind": "Shards"}}),
        "one unit": (FSDPStrategyConfig(auto_wrap_policy=()), {}),
        "wrapped by size": (FSDP2StrategyConfig(auto_wrap_policy=300), {}),
        "kept": (FSDP2StrategyConfig(reshard_after_forward=False), {}),
        "offloaded": (FSDPStrategyConfig(cpu_offload=True), {}),
        "checkpointed": (FSDP2StrategyConfig(activation_checkpointing=("torch.nn:LayerNorm", "mesh_runs:Block")), {}),
        "formats": (
            FSDP2StrategyConfig.model_validate(
                {"mixed_precision": {"param_dtype": "float32", "reduce_dtype": "float32"}}
            ),
            {},
        ),
        "unsharded": (FSDP2StrategyConfig(accumulate_unsharded=True), {"accumulate_grad_batches": 2}),
        "by value": (FSDP2StrategyConfig(), {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    },
    4: {
        "replicate 2 x shard 2": (FSDP2StrategyConfig(replicate=2), {}),
        **{name: (FSDPStrategyConfig(sharding_strategy=name, device_mesh=(2, 2)), {}) for name in HYBRIDS},
        "replicate 2 x shard 2, accumulated": (FSDP2StrategyConfig(replicate=2), {"accumulate_grad_batches": 2}),
        "tensor 2 x replicate 2": (TensorParallelStrategyConfig(plan=PLAN, replicate=2), {}),
        "shard 2 x tensor 2": (HybridStrategyConfig(plan=PLAN, tensor=2), {}),
        "shard 2 x tensor 2, sequence and loss parallel": (
            HybridStrategyConfig(plan=SEQUENCE, tensor=2, sequence_parallel=True, loss_parallel=True),
            {"net": {"kind": "Text"}},
        ),
        "shard 2 x context 2": (HybridStrategyConfig(context=2), {"net": {"kind": "Text", "attention": True}}),
        "replicate 2 x context 2, accumulated": (
            HybridStrategyConfig(
                replicate=2, context=2, context_method="ulysses", activation_checkpointing=("mesh_runs:Attention",)
            ),
            {"net": {"kind": "Text", "attention": True}, "accumulate_grad_batches": 2},
        ),
        "context 2 x tensor 2": (
            HybridStrategyConfig(plan=ATTENTION, context=2, tensor=2),
            {"net": {"kind": "Text", "attention": True}},
        ),
        "shard 2 x tensor 2, accumulated": (
            HybridStrategyConfig(plan=PLAN, tensor=2, activation_checkpointing=("mesh_runs:Block",)),
            {"accumulate_grad_batches": 2},
        ),
    },
}


def runs() -> Any:
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module("mesh_runs")


def two_ranks(rank: int, folder: str) -> dict[str, Any]:
    """What two ranks found."""
    run, path = runs(), Path(folder)
    tensor = TensorParallelStrategyConfig(plan=PLAN)
    low: Any = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    return {
        "equal": equal(run),
        "tensor collectives": run.counted(tensor),
        "fsdp2 collectives": run.counted(FSDP2StrategyConfig(), accumulate_grad_batches=2),
        "unsharded collectives": run.counted(FSDP2StrategyConfig(accumulate_unsharded=True), accumulate_grad_batches=2),
        "layouts": run.through_layouts([tensor, FSDPStrategyConfig()], path, gradient_clip_val=CLIP),
        "shared": run.shared_randomness(tensor),
        "low": [
            run.low_precision(FSDP2StrategyConfig.model_validate({"mixed_precision": low})),
            run.low_precision(FSDPStrategyConfig(mixed_precision=True)),
        ],
        "held": {name: run.held_bytes(FSDPStrategyConfig(sharding_strategy=name)) for name in STRATEGIES},
        "overflow": run.overflow(FSDPStrategyConfig()),
        "units": run.units(FSDPStrategyConfig(), FSDPStrategyConfig(auto_wrap_policy=("mesh_runs:Block",))),
        "refused": run.refused(),
    }


def four_ranks(rank: int, folder: str) -> dict[str, Any]:
    """What four ranks found."""
    run, path = runs(), Path(folder)
    both = HybridStrategyConfig(plan=PLAN, tensor=2)
    return {
        "equal": equal(run),
        "held": run.held(both),
        "hsdp held": run.held(FSDP2StrategyConfig(replicate=2)),
        "hsdp collectives": run.counted(FSDP2StrategyConfig(replicate=2), accumulate_grad_batches=2),
        "survives": [
            run.survives(one, path / f"{one.name}.ckpt", gradient_clip_val=CLIP)
            for one in (both, FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)))
        ],
        "shared": run.shared_randomness(both),
    }


def equal(run: Any) -> dict[str, Any]:
    """Every layout of the table that has so many ranks."""
    found, references = {}, {}
    for name, (config, changes) in EQUAL[run.dist_size()].items():
        options = {"gradient_clip_val": CLIP, **changes}
        key = str(options)
        if key not in references:
            references[key] = run.alone(**options)
        found[name] = run.compare(config, references[key], **options)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(two_ranks, 2, str(tmp_path_factory.mktemp("two")), env=LAUNCHER, timeout=300)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(four_ranks, 4, str(tmp_path_factory.mktemp("four")), env=LAUNCHER, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, table in EQUAL.items() for name in table])
def test_a_layout_equals_one_process(request: pytest.FixtureRequest, size: int, name: str) -> None:
    """Loss, every gradient before and after clipping, and weights, though the ranks began with other weights."""
    found = request.getfixturevalue("two" if size == 2 else "four")[0]["equal"][name]
    for what in ("loss", "gradients", "clipped", "weights"):
        assert found[what] < CLOSE, what
    assert found["moved"] > 0.01
    assert found["norm"] > 4 * CLIP  # clipping did something
    if name != "by value":
        assert found["clipped_norm"] == pytest.approx(CLIP, rel=1e-3)


@pytest.mark.slow
def test_a_rank_holds_its_part_of_weights_and_moments(four: list[dict[str, Any]]) -> None:
    """Split layers are cut over both dimensions, the bias of a row layer and all others over the shards alone."""
    split = ("up.weight", "up.bias", "down.weight")
    for name, (_, _, size) in four[0]["held"].items():
        parts = [found["held"][name] for found in four]
        assert sum(weight for weight, _, _ in parts) == size * (1 if name.endswith(split) else 2), name
        assert all(weight == moment for weight, moment, _ in parts)
    assert (
        sum(weight for weight, _, _ in four[0]["hsdp held"].values())
        == sum(size for _, _, size in four[0]["hsdp held"].values()) // 2
    )


@pytest.mark.slow
def test_what_a_step_sends(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    """One all-reduce forward and one backward for each pair of layers; units and copies are reduced as it is said."""
    pairs, units = 3, 4
    gathers, scatters, copies = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"
    assert two[0]["tensor collectives"][copies] == 2 * pairs
    assert two[0]["tensor collectives"][gathers] == two[0]["tensor collectives"][scatters] == 0
    # Two batches to a step: a unit is gathered forward and backward, the root only once.
    assert two[0]["fsdp2 collectives"][gathers] == 2 * (2 * units - 1)
    assert two[0]["fsdp2 collectives"][scatters] == 2 * units
    assert two[0]["unsharded collectives"][scatters] == units
    assert four[0]["hsdp collectives"][scatters] == 2 * units
    assert four[0]["hsdp collectives"][copies] == units


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_layouts(two: list[dict[str, Any]]) -> None:
    """An epoch in one process, one split by tensors, one sharded, one in one process: as four in one process.

    The optimizer's groups are not in the order of the parameters.
    """
    assert two[0]["layouts"] < CLOSE


@pytest.mark.slow
def test_a_hybrid_run_resumes_with_the_same_bits(four: list[dict[str, Any]]) -> None:
    assert [found["survives"] for found in four] == [[True, True]] * 4


@pytest.mark.slow
def test_ranks_of_a_tensor_group_share_samples_and_dropout(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    """Though each was seeded by its rank; replicas do not share them."""
    (batches, losses), (others, lost) = two[0]["shared"]
    assert all(map(torch.equal, batches, others))
    assert losses == pytest.approx(lost, abs=1e-6)
    shared = four[0]["shared"]
    for a, b in ((0, 1), (2, 3)):
        assert all(map(torch.equal, shared[a][0], shared[b][0]))
        assert shared[a][1] == pytest.approx(shared[b][1], abs=1e-6)
    assert not any(map(torch.equal, shared[0][0], shared[2][0]))


@pytest.mark.slow
def test_units_compute_in_the_format_of_the_policy(two: list[dict[str, Any]]) -> None:
    for found in two[0]["low"]:
        assert found["activations"] == {torch.bfloat16}
        assert found["weights"] == {torch.float32}
        assert found["moved"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "parameters", "rest", "gathers"),
    [("FULL_SHARD", ALL // 2 + ROOT, ALL // 2, 7), ("SHARD_GRAD_OP", ALL // 2 + ALL, ALL // 2, 4)],
)
def test_a_rank_holds_and_gathers_what_the_formula_says(
    two: list[dict[str, Any]], strategy: str, parameters: int, rest: int, gathers: int
) -> None:
    """Between forward and backward it has its half, and what is not gathered again: the root, or all units.

    Gradients, and two numbers a parameter in Adam, are halved by both.
    """
    assert two[0]["held"][strategy] == {
        "parameters": 4 * parameters,
        "gradients": 4 * rest,
        "optimizer": 2 * 4 * rest,
        "c10d::_allgather_base_": gathers,
        "c10d::_reduce_scatter_base_": 4,
        "c10d::allreduce_": 0,
    }


@pytest.mark.slow
def test_no_shard_holds_all_and_sends_gradients_alone(two: list[dict[str, Any]]) -> None:
    found = two[0]["held"]["NO_SHARD"]
    assert (found["gradients"], found["optimizer"], found["c10d::allreduce_"]) == (4 * ALL, 8 * ALL, 4)
    assert found["parameters"] == 4 * (ALL + ROOT)


@pytest.mark.slow
def test_an_overflow_of_one_rank_skips_the_step_on_all(two: list[dict[str, Any]]) -> None:
    """`16-mixed`: the gradient scaler of torch looks at the gradients of all shards."""
    for found in two:
        first, overflowing, last = found["overflow"]
        assert overflowing == 0.0
        assert min(first, last) > 0.001


@pytest.mark.slow
def test_wrap_chooses_units_beside_those_of_a_policy(two: list[dict[str, Any]]) -> None:
    """`auto` stands back; classes are units as well."""
    alone, both = two[0]["units"]
    assert alone == ["", "inlet", "blocks.1"]
    assert both == ["", "inlet", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.slow
def test_what_a_module_does_to_itself_and_cannot_be_is_refused(two: list[dict[str, Any]]) -> None:
    """Settings that would have no effect, and wrappers of FullyShardedDataParallel."""
    own, unit, first = two[0]["refused"]
    assert "the module shards itself, so that cpu_offload, sharding_strategy would have no effect" in own
    assert "wrap(Linear(...)) is given reshard_after_forward, which would have no effect" in unit
    assert "Linear is wrapped in FullyShardedDataParallel" in first
