"""What lets a plugin be tried alone: plugins without engines for what `auto` falls back to, a small resolution."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import create_model

from fairlead.config import TrainerConfig
from fairlead.config_bases import AXES, BackendConfig
from fairlead.facts import Claim, Devices, Specificity
from fairlead.findings import Inexact
from fairlead.hookspecs import hookimpl
from fairlead.plugin_classes import (
    AcceleratorPlugin,
    CheckpointIOPlugin,
    EnvironmentPlugin,
    Plugin,
    PrecisionPlugin,
    RequeuePlugin,
    StrategyPlugin,
)
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution, resolve


class _CPU(AcceleratorPlugin):
    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        return Devices(1, "a stand-in", ("CPU",), unlimited=True)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class _SingleDevice(StrategyPlugin):
    """One rank."""

    one_rank = True


class _Lightning(EnvironmentPlugin):
    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        return Claim("nothing says otherwise", Specificity.MACHINE)


class _Torch(CheckpointIOPlugin):
    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


def stand_ins(*without: str) -> dict[str, Any]:
    """A plugin for every choice that `auto` may make on a machine without accelerators; none can be built.

    Args:
        without: Entry-point names to leave out, such as `accelerator.cpu`.

    Example:
        >>> from fairlead import PluginManager
        >>> from fairlead.testing import FakeEntryPoint, minimal_resolution
        >>> plugins = PluginManager([FakeEntryPoint(name, target) for name, target in stand_ins().items()])
        >>> minimal_resolution(plugins, devices=2).value("strategy")
        'ddp'
    """
    made = (
        _stand_in(_CPU, "cpu"),
        _stand_in(_SingleDevice, "single_device"),
        _stand_in(StrategyPlugin, "ddp"),
        _stand_in(PrecisionPlugin, "32-true"),
        _stand_in(_Lightning, "lightning"),
        _stand_in(_Torch, "torch"),
        _stand_in(RequeuePlugin, "none"),
    )
    return {key: plugin for plugin in made if (key := f"{plugin.axis}.{plugin.tag}") not in without}


def _stand_in(kind: type[Plugin], tag: str) -> Plugin:
    """A plugin of a class, with a config that has nothing but its name."""
    name: Any = (Literal[tag], tag)
    config = create_model(f"StandIn_{tag}", __base__=kind.base, name=name)
    made: Plugin = type(f"StandIn_{tag}", (kind,), {"config": config})()
    return made


def minimal_resolution(
    plugins: PluginManager, *, environ: Mapping[str, str] | None = None, **trainer: Any
) -> Resolution:
    """Resolves one rank on this machine, with fields of `TrainerConfig` such as `strategy=RingStrategyConfig()`.

    Where no plugin is installed for an axis, a config of its base class with the tag of the default
    takes over, so that a plugin can be tried alone.

    Example:
        >>> from fairlead import PluginManager
        >>> resolution = minimal_resolution(PluginManager([]), max_steps=3)
        >>> resolution.world_size, resolution.strategy.name
        (1, 'single_device')
    """
    fields = {"devices": 1, "num_nodes": 1, **trainer}
    if "accelerator" not in fields and "cpu" in plugins.names("accelerator"):
        fields["accelerator"] = "cpu"
    config = TrainerConfig.model_validate(fields, context={"plugins": plugins})
    resolution = resolve(config, environ=environ or {}, plugins=plugins)
    gaps: dict[str, BackendConfig] = {
        axis: AXES[axis](name=str(setting.value))
        for axis, setting in resolution.settings.items()
        if axis in AXES and getattr(resolution, axis) is None
    }
    return dataclasses.replace(resolution, **gaps)  # type: ignore[arg-type]  # each is of its axis's class
