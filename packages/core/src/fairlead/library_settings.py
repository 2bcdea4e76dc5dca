"""The types of fields that hold variables of a library: their names without its prefix."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def _named(prefix: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names: dict[str, Any] = {}
        for name, setting in value.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of a variable; write letters, digits and _, as socket_ifname"
                )
            plain = name.upper().removeprefix(f"{prefix}_").lower()
            if plain in names:
                raise ValueError(f"{plain!r} is set twice: {prefix}_{plain.upper()} is one variable")
            names[plain] = setting
        return names

    return BeforeValidator(read)


def _one_line(values: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    for name, value in values.items():
        if isinstance(value, str) and ("\0" in value or "\n" in value):
            raise ValueError(f"the value of {name!r} has a line break, which no variable can hold")
    return values


Values = Annotated[dict[str, str | int | bool], AfterValidator(_one_line)]
NCCLSettings = Annotated[Values, _named("NCCL")]
"""NCCL's variables without their prefix: `{debug: INFO, socket_ifname: ib0}`."""
GlooSettings = Annotated[Values, _named("GLOO")]
"""Gloo's variables without their prefix: `{socket_ifname: eth0}`."""
