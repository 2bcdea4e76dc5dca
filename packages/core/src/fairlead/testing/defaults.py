"""Plugins without engines for what `auto` falls back to, so that a plugin can be resolved alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import create_model

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
from fairlead.resolution import Resolution


class _CPU(AcceleratorPlugin):
    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        return Devices(1, "a stand-in", ("CPU",), unlimited=True)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


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
        _stand_in(StrategyPlugin, "single_device"),
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
