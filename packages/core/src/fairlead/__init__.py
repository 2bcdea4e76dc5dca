"""Fairlead leads a PyTorch training job onto whatever hardware and cluster it finds.

This package is the slim core: it reads and checks configs and finds plugins, and never imports torch. `Run` comes from
fairlead-distributed, `Trainer`, `fabric` and the callback `Fairlead` from fairlead-lightning. Every name is imported
when it is first used, so that `import fairlead` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fairlead.capabilities import Capability
    from fairlead.config import (
        CheckpointConfig,
        ClassSpec,
        JobConfig,
        ResourcesConfig,
        RunConfig,
        TrainerConfig,
    )
    from fairlead.config_bases import (
        AcceleratorConfigBase,
        CheckpointIOConfigBase,
        EnvironmentConfigBase,
        LayerSyncConfigBase,
        LoggerConfigBase,
        PrecisionConfigBase,
        RequeueConfigBase,
        StrategyConfigBase,
        SubmitterConfigBase,
    )
    from fairlead.errors import FairleadError
    from fairlead.facts import Claim, Devices, Job, Setting, Specificity, StopReason, Unused
    from fairlead.findings import CheckResult, Finding
    from fairlead.hookspecs import hookimpl
    from fairlead.interfaces import BuildContext, Requeuer
    from fairlead.open_union import OpenUnion
    from fairlead.plugin_classes import (
        AcceleratorPlugin,
        CheckPlugin,
        CheckpointIOPlugin,
        CommandPlugin,
        EnvironmentPlugin,
        LayerSyncPlugin,
        LoggerPlugin,
        PrecisionPlugin,
        RequeuePlugin,
        StrategyPlugin,
        SubmitterPlugin,
    )
    from fairlead.plugins import PluginManager
    from fairlead.resolution import Resolution
    from fairlead.topology import Topology
    from fairlead_distributed.run.open_run import Stopped
    from fairlead_distributed.run.run import Run
    from fairlead_launch.submission import submit
    from fairlead_lightning import Fairlead, Trainer, fabric

__all__ = [
    "AcceleratorConfigBase",
    "AcceleratorPlugin",
    "BuildContext",
    "Capability",
    "CheckPlugin",
    "CheckResult",
    "CheckpointConfig",
    "CheckpointIOConfigBase",
    "CheckpointIOPlugin",
    "Claim",
    "ClassSpec",
    "CommandPlugin",
    "Devices",
    "EnvironmentConfigBase",
    "EnvironmentPlugin",
    "Fairlead",
    "FairleadError",
    "Finding",
    "Job",
    "JobConfig",
    "LayerSyncConfigBase",
    "LayerSyncPlugin",
    "LoggerConfigBase",
    "LoggerPlugin",
    "OpenUnion",
    "PluginManager",
    "PrecisionConfigBase",
    "PrecisionPlugin",
    "RequeueConfigBase",
    "RequeuePlugin",
    "Requeuer",
    "Resolution",
    "ResourcesConfig",
    "Run",
    "RunConfig",
    "Setting",
    "Specificity",
    "StopReason",
    "Stopped",
    "StrategyConfigBase",
    "StrategyPlugin",
    "SubmitterConfigBase",
    "SubmitterPlugin",
    "Topology",
    "Trainer",
    "TrainerConfig",
    "Unused",
    "__version__",
    "fabric",
    "hookimpl",
    "submit",
]

__version__: Final = "0.1.0"

_HOMES: Final = (
    "errors",
    "facts",
    "topology",
    "findings",
    "capabilities",
    "hookspecs",
    "config_bases",
    "plugin_classes",
    "plugins",
    "open_union",
    "config",
    "resolution",
    "interfaces",
)
"""The modules of the core that have public names, each after those that it imports."""
_ELSEWHERE: Final = {
    **dict.fromkeys(("Fairlead", "Trainer", "fabric"), ("fairlead_lightning", "lightning")),
    "Run": ("fairlead_distributed.run.run", "torch"),
    "Stopped": ("fairlead_distributed.run.open_run", "torch"),
    "submit": ("fairlead_launch.submission", "check"),
}
"""Public names of other packages: the module, and the extra that brings it."""
_BROUGHT_BY_EXTRA: Final = frozenset(
    {"fairlead_lightning", "fairlead_distributed", "fairlead_launch", "lightning", "torch"}
)


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562)."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'fairlead' has no attribute {name!r}")
    if name not in _ELSEWHERE:
        modules = (importlib.import_module(f"fairlead.{home}") for home in _HOMES)
        value = globals()[name] = next(getattr(module, name) for module in modules if name in module.__all__)
        return value
    module, extra = _ELSEWHERE[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _BROUGHT_BY_EXTRA:
            raise
        from fairlead.errors import MissingDependencyError
        from fairlead.install import install_line

        raise MissingDependencyError(f"fairlead.{name} needs {missing}", fix=install_line(extra)) from error


def __dir__() -> list[str]:
    return __all__
