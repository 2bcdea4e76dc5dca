"""What a setting says about itself, in the metadata of its field; those that need it read it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from fairlead.findings import Inexact

T = TypeVar("T")


@dataclass(frozen=True)
class MayChange:
    """A resume may change the setting, for this reason; every other one of `trainer` makes it another run.

    `limit`: it says how long is trained, and a finished run with another limit is not finished.
    """

    why: str
    limit: bool = False


@dataclass(frozen=True)
class NotExact:
    """With the values that `when` is true of, a resumed run is not the undisturbed one; `fix` is what to set instead.

    Not `certain`: it is not known.
    """

    when: Callable[[Any], bool]
    why: str
    fix: str
    certain: bool = True


@dataclass(frozen=True)
class PassedToLightning:
    """Lightning's Trainer takes the setting under the same name and with the same value."""


LIGHTNING: Final = PassedToLightning()


def marked(model: type[BaseModel], mark: type[T]) -> dict[str, T]:
    """The fields of a model with such a mark, in their order."""
    return {name: one for name, field in model.model_fields.items() for one in field.metadata if isinstance(one, mark)}


def inexact_settings(config: BaseModel, path: str) -> Iterator[Inexact]:
    """The settings of a config at a path of the job, and of those in it, that keep a resume from being exact."""
    for name, mark in marked(type(config), NotExact).items():
        value = getattr(config, name)
        if mark.when(value):
            yield Inexact(f"{path}.{name}: {_shown(value)}", why=mark.why, fix=mark.fix, certain=mark.certain)
    for name in type(config).model_fields:
        if isinstance(inner := getattr(config, name), BaseModel):
            yield from inexact_settings(inner, f"{path}.{name}")


def _shown(value: object) -> str:
    """As a YAML author writes it, in short."""
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
