"""Plugins without engines for what `auto` falls back to, so that a plugin can be resolved alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fairlead.config_bases import (
    AcceleratorConfigBase,
    CheckpointIOConfigBase,
    EnvironmentConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
)
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

__all__ = ["stand_ins"]


class _CPUConfig(AcceleratorConfigBase):
    name: Literal["cpu"] = "cpu"


class _SingleDeviceConfig(StrategyConfigBase):
    name: Literal["single_device"] = "single_device"


class _DDPConfig(StrategyConfigBase):
    name: Literal["ddp"] = "ddp"


class _FullConfig(PrecisionConfigBase):
    name: Literal["32-true"] = "32-true"


class _LightningConfig(EnvironmentConfigBase):
    name: Literal["lightning"] = "lightning"


class _TorchConfig(CheckpointIOConfigBase):
    name: Literal["torch"] = "torch"


class _NoneConfig(RequeueConfigBase):
    name: Literal["none"] = "none"


class _CPU(AcceleratorPlugin):
    config = _CPUConfig

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        return Devices(1, "a stand-in", ("CPU",), unlimited=True)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class _SingleDevice(StrategyPlugin):
    config = _SingleDeviceConfig


class _DDP(StrategyPlugin):
    config = _DDPConfig


class _Full(PrecisionPlugin):
    config = _FullConfig


class _Lightning(EnvironmentPlugin):
    config = _LightningConfig

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        return Claim("nothing says otherwise", Specificity.MACHINE)


class _Torch(CheckpointIOPlugin):
    config = _TorchConfig

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        return ()


class _None(RequeuePlugin):
    config = _NoneConfig


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
    made: Iterable[Plugin] = (_CPU(), _SingleDevice(), _DDP(), _Full(), _Lightning(), _Torch(), _None())
    return {key: plugin for plugin in made if (key := f"{plugin.axis}.{plugin.tag}") not in without}
