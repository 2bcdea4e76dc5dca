"""How long a collective of a group of ranks takes, from where its ranks lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Literal

import numpy as np

from fairlead_planning.devices import Cluster

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]

Measured = Mapping[Operation, Callable[[float, int], float]]
"""What `fairlead bench comm` measured here: seconds of so many bytes over so many nodes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: how many there are, and how many of them are within one domain of fast links."""

    ranks: int
    near: int
    """Of them, in one domain."""
    spread: int
    """In how many domains they are."""

    @classmethod
    def of(cls, ranks: int, stride: int, domain: int) -> Group:
        """The group of `ranks` that are `stride` apart, where `domain` neighbours share fast links.

        Example:
            >>> Group.of(16, 4, domain=8)
            Group(ranks=16, near=2, spread=8)
        """
        near = max(1, min(ranks, domain // stride))
        return cls(ranks, near, -(-ranks // near))


@dataclass(frozen=True)
class Collectives:
    """The collectives of one cluster.

    A ring passes each byte through each domain once, over the network cards of all its members: it is as fast as the
    slower of the link within a domain and of these cards together. Latency grows with the logarithm of the ranks
    (trees and doubling) and, for large groups, by the message that a ring sends to each neighbour.
    """

    cluster: Cluster
    measured: Measured = field(default_factory=dict)
    hop_us: float = 1.0
    """What each further rank adds to a ring, microseconds."""

    def seconds(self, operation: Operation, size: float, group: Group) -> float:
        """Seconds of `size` bytes: of the full tensor that is gathered, reduced, or scattered; sent by each rank."""
        if group.ranks < 2 or size <= 0:
            return 0.0
        if known := self.measured.get(operation):
            return known(size, group.spread)
        link, between = self.cluster.link, self.cluster.between
        far = group.spread > 1
        slow = between.rate(self.cluster.node)
        fast = link.device_gb_s or slow
        latency = (link.latency_us * log2(max(2, group.near)) if group.near > 1 else 0.0) + (
            between.latency_us * log2(max(2, group.spread)) if far else 0.0
        )
        if operation == "send":
            return size / ((slow if far else fast) * 1e9) + (between if far else link).latency_us * 1e-6
        share = (group.ranks - 1) / group.ranks
        if operation == "all_to_all":
            outside = 1 - group.near / group.ranks
            inside = (group.near - 1) / group.ranks
            moved = max(size * outside / (slow * 1e9), size * inside / (fast * 1e9))
        else:
            rate = min(fast, slow * group.near) if far and group.near > 1 else slow if far else fast
            moved = size * share / (rate * 1e9)
            latency += self.hop_us * (group.ranks - 1)
        twice = 2 if operation == "all_reduce" else 1
        return twice * (moved + latency * 1e-6)


def measured_from(rows: list[dict[str, float | str]]) -> Measured:
    """What a calibration file says of collectives: seconds by size, between its points in proportion."""
    found: dict[Operation, Callable[[float, int], float]] = {}
    for name in {str(row["op"]) for row in rows}:
        mine = [row for row in rows if row["op"] == name]
        found[name] = _interpolated(mine)  # type: ignore[index]
    return found


def _interpolated(rows: list[dict[str, float | str]]) -> Callable[[float, int], float]:
    spreads = sorted({int(row["nodes"]) for row in rows})
    curves = {}
    for spread in spreads:
        points = sorted((float(r["bytes"]), float(r["bus_gb_s"]), float(r.get("latency_us", 0.0)), int(r["ranks"])) for r in rows if int(r["nodes"]) == spread)
        curves[spread] = points

    def seconds(size: float, spread: int) -> float:
        points = curves[min(spreads, key=lambda one: abs(one - spread))]
        rate = float(np.interp(np.log(size), [np.log(p[0]) for p in points], [p[1] for p in points]))
        return size / (rate * 1e9) + points[0][2] * 1e-6

    return seconds
