"""Configs, their presets and their other names."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from fairlead import PluginManager
from fairlead.open_union import parse_backend
from fairlead_strategies import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDP2StrategyConfig,
    FSDPStrategyConfig,
)

NAMES = [
    "single_device",
    "ddp",
    "ddp_find_unused_parameters_true",
    "ddp_spawn",
    "ddp_fork",
    "ddp_fork_find_unused_parameters_true",
    "ddp_notebook",
    "ddp_spawn_find_unused_parameters_false",
    "fsdp",
    "fsdp_native",
    "fsdp2",
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
    "xla",
]


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


@pytest.mark.parametrize("name", NAMES)
def test_every_literal_becomes_a_config_that_round_trips(plugins: PluginManager, name: str) -> None:
    config = parse_backend("strategy", name, plugins)
    for written in (config.model_dump(), config.model_dump(mode="json"), json.loads(config.model_dump_json())):
        assert parse_backend("strategy", written, plugins) == config
    assert plugins.label(config) == {
        "fsdp_native": "fsdp",
        "ddp_notebook": "ddp_fork",
        "ddp_spawn_find_unused_parameters_false": "ddp_spawn",
        "deepspeed": "deepspeed_stage_1",
    }.get(name, name)


def test_every_name_of_lightnings_is_known(plugins: PluginManager) -> None:
    """13 of 26 were not, although they are the same classes with other arguments."""
    from lightning.pytorch.strategies import StrategyRegistry

    names = StrategyRegistry.available_strategies()
    assert len(names) >= 26
    assert set(names) <= set(plugins.names("strategy"))
    assert plugins.label(parse_backend("strategy", "ddp", plugins)) == "ddp"
    nvme = parse_backend("strategy", "deepspeed_stage_3_offload_nvme", plugins)
    assert (nvme.offload_optimizer_device, nvme.offload_params_device) == ("nvme", "nvme")  # type: ignore[attr-defined]


def test_document_names_and_presets_are_found(plugins: PluginManager) -> None:
    assert plugins.get("layer_sync", "torch_sync_batchnorm").aliases == ("TorchSyncBatchNormPlugin",)
    assert parse_backend("strategy", "ddp_find_unused_parameters_true", plugins) == DDPStrategyConfig(
        find_unused_parameters=True
    )


def test_bucket_size_has_two_names(plugins: PluginManager) -> None:
    config = parse_backend("strategy", {"name": "ddp", "bucket_size_mb": 3}, plugins)
    assert config == DDPStrategyConfig(bucket_cap_mb=3)
    with pytest.raises(ValidationError, match="give one of them"):
        parse_backend("strategy", {"name": "ddp", "bucket_size_mb": 3, "bucket_cap_mb": 3}, plugins)


@pytest.mark.parametrize(("written", "seconds"), [("00:30:10", 1810), (90, 90), (0.5, 0.5), ("PT2M", 120)])
def test_timeouts_are_text_or_seconds(written: Any, seconds: float) -> None:
    assert DDPStrategyConfig.model_validate({"timeout": written}).timeout == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (DDPStrategyConfig, {"timeout": 0}, "greater than"),
        (DDPStrategyConfig, {"find_unused_parameters": "yes"}, "boolean"),
        (DDPStrategyConfig, {"bucket_cap_mb": 0}, "greater than"),
        (DDPStrategyConfig, {"exact_reduction": "nccl"}, "'auto', 'on' or 'off'"),
        (FSDPStrategyConfig, {"sharding_strategy": "FULL"}, "FULL_SHARD"),
        (FSDPStrategyConfig, {"device_mesh": [2, 2]}, "hybrid"),
        (FSDPStrategyConfig, {"use_orig_params": False}, "it always keeps the model's own parameters; leave it out"),
        (FSDPStrategyConfig, {"backward_prefetch": None, "forward_prefetch": True}, "leave them out"),
        (FSDPStrategyConfig, {"auto_wrap_policy": ["Block"]}, "match"),
        (
            FSDPStrategyConfig,
            {"activation_checkpointing": ["a:B"], "activation_checkpointing_policy": ["a:B"]},
            "give one of them",
        ),
        (FSDP2StrategyConfig, {"auto_wrap_policy": "all"}, "auto"),
        (DeepSpeedStrategyConfig, {"stage": 4}, "0, 1, 2 or 3"),
        (DeepSpeedStrategyConfig, {"offload_parameters": True}, "needs `stage: 3`"),
        (DeepSpeedStrategyConfig, {"stage": 0, "offload_optimizer": True}, "needs a ZeRO stage"),
        (DeepSpeedStrategyConfig, {"stage": None}, "unless `config`"),
        (DeepSpeedStrategyConfig, {"config": "ds.json", "stage": 2}, "no effect beside `config`"),
        (DeepSpeedStrategyConfig, {"config": {}, "overlap_comm": True}, "`overlap_comm` would have no effect"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(kind: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        kind.model_validate(fields)


def test_configs_and_plugins_import_no_torch() -> None:
    """Rule 1: in a fresh interpreter."""
    code = (
        "import sys; from fairlead import PluginManager; p = PluginManager(); "
        "r = [r for a in ('strategy', 'layer_sync') for r in p.records(a, load=True) if r.error]; "
        "print(r, [m for m in ('torch', 'lightning', 'numpy', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
