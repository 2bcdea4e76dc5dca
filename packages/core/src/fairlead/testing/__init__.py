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
    from fairlead.testing.checkpoints import CheckpointIOConformance
    from fairlead.testing.conformance import PluginConformance
    from fairlead.testing.environments import EnvironmentConformance
    from fairlead.testing.fakes import FakeDist, FakeEntryPoint, FakeEnviron, write_dist
    from fairlead.testing.resolutions import minimal_resolution, stand_ins
    from fairlead.testing.suites import (
        CONFORMANCE,
        AcceleratorConformance,
        CheckConformance,
        CommandConformance,
        LayerSyncConformance,
        LoggerConformance,
        PrecisionConformance,
        RequeueConformance,
        StrategyConformance,
        SubmitterConformance,
    )

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
    "SubmitterConformance",
    "minimal_resolution",
    "stand_ins",
    "write_dist",
]

_HOMES: Final = ("fakes", "resolutions", "suites")


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use: pytest loads this package in every project that has fairlead."""
    if name not in __all__:
        raise AttributeError(f"module 'fairlead.testing' has no attribute {name!r}")
    import importlib

    modules = (importlib.import_module(f"fairlead.testing.{home}") for home in _HOMES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return __all__
