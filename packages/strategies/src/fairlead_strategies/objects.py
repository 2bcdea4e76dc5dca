"""What several runtimes need at build time: classes from their paths, and the process group's backend."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from fairlead.errors import ConfigError, did_you_mean
from fairlead.interfaces import BuildContext
from fairlead_strategies.fields import ProcessGroupConfig

__all__ = ["backend", "load_class", "load_classes"]


def backend(config: ProcessGroupConfig, context: BuildContext) -> str:
    """The backend of torch.distributed: as asked, else the one that was resolved for the device."""
    asked = config.process_group_backend
    return context.resolution.backend if asked == "auto" else asked


def load_class(path: str, where: str) -> type[Any]:
    """The class that `module:Class` names.

    Args:
        path: The class as text.
        where: The config path to name in an error.

    Raises:
        ConfigError: There is no such module or no such class in it.

    Example:
        >>> load_class("collections:OrderedDict", "trainer.strategy.auto_wrap_policy").__name__
        'OrderedDict'
    """
    module_name, _, qualname = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"no module {error.name!r}", where=where, why=f"it is needed for {path!r}", fix="write `module:Class`"
        ) from error
    for part in qualname.split("."):
        inside = found
        found = getattr(inside, part, None)
        if found is None:
            near = did_you_mean(part, dir(inside))
            fix = f"did you mean {near!r}?" if near else "write `module:Class`"
            raise ConfigError(f"{module_name} has no {qualname!r}", where=where, fix=fix)
    if not isinstance(found, type):
        raise ConfigError(f"{path} is a {type(found).__name__}, not a class", where=where, fix="write `module:Class`")
    return found


def load_classes(paths: Iterable[str], where: str) -> set[type[Any]]:
    """The classes of several paths; raises as `load_class` does."""
    return {load_class(path, where) for path in paths}
