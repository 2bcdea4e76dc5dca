"""Fairlead leads a PyTorch training job onto whatever hardware and cluster it finds.

One typed config; the installed plugins do the rest.  This package is the slim core: it reads and
checks configs and finds plugins, and never imports torch.  `Trainer`, `fabric` and the callback
`Fairlead` come from fairlead-lightning and are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fairlead.axes import (
    AcceleratorPlugin,
    CheckpointIOPlugin,
    CommandPlugin,
    EnvironmentPlugin,
    LayerSyncPlugin,
    LoggerPlugin,
    PrecisionPlugin,
    RequeuePlugin,
    StrategyPlugin,
)
from fairlead.bases import (
    AcceleratorConfigBase,
    CheckpointIOConfigBase,
    EnvironmentConfigBase,
    LayerSyncConfigBase,
    LoggerConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
)
from fairlead.capabilities import Capability
from fairlead.config import (
    CheckpointConfig,
    ClassSpec,
    JobConfig,
    ResourcesConfig,
    RunConfig,
    SubmitConfig,
    TrainerConfig,
)
from fairlead.errors import FairleadError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.interfaces import BuildContext, Claim, Devices, Setting, Specificity, Topology
from fairlead.open_union import OpenUnion
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution

if TYPE_CHECKING:
    from fairlead_lightning import Fairlead as Fairlead
    from fairlead_lightning import Trainer as Trainer
    from fairlead_lightning import fabric as fabric

__all__ = [
    "AcceleratorConfigBase",
    "AcceleratorPlugin",
    "BuildContext",
    "Capability",
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

_LAZY: Final = ("Fairlead", "Trainer", "fabric")


def __getattr__(name: str) -> Any:
    """Imports the run-time names on first use (PEP 562), so that `import fairlead` stays torch-free."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fairlead' has no attribute {name!r}")
    import importlib

    from fairlead.errors import MissingDependencyError

    try:
        module = importlib.import_module("fairlead_lightning")
        return getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {
            "fairlead_lightning",
            "fairlead_distributed",
            "lightning",
            "torch",
        }:
            raise
        raise MissingDependencyError(
            f"fairlead.{name} needs {error.name}", fix="pip install 'fairlead[lightning]'"
        ) from error


def __dir__() -> list[str]:
    return __all__
