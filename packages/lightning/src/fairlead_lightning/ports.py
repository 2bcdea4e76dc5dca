"""A free TCP port on this machine, found without torch."""

from __future__ import annotations

import socket

from fairlead.errors import ConfigError

__all__ = ["free_port"]


def free_port(start: int, *, tries: int = 200) -> int:
    """The first port from `start` on that nothing listens on.

    Raises:
        ConfigError: All of them are taken.

    Example:
        >>> 29500 <= free_port(29500) < 29700
        True
    """
    for port in range(start, min(start + tries, 65536)):
        with socket.socket() as probe:
            # As torch's store does; without it a port in TIME_WAIT looks taken after every run.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"no free port from {start} to {start + tries - 1}",
        where="MASTER_PORT",
        why="the ranks need one for their store",
        fix="set MASTER_PORT to a free one",
    )
