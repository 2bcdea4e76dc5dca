"""Reading what a launcher promised: values with their reason, errors that name the variable.

An empty variable counts as absent: shells and pod templates leave such behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fairlead.errors import ConfigError
from fairlead.facts import Setting

__all__ = ["integer", "malformed", "number", "present", "required", "text"]


def malformed(name: str, value: str, expected: str) -> ConfigError:
    """The error for a variable that is set to something else than its launcher would set."""
    return ConfigError(
        f"{name} is {value!r}, which is not {expected}",
        where=f"environment variable {name}",
        fix=f"find out who set it (`env | grep {name}`), and unset it if the launcher did not",
    )


def text(environ: Mapping[str, str], *names: str) -> Setting | None:
    """The first of the variables that is set and not empty."""
    for name in names:
        value = environ.get(name, "").strip()
        if value:
            return Setting(value, name)
    return None


def present(environ: Mapping[str, str], names: Iterable[str]) -> bool:
    """Whether all of the variables are set and not empty."""
    return all(environ.get(name, "").strip() for name in names)


def integer(environ: Mapping[str, str], *names: str, minimum: int = 0) -> Setting | None:
    """The first of the variables that is set, as an integer from `minimum` on."""
    found = text(environ, *names)
    if found is None:
        return None
    # Not int(): it would take "1_0", "+1" and digits of other scripts.
    if not (found.value.isascii() and found.value.isdigit()) or int(found.value) < minimum:
        raise malformed(found.reason, found.value, f"an integer from {minimum} on, such as {max(minimum, 1)}")
    return Setting(int(found.value), found.reason)


def number(environ: Mapping[str, str], name: str) -> Setting | None:
    """An integer from 1 on; None where the variable holds anything else, for values that no rank depends on."""
    value = environ.get(name, "").strip()
    return Setting(int(value), name) if value.isascii() and value.isdigit() and int(value) else None


def required(environ: Mapping[str, str], *names: str, by: str, minimum: int = 0) -> Setting:
    """Like `integer`, for a variable that the launcher `by` always sets."""
    found = integer(environ, *names, minimum=minimum)
    if found is not None:
        return found
    raise ConfigError(
        f"{names[0]} is not set",
        where=f"environment variable {names[0]}",
        why=f"{by} sets {' or '.join(names)} to an integer from {minimum} on in every process that it starts",
        fix=f"do not unset it between {by} and this process, or name another `environment`",
    )
