"""Settings of the libraries that carry the ranks' messages, from the config to the variables that they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fairlead.config_bases import EnvironmentConfigBase
from fairlead.facts import Setting
from fairlead.findings import Finding


def library_variables(environment: EnvironmentConfigBase) -> dict[str, str]:
    """The variables that the config asks for: NCCL_IB_DISABLE for `nccl.ib_disable`; true and false become 1 and 0."""
    found: dict[str, str] = {}
    for library in ("nccl", "gloo"):
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
    """Settings without effect: the backend (`cpu:gloo,cuda:nccl`) is another, or the environment says otherwise."""
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
