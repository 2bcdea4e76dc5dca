"""What is said of a pipeline before it runs, and without torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.testing import write_dist
from fairlead_strategies import HybridStrategyConfig, PipelineParallelStrategyConfig


def findings(ranks: ModuleType, config: Any, world_size: int = 4, **changes: Any) -> dict[str, Any]:
    """By code: what `fairlead check` would say for so many ranks."""
    plugins = PluginManager()
    made = ranks.resolution(config, world_size=world_size, devices=world_size, **changes)
    results = plugins.call(plugins.of(config), "fairlead_check", resolution=made, environ={})
    return {finding.code: finding for result in results for finding in result}


def test_the_bubble_is_reported(ranks: ModuleType) -> None:
    found = findings(ranks, PipelineParallelStrategyConfig(micro_batches=12))["pipeline-bubble"]
    assert found.severity == "info"
    assert "wait 20% of each step: (4 - 1) / (12 + 4 - 1)" in found.what
    halved = PipelineParallelStrategyConfig(micro_batches=12, schedule="interleaved_1f1b")
    assert "wait 11% of each step: (4 - 1) / (2 x 12 + 4 - 1)" in findings(ranks, halved)["pipeline-bubble"].what


def test_fewer_micro_batches_than_stages_are_warned_of(ranks: ModuleType) -> None:
    found = findings(ranks, PipelineParallelStrategyConfig(micro_batches=3))["pipeline-micro-batches"]
    assert found.severity == "warning"
    assert "3 micro-batches are fewer than the 4 stages" in found.what
    assert "micro_batches: 16" in found.fix


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"schedule": "gpipe", "stages_per_rank": 2}, "pipeline-stages", "gpipe takes 1 stages a rank, not 2"),
        ({"schedule": "zbv_zero_bubble", "stages_per_rank": 3}, "pipeline-stages", "takes 2 stages a rank, not 3"),
        ({"schedule": "interleaved_1f1b", "micro_batches": 9}, "pipeline-micro-batches", "cannot be laid out for 9"),
        ({"state_dict_type": "sharded"}, "pipeline-checkpoint-io", "gathers its checkpoint on rank 0"),
        ({"pipeline": 1, "replicate": 4}, "pipeline-alone", "a pipeline of 1 rank, in 4"),
        ({"pipeline": 3}, "mesh-sizes", "is not the number of ranks"),
    ],
)
def test_what_does_not_fit_is_an_error(ranks: ModuleType, fields: dict[str, Any], code: str, words: str) -> None:
    found = findings(ranks, PipelineParallelStrategyConfig(**fields))[code]
    assert found.severity == "error"
    assert words in found.what


def test_a_hybrid_says_the_same(ranks: ModuleType) -> None:
    found = findings(ranks, HybridStrategyConfig(pipeline=2, shard=2, micro_batches=1))
    assert found["pipeline-micro-batches"].severity == "warning"
    assert not [c for c in findings(ranks, HybridStrategyConfig(shard=4)) if c.startswith("pipeline")]


def test_the_split_is_given_in_any_of_its_forms() -> None:
    forms: list[tuple[Any, Any]] = [
        ([8, 8, 8], (8, 8, 8)),
        (["blocks.8", "blocks.16"], ("blocks.8", "blocks.16")),
    ]
    for given, kept in forms:
        assert PipelineParallelStrategyConfig(split=given).split == kept
    wrongs: list[Any] = ["cost", [0, 4], [1.5]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="split"):
            PipelineParallelStrategyConfig(split=wrong)


@pytest.mark.parametrize(("version", "refused"), [("2.9.1", True), ("2.11.0+cu128", True), ("2.12.0", False)])
def test_what_needs_a_newer_torch_is_refused_with_the_reason(
    ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    """On a login node too, if torch is there; the rest of the package works with the older one."""
    write_dist(tmp_path, "torch", version=version, entry_points={}, files={})
    monkeypatch.syspath_prepend(tmp_path)
    for config, field in (
        (PipelineParallelStrategyConfig(), "pipeline"),
        (HybridStrategyConfig(expert=2), "expert"),
    ):
        found = findings(ranks, config).get("engine-too-old")
        assert (found is not None) is refused
        if found is not None:
            assert found.where == f"trainer.strategy.{field}"
            assert found.what == f"{field} parallelism needs torch 2.12 or newer; {version} is installed"
            assert found.fix == "pip install 'torch>=2.12'"
            assert found.why
    assert "engine-too-old" not in findings(ranks, HybridStrategyConfig(shard=4))
