"""Fairlead leads a PyTorch training job onto whatever hardware and cluster it finds.

One typed config; the installed plugins do the rest.  This package is the slim core: it reads and
checks configs and finds plugins, and never imports torch.  `Trainer`, `fabric`, `LoopRun` and the
callback `Fairlead` come from fairlead-lightning.  Every name is imported when it is first used, so that
`import fairlead` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fairlead.capabilities import Capability as Capability
    from fairlead.config import CheckpointConfig as CheckpointConfig
    from fairlead.config import ClassSpec as ClassSpec
    from fairlead.config import JobConfig as JobConfig
    from fairlead.config import ResourcesConfig as ResourcesConfig
    from fairlead.config import RunConfig as RunConfig
    from fairlead.config import SubmitConfig as SubmitConfig
    from fairlead.config import TrainerConfig as TrainerConfig
    from fairlead.config_bases import AcceleratorConfigBase as AcceleratorConfigBase
    from fairlead.config_bases import CheckpointIOConfigBase as CheckpointIOConfigBase
    from fairlead.config_bases import EnvironmentConfigBase as EnvironmentConfigBase
    from fairlead.config_bases import LayerSyncConfigBase as LayerSyncConfigBase
    from fairlead.config_bases import LoggerConfigBase as LoggerConfigBase
    from fairlead.config_bases import PrecisionConfigBase as PrecisionConfigBase
    from fairlead.config_bases import RequeueConfigBase as RequeueConfigBase
    from fairlead.config_bases import StrategyConfigBase as StrategyConfigBase
    from fairlead.errors import FairleadError as FairleadError
    from fairlead.facts import Claim as Claim
    from fairlead.facts import Devices as Devices
    from fairlead.facts import Job as Job
    from fairlead.facts import Setting as Setting
    from fairlead.facts import Specificity as Specificity
    from fairlead.facts import Topology as Topology
    from fairlead.findings import CheckResult as CheckResult
    from fairlead.findings import Finding as Finding
    from fairlead.hookspecs import hookimpl as hookimpl
    from fairlead.interfaces import BuildContext as BuildContext
    from fairlead.open_union import OpenUnion as OpenUnion
    from fairlead.plugin_classes import AcceleratorPlugin as AcceleratorPlugin
    from fairlead.plugin_classes import CheckPlugin as CheckPlugin
    from fairlead.plugin_classes import CheckpointIOPlugin as CheckpointIOPlugin
    from fairlead.plugin_classes import CommandPlugin as CommandPlugin
    from fairlead.plugin_classes import EnvironmentPlugin as EnvironmentPlugin
    from fairlead.plugin_classes import LayerSyncPlugin as LayerSyncPlugin
    from fairlead.plugin_classes import LoggerPlugin as LoggerPlugin
    from fairlead.plugin_classes import PrecisionPlugin as PrecisionPlugin
    from fairlead.plugin_classes import RequeuePlugin as RequeuePlugin
    from fairlead.plugin_classes import StrategyPlugin as StrategyPlugin
    from fairlead.plugins import PluginManager as PluginManager
    from fairlead.resolution import Resolution as Resolution
    from fairlead_lightning import Fairlead as Fairlead
    from fairlead_lightning import LoopRun as LoopRun
    from fairlead_lightning import Trainer as Trainer
    from fairlead_lightning import fabric as fabric

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
    "LoopRun",
    "OpenUnion",
    "PluginManager",
    "PrecisionConfigBase",
    "PrecisionPlugin",
    "RequeueConfigBase",
    "RequeuePlugin",
    "Resolution",
    "ResourcesConfig",
    "RunConfig",
    "Setting",
    "Specificity",
    "StrategyConfigBase",
    "StrategyPlugin",
    "SubmitConfig",
    "Topology",
    "Trainer",
    "TrainerConfig",
    "__version__",
    "fabric",
    "hookimpl",
]

__version__: Final = "0.1.0"

_HOMES: Final = {
    "AcceleratorConfigBase": "fairlead.config_bases",
    "AcceleratorPlugin": "fairlead.plugin_classes",
    "BuildContext": "fairlead.interfaces",
    "Capability": "fairlead.capabilities",
    "CheckPlugin": "fairlead.plugin_classes",
    "CheckResult": "fairlead.findings",
    "CheckpointConfig": "fairlead.config",
    "CheckpointIOConfigBase": "fairlead.config_bases",
    "CheckpointIOPlugin": "fairlead.plugin_classes",
    "Claim": "fairlead.facts",
    "ClassSpec": "fairlead.config",
    "CommandPlugin": "fairlead.plugin_classes",
    "Devices": "fairlead.facts",
    "EnvironmentConfigBase": "fairlead.config_bases",
    "EnvironmentPlugin": "fairlead.plugin_classes",
    "FairleadError": "fairlead.errors",
    "Finding": "fairlead.findings",
    "Job": "fairlead.facts",
    "JobConfig": "fairlead.config",
    "LayerSyncConfigBase": "fairlead.config_bases",
    "LayerSyncPlugin": "fairlead.plugin_classes",
    "LoggerConfigBase": "fairlead.config_bases",
    "LoggerPlugin": "fairlead.plugin_classes",
    "OpenUnion": "fairlead.open_union",
    "PluginManager": "fairlead.plugins",
    "PrecisionConfigBase": "fairlead.config_bases",
    "PrecisionPlugin": "fairlead.plugin_classes",
    "RequeueConfigBase": "fairlead.config_bases",
    "RequeuePlugin": "fairlead.plugin_classes",
    "Resolution": "fairlead.resolution",
    "ResourcesConfig": "fairlead.config",
    "RunConfig": "fairlead.config",
    "Setting": "fairlead.facts",
    "Specificity": "fairlead.facts",
    "StrategyConfigBase": "fairlead.config_bases",
    "StrategyPlugin": "fairlead.plugin_classes",
    "SubmitConfig": "fairlead.config",
    "Topology": "fairlead.facts",
    "TrainerConfig": "fairlead.config",
    "hookimpl": "fairlead.hookspecs",
}
_LIGHTNING: Final = frozenset({"Fairlead", "LoopRun", "Trainer", "fabric"})
_BROUGHT_BY_EXTRA: Final = frozenset({"fairlead_lightning", "fairlead_distributed", "lightning", "torch"})


def __getattr__(name: str) -> Any:
    """Imports a public name on its first use (PEP 562)."""
    import importlib

    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    if name not in _LIGHTNING:
        raise AttributeError(f"module 'fairlead' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("fairlead_lightning"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _BROUGHT_BY_EXTRA:
            raise
        from fairlead.errors import MissingDependencyError

        raise MissingDependencyError(
            f"fairlead.{name} needs {missing}", fix="pip install 'fairlead[lightning]'"
        ) from error


def __dir__() -> list[str]:
    return __all__
