"""What several strategies share: field types, the classes that they name, and rows of the capability table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from fairlead import Capability, StrategyConfigBase, StrategyPlugin
from fairlead.engines import LIGHTNING
from fairlead.errors import ConfigError
from fairlead.user_code import CodeRoot, import_callable


def _path(value: Any) -> Any:
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else value


def _paths(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, map(_path, value))))  # a set has no order; a config must have one
    if isinstance(value, type) or (isinstance(value, str) and ":" in value):
        return (_path(value),)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, dict)) else value


ClassPath = Annotated[
    str, BeforeValidator(_path), Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", examples=["my.layers:Block"])
]
"""A class as text, `module:Class`; in Python the class itself is accepted too."""

ClassPaths = Annotated[tuple[ClassPath, ...], BeforeValidator(_paths)]
"""Classes as a list of `module:Class`, or one alone; in Python a set of classes is accepted too."""


class ProcessGroupConfig(StrategyConfigBase):
    """What every strategy with a process group can set."""

    process_group_backend: str = "auto"
    """Backend of torch.distributed: `nccl`, `gloo`, ...; `auto` takes the one that fits the device."""
    timeout: timedelta = Field(timedelta(minutes=30), strict=False, gt=timedelta(0))
    """How long a collective, the first rendezvous included, may take before it fails: `"00:30:00"` or a number of
    seconds. The default is torch's for gloo."""


class LightningStrategy(StrategyPlugin):
    """A strategy that needs Lightning and no other engine, unless it says so."""

    engines: ClassVar[tuple[str, ...]] = LIGHTNING
    extra = "lightning"

    def no(self, others: tuple[str, ...], reason: str, fix: str) -> Capability:
        """A row of the capability table: what it cannot be used together with."""
        return Capability(f"strategy.{self.tag}", others, "no", reason, fix)

    def no_mps_and_xla(self) -> Iterator[Capability]:
        """The rows of a strategy for several ranks: the devices that Lightning does not drive with it."""
        reason = "MPS is a single device, and Lightning refuses parallel strategies on it"
        yield self.no(("accelerator.mps",), reason, "strategy: single_device")
        reason = "Lightning drives XLA devices only through its XLA strategies"
        yield self.no(("accelerator.xla",), reason, "strategy: xla")


def load_classes(paths: Iterable[str], where: str) -> set[type[Any]]:
    """The classes that `module:Class` name; `where` is the config path to name in an error."""
    found: set[type[Any]] = set()
    for path in paths:
        named = import_callable(path, CodeRoot(()), where=where)  # the job's own folders are on `sys.path` by now
        if not isinstance(named, type):
            raise ConfigError(
                f"{path} is a {type(named).__name__}, not a class", where=where, fix="write `module:Class`"
            )
        found.add(named)
    return found
