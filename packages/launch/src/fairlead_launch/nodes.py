"""Which nodes take part in a start of the ranks, and where its rank 0 is."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from fairlead.errors import RunFailedError
from fairlead_launch.ports import hold_port


@dataclass(frozen=True)
class Members:
    """The nodes of one start: how many, which one this is, and where rank 0 will listen.

    `start` counts the starts of the job, from 0; `changed` says what is different from the one before.
    """

    num_nodes: int
    node_rank: int
    address: str
    port: int
    start: int = 0
    changed: str | None = None


@dataclass(frozen=True)
class Ended:
    """How the ranks of this node have ended in one start, and at which step; `stop`: the signal that asked for it."""

    code: int
    error: RunFailedError | None = None
    step: int | None = None
    stop: int | None = None


class OneNode:
    """Where the ranks of a job on this machine alone meet."""

    def __init__(self, address: str, port: int | None) -> None:
        self._address = address
        self._port = port
        self._held: socket.socket | None = None

    def next(self) -> Members:
        """This one; the port is the given one, or the first that is free from 29500 on, another for each start.

        It is held until the next start, so that no other launch on this machine chooses it before rank 0 listens there.
        """
        if self._port is not None:
            return Members(1, 0, self._address, self._port)
        self.close()
        self._held = hold_port(range(29500, 29700))
        return Members(1, 0, self._address, int(self._held.getsockname()[1]))

    def close(self) -> None:
        """Holds no port any more."""
        if self._held is not None:
            self._held.close()
            self._held = None
