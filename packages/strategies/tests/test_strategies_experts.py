"""Real ranks over gloo that share the experts of a model's mixtures, against one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.engines import too_old
from fairlead_distributed.testing import run_ranks
from fairlead_strategies import FSDP2StrategyConfig, HybridStrategyConfig
from fairlead_strategies.mesh.runtime import MeshStrategy

OLD = too_old("expert")
pytestmark = pytest.mark.skipif(OLD is not None, reason=str(OLD))
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
CLOSE = 2e-6
"""Largest difference of anything after some steps: the order of float32 additions differs."""
CLIP = 0.05
SHORT: Any = {"limit_train_batches": 2}
MIXED: Any = {"net": {"kind": "Mixed"}, "gradient_clip_val": CLIP}
TWICE: Any = {**MIXED, "accumulate_grad_batches": 2}

PAIRS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # which match the experts' layers, too
HEADS = {"blocks.*.qkv": "packed:1,1,1", "blocks.*.out": "rowwise"}

Cases = dict[str, tuple[dict[str, Any], dict[str, Any]]]
TWO: Cases = {"expert 2": ({"expert": 2}, MIXED)}
SHARDED, COPIED, SPLIT = "expert 2 of shard 4, again in backward", "replicate 2 x expert 2", "expert 2 x tensor 2"
FOUR: Cases = {
    SHARDED: (
        {"expert": 2, "activation_checkpointing": ("expert_runs:MixtureBlock",)},
        TWICE,
    ),
    COPIED: ({"expert": 2, "replicate": 2}, TWICE),
    # An epoch ends with a batch whose tokens `tensor` does not divide.
    SPLIT: ({"expert": 2, "tensor": 2, "plan": PAIRS}, TWICE),
    "attention split": (
        {"expert": 2, "tensor": 2, "plan": HEADS},
        {"net": {"kind": "MixedText"}, "gradient_clip_val": CLIP},
    ),
}
MORE: Cases = {
    "expert 4": ({"expert": 4}, MIXED),
    "again in backward, each expert": ({"expert": 2, "activation_checkpointing": ("expert_runs:Expert",)}, MIXED),
    "offloaded": ({"expert": 2, "cpu_offload": True}, MIXED),
    "kept": ({"expert": 2, "reshard_after_forward": False}, MIXED),
    "unsharded": ({"expert": 2, "accumulate_unsharded": True}, TWICE),
    "wrapped by size, with formats": (
        {"expert": 2, "auto_wrap_policy": 200, "mixed_precision": {"param_dtype": "float32"}},
        MIXED,
    ),
    "wrapped by class": ({"expert": 2, "auto_wrap_policy": ("expert_runs:Expert", "torch.nn:LayerNorm")}, MIXED),
    "context 2": ({"expert": 2, "context": 2}, {"net": {"kind": "MixedText"}, "gradient_clip_val": CLIP}),
}


def runs() -> tuple[Any, Any]:
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module("mesh_runs"), importlib.import_module("expert_runs")


def equal(cases: Cases) -> dict[str, Any]:
    """Of each case how far it is from one process, and what is asked of its model besides."""
    run, experts = runs()
    found, references = {}, {}
    for name, (fields, options) in cases.items():
        key = str(options)
        if key not in references:
            references[key] = run.alone(**options)
        loop, net = run.fit(HybridStrategyConfig.model_validate(fields), **options)
        assert isinstance(loop.strategy, MeshStrategy)
        found[name] = run.compared(net, references[key], run.weights(run.seeded(100, **options["net"])))
        found[name]["held"] = run.parts(loop, net)
        if cases is not MORE:
            found[name]["divergence"], found[name]["norms"] = experts.divergence(net), experts.norms(net)
    return found


def two_ranks(rank: int, folder: str) -> dict[str, Any]:
    """What two ranks found."""
    run, experts = runs()
    path, config = Path(folder), HybridStrategyConfig(expert=2)
    return {
        "equal": equal(TWO),
        "layouts": run.through_layouts([config, FSDP2StrategyConfig()], path, **MIXED, **SHORT),
        "shards": experts.through_shards(config, path, **MIXED, **SHORT),
        "refused": experts.refusals(),
        "fabric": experts.fabric(path),
        "shards of fabric": experts.fabric_in_shards(path),
    }


def four_ranks(rank: int, folder: str) -> dict[str, Any]:
    """What four ranks found."""
    return {"equal": equal(FOUR)}


def more_of_four(rank: int, folder: str) -> dict[str, Any]:
    """What takes longer."""
    run, experts = runs()
    path, config = Path(folder), HybridStrategyConfig(expert=2)
    copies = HybridStrategyConfig(expert=2, replicate=2)
    return {
        "equal": equal(MORE),
        "layouts": run.through_layouts(
            [config, FSDP2StrategyConfig(), HybridStrategyConfig(expert=4), copies], path, **MIXED
        ),
        "shards": experts.through_shards(config, path, **MIXED),
        "shards of copies": experts.through_shards(copies, path, **MIXED),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(two_ranks, 2, str(tmp_path_factory.mktemp("two")), env=LAUNCHER, timeout=300)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_ranks(four_ranks, 4, str(tmp_path_factory.mktemp("four")), env=LAUNCHER, timeout=300)


def is_equal(found: dict[str, float]) -> None:
    """Each expert moves, and each counts once in the norm that gradients are clipped by."""
    for what in ("loss", "gradients", "clipped", "weights"):
        assert found[what] < CLOSE, what
    assert found["moved"] > 0.01
    assert found["norm"] > 4 * CLIP
    assert found["clipped_norm"] == pytest.approx(CLIP, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "name"),
    [*(("two", name) for name in TWO), *(pytest.param("four", name, marks=pytest.mark.full) for name in FOUR)],
)
def test_divided_experts_equal_one_process(request: pytest.FixtureRequest, fixture: str, name: str) -> None:
    """Loss, every gradient before and after clipping, and weights, though the ranks began with other weights."""
    is_equal(request.getfixturevalue(fixture)[0]["equal"][name])


@pytest.mark.full
@pytest.mark.slow
def test_a_rank_holds_its_experts_shards(four: list[dict[str, Any]]) -> None:
    """Of a weight outside of the experts a fourth, of an expert's a half on two ranks and nothing on the others."""
    held = [found["equal"][SHARDED]["held"] for found in four]
    for name, (_, _, size) in held[0].items():
        parts = [found[name] for found in held]
        assert sum(weight for weight, _, _ in parts) == size, name
        assert all(weight == moment for weight, moment, _ in parts), name
        if ".experts." in name:
            first = int(name.split(".experts.")[1][0]) // 2  # experts 0 and 1 lie on ranks 0 and 2
            assert [weight for weight, _, _ in parts] == [size // 2 * (rank % 2 == first) for rank in range(4)], name


@pytest.mark.slow
def test_a_checkpoint_of_experts_goes_on_in_other_layouts(two: list[dict[str, Any]]) -> None:
    """An epoch in a single process, one divided, one sharded, one in a single process: as four in a single process."""
    assert two[0]["layouts"] < CLOSE


@pytest.mark.slow
def test_experts_resume_from_shards_with_the_same_bits(two: list[dict[str, Any]]) -> None:
    assert [found["shards"] for found in two] == [True, True]


@pytest.mark.full
@pytest.mark.slow
def test_norms_count_the_experts_of_all_ranks(four: list[dict[str, Any]]) -> None:
    """The same on each rank; one that is no number is an error on all, and named by the ranks that hold it."""
    for found in (one["equal"][SHARDED]["norms"] for one in four):
        assert found["2"] == pytest.approx(1, rel=1e-6)
        assert found["inf"] == 1
        assert "is infinite or NaN" in found["no number"]
    assert "blocks.0.mixture.experts.2.up.weight" in four[3]["equal"][SHARDED]["norms"]["no number"]


@pytest.mark.full
@pytest.mark.slow
def test_copies_of_an_expert_are_compared(four: list[dict[str, Any]]) -> None:
    """Where there are any: a shard of an expert that only one rank holds may be what it is."""
    assert four[0]["equal"][COPIED]["divergence"] == [None, "blocks.0.mixture.experts.2.up.weight"]
    assert four[0]["equal"][SHARDED]["divergence"] == [None, None]


@pytest.mark.slow
def test_experts_that_cannot_be_divided_are_refused(two: list[dict[str, Any]]) -> None:
    tied, normed, returning, none = two[0]["refused"]
    assert "an expert shares a parameter" in tied
    assert "the expert has the buffer '0.1.running_mean'" in normed
    assert "does not compute what its parts say" in returning
    assert "has no mixture of experts" in none


@pytest.mark.slow
def test_fabric_goes_on_from_shards_of_experts(two: list[dict[str, Any]]) -> None:
    assert [found["shards of fabric"] for found in two] == [True, True]


@pytest.mark.slow
def test_fabric_divides_and_saves_experts(two: list[dict[str, Any]]) -> None:
    """As one process; what it saves, behind an evaluation, goes on with the same bits there, and in one process."""
    for found in (one["fabric"] for one in two):
        assert found["apart"] < CLOSE
        assert found["resumed"] is True
        assert (found["epoch"], found["left"]) == (3, {})
        assert found["alone"] < CLOSE


@pytest.mark.full
def test_more_layouts_of_experts(tmp_path: Path) -> None:
    """Other layouts, units and formats; checkpoints through several of them, whole and in shards."""
    everyone = run_ranks(more_of_four, 4, str(tmp_path), env=LAUNCHER, timeout=600)
    assert len(everyone[0]["equal"]) == len(MORE)
    for found in everyone[0]["equal"].values():
        is_equal(found)
    assert everyone[0]["layouts"] < CLOSE
    assert all(found["shards"] and found["shards of copies"] for found in everyone)
