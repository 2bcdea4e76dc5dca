"""Ports. One that is found free and then closed can be lost; a bound socket cannot."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterable, Mapping
from typing import Final

from fairlead.errors import FairleadError

DEFAULT_PORT: Final = 29500
"""The port that torch's launchers use when none is given."""
STORE_FD: Final = "FAIRLEAD_STORE_FD"
"""The listening socket that rank 0 inherits for its store."""

_BACKLOG: Final = 2048  # a thousand ranks connect within a second; the kernel caps this at net.core.somaxconn


class PortError(FairleadError):
    """None of the wanted ports can be bound, or another start has taken this one's."""

    exit_code = 1


def bind_listener(candidates: Iterable[int] = (0,), host: str = "") -> socket.socket:
    """A listening socket on the first free one of the ports, which no other process can take; else `PortError`.

    Args:
        candidates: Ports in the order of preference; 0 lets the kernel choose.
        host: The address to listen on; "" means all of them (IPv4, and IPv6 where the machine has it).
    """
    refused: list[str] = []
    for port in candidates:
        try:
            return _listen(host, port)
        except OSError as error:
            reason = "in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                # A wrong host fails for every port alike.
                raise PortError(
                    f"cannot listen on {host or 'any address'}", where=f"{host}:{port}", why=str(error)
                ) from error
            refused.append(f"{port}: {reason}")
    raise PortError(
        "no free port among the candidates",
        where=host or "all addresses of this machine",
        why="\n".join(refused) if refused else "there were no candidates",
        fix="end the process that holds the port (`ss -ltnp` names it), or give another: --main-port, or MASTER_PORT",
    )


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class HeldPort:
    """A port of this machine that is held for another process to listen on, until another one is, or it is closed.

    Whoever else chooses a port in this way gets another one. A program that listens with SO_REUSEADDR, as torch's store
    and Python's `create_server` do, can take it: the socket is bound without that option, and gets it afterwards.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self, candidates: Iterable[int]) -> int:
        """Holds the first free one of the ports, never the previous one, which it gives up; else `PortError`."""
        dual = socket.has_dualstack_ipv6()
        for port in candidates:
            held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
            try:
                if dual:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                held.bind(("", port))  # the previous port is still bound
            except OSError:
                held.close()
                continue
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.close()
            self._socket = held
            return int(held.getsockname()[1])
        raise PortError(
            "no free port among the candidates",
            where="all addresses of this machine",
            fix="end the processes that hold them (`ss -ltnp` names them), or give a port: --main-port",
        )

    def close(self) -> None:
        """Holds none any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def free_port(host: str = "127.0.0.1", candidates: Iterable[int] | None = None) -> int:
    """The first port that is free now, else `PortError`. Another process may take it next: prefer `bind_listener`.

    Without candidates it is one that systems do not use for outgoing connections (32768 and above on Linux, 49152
    elsewhere): any connection of any process would otherwise take it before it is listened on.
    """
    if candidates is None:
        candidates = (*random.SystemRandom().sample(range(20000, 32000), 16), 0)
    with bind_listener(candidates, host) as listener:
        return int(listener.getsockname()[1])


def inherited_listener(environ: Mapping[str, str]) -> socket.socket | None:
    """The socket that the supervisor bound for this rank, or None."""
    if STORE_FD not in environ:
        return None
    listener = socket.socket(fileno=int(environ[STORE_FD]))
    listener.set_inheritable(False)  # programs that the user's code starts must not keep the port
    return listener
