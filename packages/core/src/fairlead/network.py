"""Settings of the libraries that carry the ranks' messages, from the config to the variables that they read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator

from fairlead.findings import Finding
from fairlead.interfaces import Setting

if TYPE_CHECKING:
    from fairlead.bases import EnvironmentConfigBase

__all__ = ["LIBRARIES", "GlooSettings", "NCCLSettings", "library_variables", "network_findings", "network_settings"]

LIBRARIES: Final = ("nccl", "gloo")
"""The libraries that the environment's config has settings for; each reads variables that begin with its name."""

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


def library_variables(environment: EnvironmentConfigBase) -> dict[str, str]:
    """The variables that the config asks for; true and false become 1 and 0.

    Example:
        >>> from fairlead.bases import EnvironmentConfigBase
        >>> library_variables(EnvironmentConfigBase(name="slurm", nccl={"debug": "INFO", "ib_disable": True}))
        {'NCCL_DEBUG': 'INFO', 'NCCL_IB_DISABLE': '1'}
    """
    found: dict[str, str] = {}
    for library in LIBRARIES:
        for name, value in getattr(environment, library).items():
            text = str(int(value)) if isinstance(value, bool) else str(value)
            found[f"{library}_{name}".upper()] = text
    return found


def network_settings(environment: EnvironmentConfigBase, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Each variable with the value that it will have, for `explain`: what the environment sets wins."""
    return {
        name: Setting(environ[name], f"{name}, which is set already")
        if name in environ
        else Setting(value, f"trainer.environment.{_field(name)}")
        for name, value in library_variables(environment).items()
    }


def network_findings(environment: EnvironmentConfigBase, backend: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that have no effect: another backend carries the messages, or the environment says otherwise.

    Args:
        environment: The environment's config.
        backend: The backend of the process group, as torch names it: `nccl`, `cpu:gloo,cuda:nccl`.
        environ: The environment variables.
    """
    if environment.nccl and "nccl" not in backend:
        yield Finding(
            "info",
            "network-setting-unused",
            f"settings of NCCL are given, but the backend is {backend}",
            where="trainer.environment.nccl",
            why="NCCL carries the messages of CUDA and ROCm devices only",
            fix="leave them out, or keep them for the runs on GPUs",
        )
    for name, value in library_variables(environment).items():
        if name in environ and environ[name] != value:
            yield Finding(
                "warning",
                "network-setting-overridden",
                f"{name} is {environ[name]!r} in the environment and {value!r} in the config; the environment wins",
                where=f"trainer.environment.{_field(name)}",
                why="what a site or a job script exports fits the machine",
                fix=f"unset {name} in the job script, or leave it out of the config",
            )


def _field(variable: str) -> str:
    library, _, name = variable.lower().partition("_")
    return f"{library}.{name}"
