"""What all ranks of one start know of it alike, before they have spoken to each other."""

from __future__ import annotations

from typing import NamedTuple


class Start(NamedTuple):
    """One start of a job: what no other start has, and where to look for its ranks.

    `identity` is the scheduler's job, step and restart count as text. Rank 0 takes the first free one of the TCP
    `ports` on the main address, and the others look for it; without any, the port was given. `hosts` are the names of
    the nodes by node rank, `rank_hosts` by rank; empty where they are not known.
    """

    identity: str
    ports: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    rank_hosts: tuple[str, ...] = ()
