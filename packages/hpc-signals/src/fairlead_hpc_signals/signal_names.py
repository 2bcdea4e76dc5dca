"""Signals by name."""

from __future__ import annotations

import signal
from typing import Final

from fairlead.errors import ConfigError, did_you_mean

__all__ = ["signal_number"]

_UNCATCHABLE: Final = (signal.SIGKILL, signal.SIGSTOP)


def signal_number(name: str | int) -> signal.Signals:
    """The signal of a name, with or without `SIG`, or of a number.

    Raises:
        ConfigError: There is no such signal, or no program can handle it.

    Example:
        >>> signal_number("usr1").name
        'SIGUSR1'
    """
    try:
        if isinstance(name, int):
            number = signal.Signals(name)
        else:
            number = signal.Signals["SIG" + name.upper().removeprefix("SIG")]
    except (KeyError, ValueError):
        near = did_you_mean(str(name).upper(), [known.name for known in signal.Signals])
        raise ConfigError(
            f"there is no signal {name!r}", fix=f"write {near}" if near else "use a name such as SIGUSR1 or TERM"
        ) from None
    if number in _UNCATCHABLE:
        raise ConfigError(f"no program can handle {number.name}", fix="use SIGUSR1, SIGUSR2 or SIGTERM")
    return number
