"""Tools for the authors of plugins: fixtures, fakes, and a conformance suite for every axis.

The fixtures `fairlead_plugins`, `fake_dist` and `fake_environ` are there wherever fairlead and pytest
are installed.  A plugin proves that it keeps the contract with three lines::

    from fairlead.testing import StrategyConformance

    class TestRing(StrategyConformance):
        plugin_name = "ring"

Example:
    >>> from fairlead.testing import CONFORMANCE
    >>> sorted(CONFORMANCE)[:3]
    ['accelerator', 'check', 'checkpoint_io']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fairlead.testing.conformance import PluginConformance as PluginConformance
    from fairlead.testing.defaults import stand_ins as stand_ins
    from fairlead.testing.fakes import FakeDist as FakeDist
    from fairlead.testing.fakes import FakeEntryPoint as FakeEntryPoint
    from fairlead.testing.fakes import FakeEnviron as FakeEnviron
    from fairlead.testing.fakes import write_dist as write_dist
    from fairlead.testing.resolutions import minimal_resolution as minimal_resolution
    from fairlead.testing.suites import CONFORMANCE as CONFORMANCE
    from fairlead.testing.suites import AcceleratorConformance as AcceleratorConformance
    from fairlead.testing.suites import CheckConformance as CheckConformance
    from fairlead.testing.suites import CheckpointIOConformance as CheckpointIOConformance
    from fairlead.testing.suites import CommandConformance as CommandConformance
    from fairlead.testing.suites import EnvironmentConformance as EnvironmentConformance
    from fairlead.testing.suites import LayerSyncConformance as LayerSyncConformance
    from fairlead.testing.suites import LoggerConformance as LoggerConformance
    from fairlead.testing.suites import PrecisionConformance as PrecisionConformance
    from fairlead.testing.suites import RequeueConformance as RequeueConformance
    from fairlead.testing.suites import StrategyConformance as StrategyConformance

__all__ = [
    "CONFORMANCE",
    "AcceleratorConformance",
    "CheckConformance",
    "CheckpointIOConformance",
    "CommandConformance",
    "EnvironmentConformance",
    "FakeDist",
    "FakeEntryPoint",
    "FakeEnviron",
    "LayerSyncConformance",
    "LoggerConformance",
    "PluginConformance",
    "PrecisionConformance",
    "RequeueConformance",
    "StrategyConformance",
    "minimal_resolution",
    "stand_ins",
    "write_dist",
]

_HOMES: Final = {
    "FakeDist": "fakes",
    "FakeEntryPoint": "fakes",
    "FakeEnviron": "fakes",
    "PluginConformance": "conformance",
    "minimal_resolution": "resolutions",
    "stand_ins": "defaults",
    "write_dist": "fakes",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use: pytest loads this package in every project that has fairlead."""
    if name not in __all__:
        raise AttributeError(f"module 'fairlead.testing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"fairlead.testing.{_HOMES.get(name, 'suites')}"), name)


def __dir__() -> list[str]:
    return __all__
