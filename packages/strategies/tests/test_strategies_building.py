"""What the runtimes build from a config, and what is said before a run, without training."""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from pydantic import create_model

from fairlead import CheckpointIOConfigBase, PluginManager, PrecisionConfigBase, Topology
from fairlead.errors import ConfigError, MissingDependencyError, UserCodeError
from fairlead.install import install_line
from fairlead.open_union import parse_backend
from fairlead_strategies import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDP2StrategyConfig,
    FSDPStrategyConfig,
    TorchSyncBatchNormLayerSyncConfig,
)


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def build(config: Any, context: Any) -> Any:
    return pkgutil.resolve_name(str(PluginManager().of(config).runtime))(config, context)


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [
        ("deepspeed", 1, False, False),
        ("deepspeed_stage_1", 1, False, False),
        ("deepspeed_stage_2", 2, False, False),
        ("deepspeed_stage_2_offload", 2, True, False),
        ("deepspeed_stage_3", 3, False, False),
        ("deepspeed_stage_3_offload", 3, True, True),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of deepspeed's own imports
@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_deepspeed_literals_reach_deepspeed(
    plugins: PluginManager, ranks: ModuleType, name: str, stage: int, optimizer: bool, parameters: bool, engine: str
) -> None:
    """The stage is in the configuration that DeepSpeed gets; plain `deepspeed` is stage 1."""
    config = parse_backend("strategy", name, plugins)
    zero = build(config, ranks.context(config, engine)).config["zero_optimization"]
    assert zero["stage"] == stage
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (optimizer, parameters)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deepspeed_fields_reach_deepspeed(ranks: ModuleType) -> None:
    """Each other value than the default."""
    offload: Any = {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "pin_memory": True}
    config = DeepSpeedStrategyConfig(**offload, cpu_checkpointing=True, contiguous_gradients=False, overlap_comm=False)
    given = build(config, ranks.context(config)).config
    zero = given["zero_optimization"]
    assert (zero["contiguous_gradients"], zero["overlap_comm"]) == (False, False)
    assert (zero["offload_optimizer"]["pin_memory"], zero["offload_param"]["pin_memory"]) == (True, True)
    assert given["activation_checkpointing"]["cpu_checkpointing"] is True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deepspeed_config_files(tmp_path: Path, ranks: ModuleType) -> None:
    """A JSON file or a dict; both round-trip, and nothing of ours is mixed in."""
    own = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    path = tmp_path / "deepspeed_config.json"
    path.write_text(json.dumps(own))
    for given in (str(path), path, own):
        config = DeepSpeedStrategyConfig.model_validate({"config": given})
        assert config.stage is None
        assert DeepSpeedStrategyConfig.model_validate(config.model_dump(mode="json")) == config
        assert build(config, ranks.context(config)).config == own
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        build(config := DeepSpeedStrategyConfig(config=str(path)), ranks.context(config))
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        build(config, ranks.context(config))
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        build(config, ranks.context(config))


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_each_engine_gets_its_own_family(ranks: ModuleType, engine: str) -> None:
    import lightning.fabric.strategies as fabric
    import lightning.pytorch.strategies as trainer

    family = trainer if engine == "trainer" else fabric
    for config, kind in (
        (DDPStrategyConfig(timeout=timedelta(seconds=7)), "DDPStrategy"),
        (FSDPStrategyConfig(timeout=timedelta(seconds=7)), "ModelParallelStrategy"),
        (FSDP2StrategyConfig(timeout=timedelta(seconds=7)), "ModelParallelStrategy"),
    ):
        strategy = build(config, ranks.context(config, engine))
        assert isinstance(strategy, getattr(family, kind))
        assert (strategy.process_group_backend, strategy._timeout) == ("gloo", timedelta(seconds=7))
    named = DDPStrategyConfig(process_group_backend="nccl")
    assert build(named, ranks.context(named, engine)).process_group_backend == "nccl"


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
@pytest.mark.parametrize(
    ("kind", "indices", "device"), [("cpu", None, "cpu"), ("cuda", None, "cuda:0"), ("cuda", (3,), "cuda:3")]
)
def test_single_device_takes_the_first_chosen_device(
    plugins: PluginManager, ranks: ModuleType, engine: str, kind: str, indices: Any, device: str
) -> None:
    import torch

    from fairlead import AcceleratorConfigBase

    config = parse_backend("strategy", "single_device", plugins)
    accelerator = AcceleratorConfigBase(name=kind)
    changes = {"accelerator": accelerator, "device_type": kind, "device_indices": indices, "world_size": 1}
    strategy = build(config, ranks.context(config, engine, **changes))
    assert strategy.root_device == torch.device(device)


@pytest.mark.parametrize("engine", ["trainer", "fabric"])
def test_ddp_fields_reach_torch(ranks: ModuleType, engine: str) -> None:
    fields: dict[str, Any] = {
        "broadcast_buffers": False,
        "init_sync": False,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "bucket_cap_mb": 3,
    }
    config = DDPStrategyConfig(**fields)
    assert DDPStrategyConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert build(config, ranks.context(config, engine))._ddp_kwargs == fields


@pytest.mark.parametrize(
    ("fields", "layout", "frees"),
    [
        ({}, "shard 8", True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "shard 8", False),
        ({"sharding_strategy": "NO_SHARD"}, "replicate 8", True),
        ({"sharding_strategy": "HYBRID_SHARD"}, "replicate 2 x shard 4", True),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": [4, 2]}, "replicate 4 x shard 2", False),
    ],
)
def test_fsdp_is_a_mesh(ranks: ModuleType, fields: dict[str, Any], layout: str, frees: bool) -> None:
    """On two nodes of four ranks; under both engines."""
    config = FSDPStrategyConfig.model_validate(fields)
    assert FSDPStrategyConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert config.frees_units is frees
    for engine in ("trainer", "fabric"):
        strategy = build(config, ranks.context(config, engine, world_size=8, devices=4, num_nodes=2))
        assert (strategy.name, str(strategy.layout)) == ("fsdp", layout)


def test_fsdp_recomputes_layers_under_two_names() -> None:
    from torch.nn import TransformerEncoderLayer

    config = FSDPStrategyConfig.model_validate({"activation_checkpointing_policy": {TransformerEncoderLayer}})
    assert config == FSDPStrategyConfig.model_validate({"activation_checkpointing": {TransformerEncoderLayer}})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.at_all:Block", "no module 'nowhere'"),
        ("torch.nn:TransformerEncoderLayr", "did you mean 'TransformerEncoderLayer'"),
        ("torch.nn:functional", "not a class"),
    ],
)
def test_a_policy_that_names_no_class_is_an_error(ranks: ModuleType, path: str, says: str) -> None:
    config = FSDP2StrategyConfig(auto_wrap_policy=(path,))
    with pytest.raises((ConfigError, UserCodeError)) as caught:
        build(config, ranks.context(config))
    assert says in str(caught.value)
    assert "trainer.strategy.auto_wrap_policy" in str(caught.value)


def test_the_units_of_fsdp2() -> None:
    """What `auto` finds: lists of layers, outermost first, without those that share parameters with the rest."""
    from torch import nn

    from fairlead_strategies.mesh.parallelize import blocks

    inner = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2), nn.Identity()])
    model = nn.Sequential(nn.Embedding(5, 2), nn.Sequential(inner), nn.Linear(2, 5))
    assert blocks(model, "auto") == [inner[0], inner[1]]
    assert blocks(model, {nn.Embedding}) == [model[0]]
    assert blocks(model, set()) == []
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.Sequential(tied, nn.Linear(2, 2))
    model[1].weight = tied[0].weight
    assert blocks(model, "auto") == [tied[1]]
    with pytest.raises(ConfigError, match="the model has no Conv2d"):
        blocks(model, {nn.Conv2d})


def test_units_by_size() -> None:
    """From the inside out; a part of a unit that has enough does not count for what it is in, nor a list of layers."""
    from torch import nn

    from fairlead_strategies.mesh.parallelize import blocks

    small, large = nn.Linear(2, 2), nn.Linear(20, 20)
    model: Any = nn.Sequential(nn.ModuleList([nn.Sequential(small, nn.Linear(2, 2)), large]), nn.Linear(2, 2))
    assert blocks(model, 12) == [model[0][0], large]
    assert blocks(model, 13) == [large]
    assert blocks(model, 10_000) == []


def _always(value: int, _: object) -> int:
    return value


def test_workers_of_a_replica_draw_alike(ranks: ModuleType) -> None:
    """Lightning seeds a worker by the rank: the ranks of a tensor group would augment a sample in other ways."""
    from torch.utils.data import DataLoader

    from fairlead_strategies import HybridStrategyConfig

    config = HybridStrategyConfig(tensor=2, shard=2)
    samples: Any = [1, 2]
    for engine in ("trainer", "fabric"):
        strategy = build(config, ranks.context(config, engine, devices=4, world_size=4))
        places = []
        for rank in range(4):
            type(strategy).global_rank = property(functools.partial(_always, rank))
            loader: Any = strategy.process_dataloader(DataLoader(samples))
            places.append((loader.worker_init_fn.keywords["rank"], strategy.distributed_sampler_kwargs["rank"]))
        del type(strategy).global_rank
        assert places == [(0, 0), (0, 0), (1, 1), (1, 1)]
        own: Any = DataLoader(samples, worker_init_fn=print)
        assert strategy.process_dataloader(own).worker_init_fn is print


def test_xla_needs_torch_xla(plugins: PluginManager, ranks: ModuleType) -> None:
    """The core names the extra; Lightning's own refusal is the last line."""
    with pytest.raises(MissingDependencyError) as caught:
        plugins.require_engines("strategy", "xla")
    assert caught.value.fix == install_line("xla")
    config = parse_backend("strategy", "xla", plugins)
    for engine in ("trainer", "fabric"):
        with pytest.raises(ModuleNotFoundError, match="torch_xla"):
            build(config, ranks.context(config, engine, world_size=1))
    with pytest.raises(ModuleNotFoundError, match="torch_xla"):
        build(config, ranks.context(config, "trainer"))


def test_layer_sync_on_a_cpu_converts_in_place_and_back(ranks: ModuleType) -> None:
    import torch
    from torch import nn

    context = ranks.context(DDPStrategyConfig())
    layer_sync = build(TorchSyncBatchNormLayerSyncConfig(), context)
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    reference = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    reference.load_state_dict(model.state_dict())
    layer = model[1]
    assert layer_sync.apply(model) is model
    assert model[1] is layer
    assert type(layer) is not nn.BatchNorm2d
    x = torch.randn(4, 1, 2, 2)
    torch.testing.assert_close(model(x), reference(x))
    assert type(layer_sync.revert(model)[1]) is nn.BatchNorm2d
    with pytest.raises(ConfigError, match="Fabric does not apply"):
        build(TorchSyncBatchNormLayerSyncConfig(), ranks.context(DDPStrategyConfig(), "fabric"))


def findings(plugins: PluginManager, resolution: Any, environ: dict[str, str] | None = None) -> list[str]:
    plugin = plugins.of(resolution.strategy)
    calls = plugins.call(plugin, "fairlead_check", resolution=resolution, environ=environ or {})
    return [finding.code for result in calls for finding in result]


@pytest.mark.parametrize(
    ("config", "codes"),
    [
        (DDPStrategyConfig(), []),
        (DDPStrategyConfig(start_method="spawn"), ["ddp-start-method"]),
        (DDPStrategyConfig(ddp_comm_hook="bf16"), ["ddp-comm-hook"]),
        (DDPStrategyConfig(ddp_comm_hook="bf16", process_group_backend="nccl"), []),
        (DDPStrategyConfig(ddp_comm_hook="fp16"), []),
        (DDPStrategyConfig(exact_reduction="on", process_group_backend="nccl"), []),
        (DDPStrategyConfig(exact_reduction="on", ddp_comm_hook="fp16"), ["ddp-exact-reduction"]),
        (FSDPStrategyConfig(), []),
        (FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), ["mesh-sizes"]),
        (FSDP2StrategyConfig(), []),
        (FSDP2StrategyConfig(tensor=2), ["mesh-layout"]),
        (FSDP2StrategyConfig(tensor=3), ["mesh-sizes"]),
        (FSDP2StrategyConfig(shard=4), ["mesh-sizes"]),
        (FSDP2StrategyConfig(state_dict_type="sharded"), ["mesh-checkpoint-io"]),
        (DeepSpeedStrategyConfig(), []),
    ],
)
def test_what_does_not_fit_the_run_is_said_before_it(
    plugins: PluginManager, ranks: ModuleType, config: Any, codes: list[str]
) -> None:
    assert findings(plugins, ranks.resolution(config)) == codes
    assert set(codes) <= set(plugins.of(config).codes)


def test_fsdp2_gives_its_shards_to_a_backend_that_takes_them(plugins: PluginManager, ranks: ModuleType) -> None:
    """By itself; what is gathered on rank 0 would be no shards."""

    class Shards(CheckpointIOConfigBase):
        saves_shards: ClassVar[bool] = True

    takes = {"checkpoint_io": Shards(name="shards")}
    for asked, codes in ((None, []), ("sharded", []), ("full", ["mesh-checkpoint-io"])):
        config = FSDP2StrategyConfig.model_validate({"state_dict_type": asked})
        assert findings(plugins, ranks.resolution(config, **takes)) == codes
        strategy = build(config, ranks.context(config, **takes))
        assert strategy._save_distributed_checkpoint is True
    assert build(FSDP2StrategyConfig(), ranks.context(FSDP2StrategyConfig()))._save_distributed_checkpoint is False


@pytest.mark.parametrize(("init_scale", "codes"), [(8.0, ["precision-scaler"]), (65536.0, [])])
def test_deepspeed_does_not_use_the_gradient_scaler(
    plugins: PluginManager, ranks: ModuleType, init_scale: float, codes: list[str]
) -> None:
    """Of any precision that has its settings."""
    kind = create_model("Scaled", __base__=PrecisionConfigBase, init_scale=(float, 65536.0))
    precision = kind.model_validate({"name": "scaled", "init_scale": init_scale})
    resolution = ranks.resolution(DeepSpeedStrategyConfig(), precision=precision)
    assert findings(plugins, resolution) == codes


def test_spawning_is_fine_where_nothing_was_launched(plugins: PluginManager, ranks: ModuleType) -> None:
    resolution = ranks.resolution(DDPStrategyConfig(start_method="spawn"), topology=Topology(launched=False))
    assert findings(plugins, resolution) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_variable_that_replaces_lightnings_settings_has_no_effect_here(
    plugins: PluginManager, ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, and true."""
    path = tmp_path / "other.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    environ = {"PL_DEEPSPEED_CONFIG_PATH": str(path)}
    config = DeepSpeedStrategyConfig(stage=2)
    assert findings(plugins, ranks.resolution(config), environ) == ["deepspeed-environment"]
    assert findings(plugins, ranks.resolution(DeepSpeedStrategyConfig(config=str(path))), environ) == []
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    assert build(config, ranks.context(config)).config["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.full), "fork"])
def test_ddp_starts_its_own_ranks(tmp_path: Path, method: str) -> None:
    """Each of these trains on two ranks, whose weights stay equal."""
    script, out = Path(__file__).parent / "spawned.py", tmp_path / "out.json"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), method, str(out)], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == {"world": 2, "same": True}
