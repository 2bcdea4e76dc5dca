"""Which nodes take part in a start of the ranks, and where its rank 0 is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fairlead_launch.ports import free_port


@dataclass(frozen=True)
class Members:
    """The nodes of one start: how many, which one this is, and where rank 0 will listen."""

    num_nodes: int
    node_rank: int
    address: str
    port: int


class Nodes(Protocol):
    """The nodes of a job, over all its starts."""

    def next(self) -> Members:
        """Waits until the nodes of the next start are there."""
        ...

    def trouble(self) -> str | None:
        """Why the ranks of this node cannot go on, as another node has said; None: they can."""
        ...

    def give_up(self, why: str) -> None:
        """Tells the other nodes that the ranks of this one have failed, and so theirs have to start again."""
        ...

    def close(self, code: int) -> None:
        """This node is done, with this exit code."""
        ...


class OneNode:
    """A job of this machine alone."""

    def __init__(self, address: str, port: int | None) -> None:
        self._address = address
        self._port = port

    def next(self) -> Members:
        """This one; the port is the given one, or the first that is free from 29500 on, another for each start."""
        port = self._port if self._port is not None else free_port("", range(29500, 29700))
        return Members(1, 0, self._address, port)

    def trouble(self) -> str | None:
        """There is no other node."""
        return None

    def give_up(self, why: str) -> None:
        """There is nobody to tell."""

    def close(self, code: int) -> None:
        """There is nobody to tell."""
