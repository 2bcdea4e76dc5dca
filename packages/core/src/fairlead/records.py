"""What is known of a plugin before it is imported."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol


class Dist(Protocol):
    """What is used of an `importlib.metadata.Distribution`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str: ...  # noqa: D102
    @property
    def requires(self) -> list[str] | None: ...  # noqa: D102


class EntryPoint(Protocol):
    """What is used of an `importlib.metadata.EntryPoint`; `fairlead.testing` makes fakes of it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def value(self) -> str: ...  # noqa: D102
    @property
    def dist(self) -> Dist | None: ...  # noqa: D102
    def load(self) -> Any: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What is known of one entry point: `error` says why it cannot be used, `missing` what its engine needs."""

    axis: str
    name: str
    dist: str
    version: str
    value: str
    error: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The entry point's name, `strategy.ddp`."""
        return f"{self.axis}.{self.name}"

    @property
    def available(self) -> bool:
        """Whether it loads and its engine is installed."""
        return self.error is None and not self.missing

    def with_error(self, error: str) -> PluginRecord:
        """The same record, unusable for this reason."""
        return dataclasses.replace(self, error=error)

    def as_dict(self) -> dict[str, Any]:
        """The record as `fairlead plugins --json` prints it."""
        names = ("axis", "name", "dist", "version", "available", "missing", "error")
        return {name: getattr(self, name) for name in names}
