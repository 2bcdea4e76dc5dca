"""Ports and key-value stores. A port that is found free and then closed can be lost; a bound socket cannot."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from fairlead_distributed.errors import PortError, RendezvousError

__all__ = ["DEFAULT_PORT", "bind_listener", "choose_port", "free_port", "tcp_store"]

DEFAULT_PORT = 29500
"""The port that torch's launchers use when none is given."""

_BACKLOG = 2048  # a thousand ranks connect within a second; the kernel caps this at net.core.somaxconn


def bind_listener(candidates: Iterable[int] = (0,), host: str = "") -> socket.socket:
    """A listening socket on the first of the ports that is free; nobody else can take it any more.

    Args:
        candidates: Ports in the order of preference; 0 lets the kernel choose.
        host: The address to listen on; "" means all of them (IPv4, and IPv6 where the machine has it).

    Raises:
        PortError: None of the ports can be bound. Says which were tried and why each failed.

    Example:
        >>> listener = bind_listener([0], "127.0.0.1")
        >>> store = tcp_store(listener)
        >>> store.set("step", "7")
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
        fix="end the process that holds the port (`ss -ltnp` names it), or give other ports (MASTER_PORT=...)",
    )


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def free_port(host: str = "127.0.0.1", candidates: Iterable[int] = (0,)) -> int:
    """The first of the ports that is free now. Another process may take it next: prefer `bind_listener`.

    Raises:
        PortError: None is free.
    """
    with bind_listener(candidates, host) as listener:
        return int(listener.getsockname()[1])


def choose_port(host: str = "127.0.0.1", start: int = DEFAULT_PORT, tries: int = 100) -> int:
    """The port for a run on one machine: `start` when it is free, else the next free one above it.

    Raises:
        PortError: None of the `tries` ports from `start` on is free.
    """
    return free_port(host, range(start, min(start + tries, 65536)))


def tcp_store(
    listener_or_address: socket.socket | tuple[str, int], *, timeout: timedelta = timedelta(minutes=5)
) -> dist.TCPStore:
    """A store on a bound listener (it hosts the server), or connected to a server's address.

    Args:
        listener_or_address: A socket from `bind_listener`: the store takes it over and closes it. Or `(host, port)`.
        timeout: How long to try to connect, and how long `get` and `wait` of the store block.

    Raises:
        RendezvousError: Nothing answers at the address within the timeout.
    """
    try:
        if isinstance(listener_or_address, socket.socket):
            host, port = listener_or_address.getsockname()[:2]
            host = {"::": "localhost", "0.0.0.0": "127.0.0.1"}.get(host, host)
            return dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener_or_address.detach(),
            )
        host, port = listener_or_address
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except dist.DistNetworkError as error:
        raise RendezvousError(
            f"no store answers at {host}:{port}",
            where=f"{host}:{port}",
            why=str(error).splitlines()[0],
            fix="check that the process that hosts the store runs and that no firewall is between",
        ) from error
