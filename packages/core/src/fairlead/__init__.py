"""Fairlead leads a PyTorch training job onto whatever hardware and cluster it finds.

One typed config; the installed plugins do the rest.  This package is the slim core: it reads and
checks configs and finds plugins, and never imports torch.  `Trainer`, `fabric`, `LoopRun` and the
callback `Fairlead` come from fairlead-lightning.  Every name is imported when it is first used, so that
`import fairlead` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fairlead.axes import AcceleratorPlugin as AcceleratorPlugin
    from fairlead.axes import CheckPlugin as CheckPlugin
    from fairlead.axes import CheckpointIOPlugin as CheckpointIOPlugin
    from fairlead.axes import CommandPlugin as CommandPlugin
    from fairlead.axes import EnvironmentPlugin as EnvironmentPlugin
    from fairlead.axes import LayerSyncPlugin as LayerSyncPlugin
    from fairlead.axes import LoggerPlugin as LoggerPlugin
    from fairlead.axes import PrecisionPlugin as PrecisionPlugin
    from fairlead.axes import RequeuePlugin as RequeuePlugin
    from fairlead.axes import StrategyPlugin as StrategyPlugin
    from fairlead.bases import AcceleratorConfigBase as AcceleratorConfigBase
    from fairlead.bases import CheckpointIOConfigBase as CheckpointIOConfigBase
    from fairlead.bases import EnvironmentConfigBase as EnvironmentConfigBase
    from fairlead.bases import LayerSyncConfigBase as LayerSyncConfigBase
    from fairlead.bases import LoggerConfigBase as LoggerConfigBase
    from fairlead.bases import PrecisionConfigBase as PrecisionConfigBase
    from fairlead.bases import RequeueConfigBase as RequeueConfigBase
    from fairlead.bases import StrategyConfigBase as StrategyConfigBase
    from fairlead.capabilities import Capability as Capability
    from fairlead.config import CheckpointConfig as CheckpointConfig
    from fairlead.config import ClassSpec as ClassSpec
    from fairlead.config import JobConfig as JobConfig
    from fairlead.config import ResourcesConfig as ResourcesConfig
    from fairlead.config import RunConfig as RunConfig
    from fairlead.config import SubmitConfig as SubmitConfig
    from fairlead.config import TrainerConfig as TrainerConfig
    from fairlead.errors import FairleadError as FairleadError
    from fairlead.facts import Claim as Claim
    from fairlead.facts import Devices as Devices
    from fairlead.facts import Setting as Setting
    from fairlead.facts import Specificity as Specificity
    from fairlead.facts import Topology as Topology
    from fairlead.findings import CheckResult as CheckResult
    from fairlead.findings import Finding as Finding
    from fairlead.hookspecs import hookimpl as hookimpl
    from fairlead.interfaces import BuildContext as BuildContext
    from fairlead.open_union import OpenUnion as OpenUnion
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
    "AcceleratorConfigBase": "fairlead.bases",
    "AcceleratorPlugin": "fairlead.axes",
    "BuildContext": "fairlead.interfaces",
    "Capability": "fairlead.capabilities",
    "CheckPlugin": "fairlead.axes",
    "CheckResult": "fairlead.findings",
    "CheckpointConfig": "fairlead.config",
    "CheckpointIOConfigBase": "fairlead.bases",
    "CheckpointIOPlugin": "fairlead.axes",
    "Claim": "fairlead.facts",
    "ClassSpec": "fairlead.config",
    "CommandPlugin": "fairlead.axes",
    "Devices": "fairlead.facts",
    "EnvironmentConfigBase": "fairlead.bases",
    "EnvironmentPlugin": "fairlead.axes",
    "FairleadError": "fairlead.errors",
    "Finding": "fairlead.findings",
    "Job": "fairlead.interfaces",
    "JobConfig": "fairlead.config",
    "LayerSyncConfigBase": "fairlead.bases",
    "LayerSyncPlugin": "fairlead.axes",
    "LoggerConfigBase": "fairlead.bases",
    "LoggerPlugin": "fairlead.axes",
    "OpenUnion": "fairlead.open_union",
    "PluginManager": "fairlead.plugins",
    "PrecisionConfigBase": "fairlead.bases",
    "PrecisionPlugin": "fairlead.axes",
    "RequeueConfigBase": "fairlead.bases",
    "RequeuePlugin": "fairlead.axes",
    "Resolution": "fairlead.resolution",
    "ResourcesConfig": "fairlead.config",
    "RunConfig": "fairlead.config",
    "Setting": "fairlead.facts",
    "Specificity": "fairlead.facts",
    "StrategyConfigBase": "fairlead.bases",
    "StrategyPlugin": "fairlead.axes",
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
