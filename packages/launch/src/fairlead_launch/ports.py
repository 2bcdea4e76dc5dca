"""The port on which the ranks of one machine meet: bound before they start, so that no other job can take it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final

from fairlead.errors import ConfigError

__all__ = ["STORE_FD", "inherited_listener", "listen"]

STORE_FD: Final = "FAIRLEAD_STORE_FD"
"""The listening socket that rank 0 inherits for its store."""

_BACKLOG: Final = 2048


def listen(start: int, *, tries: int = 200) -> socket.socket:
    """A socket that listens on the first free port from `start` on.

    A port that is only looked at can be taken by another job before rank 0 binds it, seconds later.

    Raises:
        ConfigError: All of them are taken.

    Example:
        >>> with listen(29500) as listener:
        ...     29500 <= listener.getsockname()[1] < 29700
        True
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in range(start, min(start + tries, 65536)):
        try:
            return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError:
            continue
    raise ConfigError(
        f"no free port from {start} to {start + tries - 1}",
        where="MASTER_PORT",
        why="the ranks need one for their store",
        fix="set MASTER_PORT to a free one",
    )


def inherited_listener(environ: Mapping[str, str]) -> socket.socket | None:
    """The socket that the supervisor bound for this rank, or None."""
    if STORE_FD not in environ:
        return None
    listener = socket.socket(fileno=int(environ[STORE_FD]))
    listener.set_inheritable(False)  # programs that the user's code starts must not keep the port
    return listener
