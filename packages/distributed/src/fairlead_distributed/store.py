"""Key-value stores, and the port of one on this machine."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from fairlead_distributed.errors import RendezvousError
from fairlead_launch.ports import DEFAULT_PORT, free_port


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
