"""The XLA strategies without torch-xla: what is resolved, and what is refused; `integration_tests/xla` trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from fairlead import PluginManager
from fairlead.checks import check_trainer
from fairlead.config import ResourcesConfig, TrainerConfig
from fairlead.exactness import device_reasons, verdict
from fairlead.findings import Finding
from fairlead.open_union import parse_backend
from fairlead_strategies.xla import XLAStrategyConfig


def errors(found: Iterable[Finding]) -> list[str]:
    """Without that torch-xla is not installed here."""
    return [one.code for one in found if one.severity == "error" and one.code != "plugin-missing"]


@pytest.mark.parametrize(
    ("name", "debug"), [("xla", False), ("xla_debug", True), ("single_xla", False), ("single_tpu", False)]
)
def test_every_literal_of_lightnings(name: str, debug: bool) -> None:
    config = parse_backend("strategy", name, PluginManager())
    assert config == XLAStrategyConfig(debug=debug)


@pytest.mark.parametrize("devices", [1, 4])
def test_auto_takes_it_on_a_tpu(devices: int) -> None:
    """With the XLA backend, and the checkpoint backend that it accepts; one process drives all devices of a host."""
    profile = ResourcesConfig(device="v4-8", devices_per_node=devices)
    resolution, found = check_trainer(TrainerConfig(), environ={}, plugins=PluginManager(), profile=profile)
    assert resolution.value("strategy") == "xla"
    assert resolution.value("accelerator") == "xla"
    assert resolution.value("checkpoint_io") == "xla"
    assert resolution.settings["checkpoint_io"].reason == "the strategy xla accepts no other"
    assert resolution.backend == "xla"
    assert resolution.world_size == 1
    assert (resolution.devices, resolution.devices_per_rank) == (1, devices)
    assert errors(found) == []


def test_several_hosts_have_a_rank_per_chip() -> None:
    """As Lightning's strategy has, which splits nothing but the batch."""
    profile = ResourcesConfig(device="v4-8", devices_per_node=4, nodes=2)
    config = TrainerConfig.model_validate({"strategy": {"name": "xla", "sharding_strategy": "FULL_SHARD"}})
    resolution, found = check_trainer(config, environ={}, plugins=PluginManager(), profile=profile)
    assert (resolution.world_size, resolution.devices, resolution.devices_per_rank) == (8, 4, 1)
    assert errors(found) == ["xla-hosts"]


def test_some_of_several_devices_are_refused() -> None:
    profile = ResourcesConfig(device="v4-8", devices_per_node=4)
    config = TrainerConfig.model_validate({"devices": 2})
    _, found = check_trainer(config, environ={}, plugins=PluginManager(), profile=profile)
    assert errors(found) == ["xla-devices"]


def test_the_checkpoint_backend_of_another_strategy_is_refused() -> None:
    config = TrainerConfig.model_validate({"checkpoint_io": "torch"})
    profile = ResourcesConfig(device="v4-8", devices_per_node=4)
    _, found = check_trainer(config, environ={}, plugins=PluginManager(), profile=profile)
    assert {one.fix for one in found if one.code == "capability"} == {"checkpoint_io: xla"}


@pytest.mark.parametrize(
    ("device", "nodes", "expected"), [("CPU", 1, "exact"), ("TPU v4-8", 1, "not known"), ("CPU", 2, "not known")]
)
def test_what_is_said_of_an_exact_resume(device: str, nodes: int, expected: str) -> None:
    """What tests have shown, and no more."""
    plugins = PluginManager()
    profile = ResourcesConfig(device="v4-8", devices_per_node=4, nodes=nodes)
    resolution, _ = check_trainer(TrainerConfig(), environ={}, plugins=plugins, profile=profile)
    found = dataclasses.replace(resolution.devices_found, names=(device,) * 4)
    assert verdict(device_reasons(dataclasses.replace(resolution, devices_found=found), plugins)) == expected


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "single_device"])
def test_other_strategies_are_refused_on_a_tpu(strategy: str) -> None:
    config = TrainerConfig.model_validate({"strategy": strategy})
    profile = ResourcesConfig(device="v5p-128", devices_per_node=4)
    _, found = check_trainer(config, environ={}, plugins=PluginManager(), profile=profile)
    refused = [one.severity for one in found if one.code == "capability" and one.fix == "strategy: xla"]
    assert refused == ["error"]
