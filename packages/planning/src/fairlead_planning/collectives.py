"""How long a collective of a group of ranks takes, from where its ranks lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any, Literal

import numpy as np

from fairlead_planning.devices import Cluster

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


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


@dataclass(frozen=True, slots=True)
class Curve:
    """What one operation over so many nodes was measured to reach."""

    nodes: int
    bytes: tuple[float, ...]
    """Ascending."""
    bus_gb_s: tuple[float, ...]
    latency_us: float
    """Of the smallest."""

    def seconds(self, operation: Operation, size: float, ranks: int) -> float:
        """Of another size and number of ranks, at the rate that its size reached."""
        rate = float(np.interp(np.log(size), np.log(self.bytes), self.bus_gb_s))
        return max(size * _factor(operation, ranks) / (rate * 1e9), self.latency_us * 1e-6)


Measured = Mapping[Operation, Sequence[Curve]]
"""What `fairlead bench comm` measured on a cluster."""


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
            nearest = min(known, key=lambda curve: abs(log2(curve.nodes / group.spread)))
            # A curve of one node says nothing of a network, and the other way round.
            if (nearest.nodes > 1) == (group.spread > 1):
                return nearest.seconds(operation, size, group.ranks)
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

    def dispatch(self, size: float, copies: int, group: Group, *, once: bool, reached: float = 1.0) -> float:
        """Seconds in which tokens reach their experts.

        Args:
            size: Bytes of a rank's tokens, once.
            copies: To how many experts each goes.
            group: Among whom the experts lie.
            once: A token goes once to each domain, and once to each rank there (DeepEP), and not once to each expert.
            reached: Of a network's rate between domains, what such traffic reaches.
        """
        if group.ranks < 2 or size <= 0:
            return 0.0
        if not once and "all_to_all" in self.measured:
            return self.seconds("all_to_all", size * copies, group)
        domains, ranks = group.spread, group.ranks
        of_domains = domains * (1 - (1 - 1 / domains) ** copies) if once else float(copies)
        of_ranks = ranks * (1 - (1 - 1 / ranks) ** copies) if once else float(copies)
        slow = self.cluster.between.rate(self.cluster.node) * reached
        fast = self.cluster.link.device_gb_s or slow
        outside = size * of_domains * (domains - 1) / domains / (slow * 1e9) if domains > 1 else 0.0
        inside = size * of_ranks * (1 - 1 / group.near) / (fast * 1e9) if group.near > 1 else 0.0
        latency = (self.cluster.between if domains > 1 else self.cluster.link).latency_us * log2(ranks) * 1e-6
        return max(outside, inside) + latency


def _factor(operation: Operation, ranks: int) -> float:
    """What each rank sends of the full tensor: what relates nccl-tests' bus bandwidth to seconds."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "send": 1.0}.get(operation, share)


def measured_from(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """The curves of a calibration file: rows of op, ranks, nodes, bytes, bus_gb_s and latency_us."""
    found: dict[Operation, list[Curve]] = {}
    for operation, nodes in sorted({(row["op"], int(row["nodes"])) for row in rows}):
        mine = sorted(
            (float(row["bytes"]), float(row["bus_gb_s"]), float(row.get("latency_us", 0.0)))
            for row in rows
            if (row["op"], int(row["nodes"])) == (operation, nodes)
        )
        sizes, rates, latencies = zip(*mine, strict=True)
        found.setdefault(operation, []).append(Curve(nodes, sizes, rates, latencies[0]))
    return found
