"""What all ranks of one start know of it alike, before they have spoken to each other."""

from __future__ import annotations

from typing import NamedTuple


class Start(NamedTuple):
    """One start of a job: what no other start has, and where to look for its ranks.

    Args:
        identity: The scheduler's job, step and restart count, as text for messages: `job 12, step 0, restart 0`.
        ports: TCP ports on the main address, in the order in which rank 0 takes the first free one and the others
            look for it; empty: the port was given, and no other is tried.
        hosts: The name of each node, by node rank; empty: not known.
        rank_hosts: The name of each rank's node, by rank; empty: not known.

    Example:
        >>> Start("job 12, step 0, restart 0", ports=(20312, 27101), hosts=("n1", "n2")).ports[0]
        20312
    """

    identity: str
    ports: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    rank_hosts: tuple[str, ...] = ()
