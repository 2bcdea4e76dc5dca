# Classes found by name have no declared fields.
# mypy: disable-error-code="call-arg, attr-defined, arg-type"
"""Document A's examples with the package renamed: its names, its literals, its way to list plugins."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import fairlead.configs
from fairlead import FairleadError, RunConfig, Trainer, TrainerConfig
from fairlead.config import ResourcesConfig
from fairlead.interfaces import Topology
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import Resolution, resolve

STRATEGIES = {
    "ddp": "ddp",
    "ddp_find_unused_parameters_true": "ddp",
    "ddp_spawn": "ddp",
    "fsdp": "fsdp",
    "fsdp_native": "fsdp",
    "deepspeed": "deepspeed",
    "deepspeed_stage_2": "deepspeed",
    "deepspeed_stage_3": "deepspeed",
    "deepspeed_stage_3_offload": "deepspeed",
    "single_device": "single_device",
}
ACCELERATORS = {"CPU": ["cpu"], "CUDA": ["cuda", "gpu"], "MPS": ["mps"], "XLA": ["xla", "tpu"]}
PLUGINS = {
    "precision": [
        "MixedPrecisionPluginConfig",
        "HalfPrecisionPluginConfig",
        "DoublePrecisionPluginConfig",
        "FSDPPrecisionPluginConfig",
        "DeepSpeedPluginConfig",
        "BitsandbytesPluginConfig",
        "TransformerEnginePluginConfig",
        "XLAPluginConfig",
    ],
    "environment": [
        "SLURMEnvironmentPlugin",
        "LSFEnvironmentPlugin",
        "TorchElasticEnvironmentPlugin",
        "KubeflowEnvironmentPlugin",
        "LightningEnvironmentPlugin",
        "MPIEnvironmentPlugin",
        "XLAEnvironmentPlugin",
    ],
    "checkpoint_io": ["TorchCheckpointIOPlugin", "AsyncCheckpointIOPlugin", "XLACheckpointIOPlugin"],
    "layer_sync": ["TorchSyncBatchNormPlugin"],
}
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


@pytest.fixture
def plugins() -> PluginManager:
    return default_plugins()


def resolved(config: TrainerConfig, plugins: PluginManager, environ: dict[str, str] | None = None) -> Resolution:
    return resolve(config, environ=environ or {}, plugins=plugins)


def test_the_first_example(plugins: PluginManager) -> None:
    """Four ranks of DDP on one node."""
    config = TrainerConfig(strategy="ddp", devices=4, num_nodes=1)
    found = resolved(config, plugins)
    assert (found.strategy.name, found.world_size, found.num_nodes) == ("ddp", 4, 1)


@pytest.mark.parametrize("literal", STRATEGIES)
def test_every_strategy_literal(literal: str, plugins: PluginManager) -> None:
    """Each is a config, or says which package brings it."""
    try:
        config = TrainerConfig.model_validate({"strategy": literal})
    except FairleadError as error:
        assert "pip install" in str(error.fix)  # noqa: PT017
        return
    assert config.strategy.name == STRATEGIES[literal]  # type: ignore[union-attr]


def test_the_auto_strategy_is_chosen_from_the_hardware(plugins: PluginManager) -> None:
    one = TrainerConfig(strategy="auto", accelerator="cpu", devices=1)
    assert resolved(one, plugins).strategy.name == "single_device"
    two = TrainerConfig(strategy="auto", accelerator="cpu", devices=2)
    assert resolved(two, plugins).strategy.name == "ddp"


def test_a_strategy_config_instead_of_a_literal(plugins: PluginManager) -> None:
    from fairlead.configs import DDPStrategyConfig

    config = TrainerConfig(strategy=DDPStrategyConfig(bucket_cap_mb=50), accelerator="cpu", devices=2)
    assert resolved(config, plugins).strategy.bucket_cap_mb == 50


@pytest.mark.parametrize(("name", "literal"), [(n, x) for n, xs in ACCELERATORS.items() for x in xs])
def test_every_accelerator(name: str, literal: str, plugins: PluginManager) -> None:
    """By class and by each of its names."""
    kind = getattr(fairlead.configs, f"{name}AcceleratorConfig")
    by_literal = TrainerConfig.model_validate({"accelerator": literal}).accelerator
    assert isinstance(by_literal, kind)
    assert TrainerConfig(accelerator=kind()).accelerator == by_literal


def test_the_accelerator_example(plugins: PluginManager) -> None:
    """`cuda` on a machine that has none is said, not silently changed."""
    config = TrainerConfig(accelerator="cuda")
    profile = ResourcesConfig(nodes=1, devices_per_node=8, device="h100")
    found = resolve(config, environ={}, plugins=plugins, profile=profile)
    assert (found.accelerator.name, found.backend) == ("cuda", "nccl")


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis, names in PLUGINS.items() for name in names])
def test_every_plugin_class_of_its_tables(axis: str, name: str) -> None:
    """`from fairlead.configs import NAME`, and it fits into `plugins=[...]`."""
    kind: Any = getattr(importlib.import_module("fairlead.configs"), name)
    assert kind.axis == axis
    required = {field for field, info in kind.model_fields.items() if info.is_required()}
    assert not required  # document A makes each without arguments
    field = getattr(TrainerConfig(plugins=[kind()]), axis)
    assert isinstance(field, kind)


def test_the_plugin_example(plugins: PluginManager) -> None:
    """Three axes in one list."""
    from fairlead.configs import (
        AsyncCheckpointIOPlugin,
        MixedPrecisionPluginConfig,
        SLURMEnvironmentPlugin,
    )

    config = TrainerConfig(
        plugins=[
            MixedPrecisionPluginConfig(),
            SLURMEnvironmentPlugin(auto_requeue=True),
            AsyncCheckpointIOPlugin(),
        ],
    )
    assert isinstance(config.precision, MixedPrecisionPluginConfig)
    assert isinstance(config.environment, SLURMEnvironmentPlugin)
    assert isinstance(config.checkpoint_io, AsyncCheckpointIOPlugin)
    found = resolved(config, plugins, SLURM_STEP)
    assert found.environment.name == "slurm"
    assert found.checkpoint_io.name == "async"
    assert found.world_size == 8


def test_the_nodes_are_determined(plugins: PluginManager) -> None:
    """From SLURM, unless that is switched off."""
    assert TrainerConfig().auto_determine_num_nodes
    found = resolved(TrainerConfig(auto_determine_num_nodes=True), plugins, SLURM_STEP)
    assert found.num_nodes == 2
    assert "SLURM" in found.settings["num_nodes"].reason
    assert isinstance(found.topology, Topology)


def test_the_requeue_example(plugins: PluginManager) -> None:
    """The signal of the environment's shorthand reaches the requeuer."""
    from fairlead.configs import SLURMEnvironmentPlugin

    config = TrainerConfig(plugins=[SLURMEnvironmentPlugin(auto_requeue=True, requeue_signal="SIGUSR1")])
    found = resolved(config, plugins, SLURM_STEP)
    assert found.requeue.name == "slurm"
    assert list(found.requeue.signals) == ["SIGUSR1"]
    assert resolved(TrainerConfig(), plugins, SLURM_STEP).requeue.name == "slurm"
    off = TrainerConfig(plugins=[SLURMEnvironmentPlugin(auto_requeue=False)])
    assert resolved(off, plugins, SLURM_STEP).requeue.name == "none"


def test_the_bfloat16_example(plugins: PluginManager) -> None:
    """The question is answered on every machine, and the literal is a config."""
    from fairlead_precision import is_bf16_supported_no_emulation

    assert is_bf16_supported_no_emulation() in (True, False)
    config = TrainerConfig.model_validate({"precision": "bf16-mixed", "accelerator": "cpu"})
    assert resolved(config, plugins).settings["precision"].value == "bf16-mixed"


@pytest.mark.full
def test_a_trainer_is_built_from_the_list(tmp_path: Path) -> None:
    """The objects that Lightning gets are those of the list."""
    from fairlead.configs import AsyncCheckpointIOPlugin, DoublePrecisionPluginConfig

    config = TrainerConfig(
        accelerator="cpu",
        devices=1,
        plugins=[DoublePrecisionPluginConfig(), AsyncCheckpointIOPlugin()],
    )
    trainer = Trainer(config, run=RunConfig(dir=str(tmp_path)))
    assert trainer.precision == "64-true"
    assert type(trainer.strategy.checkpoint_io).__name__ == "AsyncFileCheckpointIO"
