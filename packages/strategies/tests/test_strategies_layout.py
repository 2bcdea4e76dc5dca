"""Sizes of a mesh, what they are called elsewhere, and what is said of them before a run; no torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from fairlead import JobConfig, PluginManager, PrecisionConfigBase, TrainerConfig
from fairlead.errors import ConfigError
from fairlead_runs.batch_size import GlobalBatch, batch_plan, data_ranks, for_each_rank, replicas_of
from fairlead_strategies import FSDP2StrategyConfig, HybridStrategyConfig, TensorParallelStrategyConfig
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig

FP8 = PrecisionConfigBase(name="fp8-torchao")


def findings(resolution: Any) -> list[Any]:
    plugins = PluginManager()
    plugin = plugins.of(resolution.strategy)
    calls = plugins.call(plugin, "fairlead_check", resolution=resolution, environ={})
    return [finding for result in calls for finding in result]


def test_ranks_lie_with_the_tensor_groups_innermost() -> None:
    """Ranks of a tensor group are neighbours, and so in a node; those of a pipeline are farthest apart."""
    layout = Layout.of(16, {"pipeline": 2, "replicate": 2, "shard": "auto", "tensor": 2})
    assert layout.dimensions() == {"pipeline": 2, "replicate": 2, "shard": 2, "tensor": 2}
    assert [layout.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert layout.data_parallel == 4
    context = Layout.of(8, {"shard": 2, "context": 2, "tensor": 2})
    assert [context.data_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert Layout.of(4, {"tensor": 4}).dimensions() == {"shard": 1, "tensor": 4}


@pytest.mark.parametrize(
    ("world", "sizes", "says"),
    [
        (8, {"shard": 2, "tensor": 2}, "shard 2 x tensor 2 = 4 is not the number of ranks"),
        (2, {"shard": 2, "tensor": 2}, "= 4 is not the number of ranks"),
        (8, {"shard": "auto", "tensor": 3}, "tensor 3 does not divide the 8 ranks"),
        (2, {"shard": "auto", "tensor": 4}, "tensor 4 does not divide the 2 ranks"),
        (8, {"shard": "auto", "tensor": "auto"}, "shard and tensor cannot both be auto"),
        (8, {"shard": 8, "expert": 3}, "expert 3 does not divide shard 8"),
        (8, {"expert": "auto"}, "expert cannot be auto"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world_size(world: int, sizes: Any, says: str) -> None:
    """An error with the numbers; nothing is adjusted."""
    with pytest.raises(ConfigError) as caught:
        Layout.of(world, sizes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (HybridStrategyConfig, {"tensor": 0}, "greater than 0"),
        (FSDP2StrategyConfig, {"context": 2}, "Extra inputs"),
        (FSDP2StrategyConfig, {"plan": "auto"}, "Extra inputs"),
        (TensorParallelStrategyConfig, {"plan": {}}, "nothing would be split"),
        (TensorParallelStrategyConfig, {"shard": 2}, "Extra inputs"),
        (FSDP2StrategyConfig, {"auto_wrap_policy": 0}, "greater than 0"),
        (FSDP2StrategyConfig, {"mixed_precision": {"param_dtype": "fp8"}}, "float32"),
    ],
)
def test_wrong_values_are_refused(kind: type[MeshStrategyConfig], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        kind.model_validate(fields)


@pytest.mark.parametrize(
    ("config", "changes", "codes"),
    [
        (FSDP2StrategyConfig(), {}, []),
        (HybridStrategyConfig(tensor=2), {}, ["mesh-layout"]),
        (HybridStrategyConfig(tensor=3), {}, ["mesh-sizes"]),
        (HybridStrategyConfig(expert=2), {}, ["mesh-layout"]),
        (HybridStrategyConfig(expert=2, context=2), {"world_size": 4}, []),
        (HybridStrategyConfig(expert=2, tensor=2), {"world_size": 4}, []),
        (HybridStrategyConfig(expert=2, tensor=2, sequence_parallel=True), {"world_size": 4}, ["hybrid-expert"]),
        (HybridStrategyConfig(expert=2, pipeline=2), {"world_size": 4}, ["pipeline-bubble"]),
        (HybridStrategyConfig(expert=2, tensor=2), {"world_size": 4, "precision": FP8}, []),
        (HybridStrategyConfig(replicate=2, expert=2), {}, ["mesh-sizes"]),
        (TensorParallelStrategyConfig(), {"num_nodes": 2, "devices": 4, "world_size": 8}, ["mesh-tensor-nodes"]),
        (TensorParallelStrategyConfig(tensor=4, replicate=2), {"num_nodes": 2, "devices": 4, "world_size": 8}, []),
        (FSDP2StrategyConfig(cpu_offload=True), {}, []),
        (FSDP2StrategyConfig(cpu_offload=True), {"device_type": "cuda", "backend": "nccl"}, ["mesh-offload"]),
        (FSDP2StrategyConfig(cpu_offload=True), {"device_type": "cuda", "backend": "cpu:gloo,cuda:nccl"}, []),
    ],
)
def test_what_is_said_before_a_run(ranks: ModuleType, config: Any, changes: Any, codes: list[str]) -> None:
    found = findings(ranks.resolution(config, **changes))
    old = {"engine-too-old"}  # what an old torch adds for pipelines and experts has its test elsewhere
    said = [one.code for one in found if one.code not in old]
    assert [code for code in said if code != "mesh-layout" or codes == ["mesh-layout"]] == codes


def test_a_size_that_was_worked_out_is_explained(ranks: ModuleType) -> None:
    found = findings(ranks.resolution(HybridStrategyConfig(tensor=2, replicate=2), world_size=16))
    assert [one.what for one in found] == [
        "mesh: replicate 2 x shard 4 x tensor 2, with shard: auto = 16 ranks / (replicate 2 x tensor 2) = 4"
    ]


def test_ranks_that_share_a_batch_count_once(ranks: ModuleType) -> None:
    """In the global batch, and for who resumes with what."""
    resolution = ranks.resolution(HybridStrategyConfig(tensor=2, shard=2), world_size=4)
    assert data_ranks(resolution) == 2
    assert data_ranks(ranks.resolution(FSDP2StrategyConfig(), world_size=4)) == 4

    class Runs:
        layout = Layout.of(4, {"shard": 2, "tensor": 2})

    assert replicas_of(Runs(), 4) == (2, 2)
    assert replicas_of(object(), 4) == (4, 1)


def test_another_layout_on_as_many_ranks_asks_what_to_keep(ranks: ModuleType) -> None:
    """Four shards took four batches to a step, two tensor groups take two."""
    before = {"world_size": 4, "accumulate_grad_batches": 1, "replicas": [4, 1]}
    config = HybridStrategyConfig(tensor=2)
    with pytest.raises(ConfigError, match="4 replicas of the model and would resume with 2"):
        batch_plan(ranks.resolution(config, world_size=4), before)
    keep = TrainerConfig(batch_policy="keep_global")
    assert batch_plan(ranks.resolution(config, world_size=4, trainer=keep), before) == 2
    assert batch_plan(ranks.resolution(FSDP2StrategyConfig(), world_size=4), before) == 1


def test_a_global_batch_is_divided_by_the_replicas(ranks: ModuleType) -> None:
    job = JobConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"class": "m:M"},
            "data": {"class": "d:D", "args": {"batch_size": 8}},
            "trainer": {"batch_size": "global"},
        }
    )
    shared = for_each_rank(job, ranks.resolution(HybridStrategyConfig(tensor=2), world_size=4))
    assert shared.data is not None
    assert shared.data.args["batch_size"] == 4
    assert str(GlobalBatch(4, ranks=2, shared_by=2)) == "4 per replica x 2 replicas of 2 devices"
