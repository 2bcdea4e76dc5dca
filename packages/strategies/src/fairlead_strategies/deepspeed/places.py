"""Where ZeRO keeps each element of a parameter, and a rank's vectors made of those of another number of ranks.

Stages 1 and 2 lay the parameters of a group end to end and cut that into equal parts, one for each rank. Stage 3 cuts
each parameter by itself, and lays the parts of a rank end to end. Both are one formula: `Place`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Sizes = Sequence[Mapping[str, int]]
"""The parameters of each flat vector, in its order: their names, and how many elements they have."""
Read = Callable[[int, int], Tensor]
"""Gives a flat vector by the rank that has it and its number. Only what is needed of it is read."""


class Place(NamedTuple):
    """Element i of a parameter is on rank `(lead + i) // part`, there at `base + (lead + i) % part`."""

    vector: int
    """Which of a rank's flat vectors it is in."""
    numel: int
    lead: int
    part: int
    base: int

    def held_by(self, rank: int) -> tuple[int, int]:
        """The first of the elements that a rank has, and the one behind its last; equal where it has none."""
        first = min(max(0, rank * self.part - self.lead), self.numel)
        return first, max(first, min(self.numel, (rank + 1) * self.part - self.lead))

    def offset(self, element: int) -> int:
        """Where this element is in the vector of the rank that has it."""
        return self.base + (self.lead + element) % self.part

    def stretches(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The ranks that have the elements from `first` until before `end`, each with its first and behind its last."""
        while first < end:
            rank = (self.lead + first) // self.part
            stop = min(end, self.held_by(rank)[1])
            yield rank, first, stop
            first = stop


def end_to_end(sizes: Sizes, gaps: Sequence[Sequence[int]], parts: Sequence[int]) -> dict[str, Place]:
    """Stages 1 and 2.

    Args:
        sizes: The parameters of each group.
        gaps: Elements left free behind each parameter of each group.
        parts: How many elements of each group a rank has.

    Example:
        >>> end_to_end([{"a": 3, "b": 4}], [[1, 0]], [4])["b"]
        Place(vector=0, numel=4, lead=4, part=4, base=0)
    """
    found: dict[str, Place] = {}
    for vector, (group, behind, part) in enumerate(zip(sizes, gaps, parts, strict=True)):
        lead = 0
        for (name, numel), gap in zip(group.items(), behind, strict=True):
            found[name] = Place(vector, numel, lead, part, base=0)
            lead += numel + gap
    return found


def each_by_itself(sizes: Sizes, ranks: int) -> dict[str, Place]:
    """Stage 3.

    Example:
        >>> each_by_itself([{"a": 3, "b": 4}], ranks=2)["b"]
        Place(vector=0, numel=4, lead=0, part=2, base=2)
    """
    found: dict[str, Place] = {}
    for vector, group in enumerate(sizes):
        base = 0
        for name, numel in group.items():
            part = -(-numel // ranks)
            found[name] = Place(vector, numel, 0, part, base)
            base += part
    return found


@dataclass
class Move:
    """How one vector of a rank comes from the vectors of another number of ranks."""

    rank: int
    """The rank that gets it."""
    width: int
    """Its elements, those included that belong to no parameter."""
    places: Sequence[tuple[Place, Place]]
    """For each parameter in it, where it is and where it goes."""

    def sources(self) -> list[tuple[int, int]]:
        """The vectors it comes from, by rank and number; the first is always of rank 0, as an example."""
        found = {(rank, was.vector) for was, goes in self.places for rank, _, _ in self._stretches(was, goes)}
        example = 0, self.places[0][0].vector
        return [example, *sorted(found - {example})]

    def of(self, read: Read) -> Tensor:
        """The vector, zero where it has no parameter."""
        example = read(*self.sources()[0])
        full = torch.zeros(self.width, dtype=example.dtype, device=example.device)
        for was, goes in self.places:
            for rank, first, end in self._stretches(was, goes):
                at, source = goes.offset(first), was.offset(first)
                full[at : at + end - first] = read(rank, was.vector)[source : source + end - first]
        return full

    def _stretches(self, was: Place, goes: Place) -> Iterator[tuple[int, int, int]]:
        return was.stretches(*goes.held_by(self.rank))
