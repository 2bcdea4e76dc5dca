"""The XLA strategies without torch-xla: what is resolved, what is built with a stand-in, and what is refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.checks import check_trainer
from fairlead.config import ResourcesConfig, TrainerConfig
from fairlead.open_union import parse_backend
from fairlead_strategies.xla import XLAStrategyConfig, build


@pytest.mark.parametrize(
    ("name", "debug"), [("xla", False), ("xla_debug", True), ("single_xla", False), ("single_tpu", False)]
)
def test_every_literal_of_lightnings(name: str, debug: bool) -> None:
    config = parse_backend("strategy", name, PluginManager())
    assert config == XLAStrategyConfig(debug=debug)


@pytest.mark.parametrize("devices", [1, 4])
def test_auto_takes_it_on_a_tpu(devices: int) -> None:
    """With the XLA backend; of checkpoint IOs Lightning's XLA strategies take their own only, which is said."""
    profile = ResourcesConfig(device="v4-8", devices_per_node=devices)
    config = TrainerConfig.model_validate({"checkpoint_io": "xla"})
    resolution, found = check_trainer(config, environ={}, plugins=PluginManager(), profile=profile)
    assert resolution.value("strategy") == "xla"
    assert resolution.value("accelerator") == "xla"
    assert resolution.backend == "xla"
    assert resolution.world_size == devices
    assert [one for one in found if one.code == "capability"] == []
    _, found = check_trainer(TrainerConfig(), environ={}, plugins=PluginManager(), profile=profile)
    assert {one.fix for one in found if one.code == "capability"} == {"checkpoint_io: xla"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "single_device"])
def test_other_strategies_are_refused_on_a_tpu(strategy: str) -> None:
    config = TrainerConfig.model_validate({"strategy": strategy})
    profile = ResourcesConfig(device="v5p-128", devices_per_node=4)
    _, found = check_trainer(config, environ={}, plugins=PluginManager(), profile=profile)
    refused = [one.severity for one in found if one.code == "capability" and one.fix == "strategy: xla"]
    assert refused == ["error"]


@pytest.mark.parametrize(
    ("engine", "world_size", "made", "arguments"),
    [
        ("trainer", 1, "SingleDeviceXLAStrategy", ((2,), {"debug": True})),
        ("fabric", 1, "SingleDeviceXLAStrategy", ((2,), {})),
        ("trainer", 4, "XLAStrategy", ((), {"debug": True, "sync_module_states": False})),
        ("fabric", 4, "XLAStrategy", ((), {"sync_module_states": False})),
    ],
)
def test_what_lightnings_strategy_is_made_with(
    engine: Any, world_size: int, made: str, arguments: Any, ranks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch-xla needs an older torch than this one, so Lightning's classes are stand-ins."""
    import lightning.fabric.strategies as fabric
    import lightning.pytorch.strategies as trainer

    family = trainer if engine == "trainer" else fabric
    monkeypatch.setattr(family, made, lambda *args, **kwargs: (args, kwargs))
    config = XLAStrategyConfig(debug=True, sync_module_states=False)
    context = ranks.context(config, engine, world_size=world_size, device_indices=(2,))
    assert build(config, context) == arguments
