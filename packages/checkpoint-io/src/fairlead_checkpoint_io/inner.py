"""The backend that another one is around."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from fairlead.bases import CheckpointIOConfigBase
from fairlead.errors import PluginError
from fairlead.interfaces import BuildContext

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

__all__ = ["build_inner"]

_WHERE = "trainer.checkpoint_io.inner"


def build_inner(config: CheckpointIOConfigBase, context: BuildContext) -> CheckpointIO:
    """The runtime of the backend in the field `inner`.

    Raises:
        MissingDependencyError: Its engine is not installed.
        PluginError: It has no runtime.
    """
    plugin = context.plugins.of(config)
    context.plugins.require_engines("checkpoint_io", config.name, where=_WHERE)
    if plugin.runtime is None:
        raise PluginError(f"the checkpoint_io {config.name!r} has no runtime", where=_WHERE)
    runtime: CheckpointIO = pkgutil.resolve_name(plugin.runtime)(config, context)
    return runtime
