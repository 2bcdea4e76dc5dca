"""What one rank writes of ZeRO's optimizer, and what another number of ranks would have written instead.

Stages 1 and 2 lay the parameters of a group end to end and cut that into equal parts, one for each rank. Stage 3 cuts
each parameter by itself, and lays the parts of a rank end to end. Both are one formula: `Slot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from deepspeed.checkpoint import constants as key
from torch import Size, Tensor

Sizes = Sequence[Mapping[str, int]]
"""The parameters of each flat vector, in its order: their names, and how many elements they have."""
Read = Callable[[int, int], Tensor]
"""Gives a flat vector by the rank that has it and its number. Only what is needed of it is read."""


class Slot(NamedTuple):
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


def end_to_end(sizes: Sizes, gaps: Sequence[Sequence[int]], parts: Sequence[int]) -> dict[str, Slot]:
    """Stages 1 and 2.

    Args:
        sizes: The parameters of each group.
        gaps: Elements left free behind each parameter of each group.
        parts: How many elements of each group a rank has.

    Example:
        >>> end_to_end([{"a": 3, "b": 4}], [[1, 0]], [4])["b"]
        Slot(vector=0, numel=4, lead=4, part=4, base=0)
    """
    found: dict[str, Slot] = {}
    for vector, (group, behind, part) in enumerate(zip(sizes, gaps, parts, strict=True)):
        lead = 0
        for (name, numel), gap in zip(group.items(), behind, strict=True):
            found[name] = Slot(vector, numel, lead, part, base=0)
            lead += numel + gap
    return found


def each_by_itself(sizes: Sizes, ranks: int) -> dict[str, Slot]:
    """Stage 3.

    Example:
        >>> each_by_itself([{"a": 3, "b": 4}], ranks=2)["b"]
        Slot(vector=0, numel=4, lead=0, part=2, base=2)
    """
    found: dict[str, Slot] = {}
    for vector, group in enumerate(sizes):
        base = 0
        for name, numel in group.items():
            part = -(-numel // ranks)
            found[name] = Slot(vector, numel, 0, part, base)
            base += part
    return found


@dataclass
class Move:
    """How one vector of a rank comes from the vectors of another number of ranks."""

    rank: int
    """The rank that gets it."""
    width: int
    """Its elements, those included that belong to no parameter."""
    slots: Sequence[tuple[Slot, Slot]]
    """For each parameter in it, where it is and where it goes."""

    def sources(self) -> list[tuple[int, int]]:
        """The vectors it comes from, by rank and number; the first is always of rank 0, as an example."""
        found = {(rank, was.vector) for was, goes in self.slots for rank, _, _ in self._stretches(was, goes)}
        example = 0, self.slots[0][0].vector
        return [example, *sorted(found - {example})]

    def of(self, read: Read) -> Tensor:
        """The vector, zero where it has no parameter."""
        example = read(*self.sources()[0])
        full = torch.zeros(self.width, dtype=example.dtype, device=example.device)
        for was, goes in self.slots:
            for rank, first, end in self._stretches(was, goes):
                at, source = goes.offset(first), was.offset(first)
                full[at : at + end - first] = read(rank, was.vector)[source : source + end - first]
        return full

    def _stretches(self, was: Slot, goes: Slot) -> Iterator[tuple[int, int, int]]:
        return was.stretches(*goes.held_by(self.rank))


Shapes = Sequence[Mapping[str, Size]]
"""The shapes of the parameters in each flat vector, as DeepSpeed notes them."""
_BY_RANKS: Final = (key.GROUP_PADDINGS, key.PARAM_ALIGNMENT_PADDINGS, key.PARTITION_COUNT, key.PARAM_SLICE_MAPPINGS)
"""Its entries that follow from the number of ranks and the settings alone."""
_PLAIN: Final = (int, float, str, type(None))


class CannotRecutError(Exception):
    """Why a state cannot be cut for another number of ranks."""


class RankState:
    """DeepSpeed's dictionary of one rank, read in the same way for every stage.

    Args:
        saved: What its ZeRO optimizer's `state_dict` gives.
        shapes: The parameters in its vectors.
        ranks: The number of ranks that it is one of.

    Raises:
        CannotRecutError: It has another layout than ZeRO's own.
    """

    def __init__(self, saved: Mapping[str, Any], shapes: Shapes, ranks: int) -> None:
        stage = saved.get(key.ZERO_STAGE)  # none is DeepSpeed's BF16 optimizer, of stage 1
        split = stage == 3
        self.saved, self.shapes = saved, shapes
        self.inner_name = key.OPTIMIZER_STATE_DICT if split else key.BASE_OPTIMIZER_STATE
        self.weights_name = key.FP32_FLAT_GROUPS if split else key.SINGLE_PARTITION_OF_FP32_GROUPS
        if not isinstance(saved[self.inner_name], Mapping):
            raise CannotRecutError("it was written with `elastic_checkpoint`, which has another layout")
        count = saved[key.PARTITION_COUNT]
        if (set(count) if isinstance(count, Sequence) else {count}) != {ranks}:
            raise CannotRecutError("not all ranks share all parameters: experts, or MiCS")
        self.weights: Sequence[Tensor] = saved[self.weights_name]
        """The master weights, one flat vector after the other."""
        behind = saved[key.GROUP_PADDINGS] if stage in (1, 2) else [0] * len(self.weights)
        self.widths = [part.numel() + padding for part, padding in zip(self.weights, behind, strict=True)]
        """How many elements each vector has; stages 1 and 2 write weights without those behind the last one."""
        self.groups: Sequence[dict[str, Any]] = saved[self.inner_name]["param_groups"]
        """The optimizer's groups; its parameters are the vectors."""
        self.ids = [one for group in self.groups for one in group["params"]]
        """What the optimizer calls each vector."""
        self._split, self._ranks = split, ranks

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """Where each parameter is on all these ranks."""
        sizes = [{name: shape.numel() for name, shape in group.items()} for group in self.shapes]
        if self._split:
            return each_by_itself(sizes, self._ranks)
        gaps = self.saved.get(key.PARAM_ALIGNMENT_PADDINGS) or [[0] * len(group) for group in sizes]
        return end_to_end(sizes, gaps, self.widths)

    def moments(self, vector: int) -> dict[str, Any]:
        """The optimizer's state of a vector: `exp_avg`, `step`, ...; empty before the first step."""
        return self.saved[self.inner_name]["state"].get(self.ids[vector], {})  # type: ignore[no-any-return]

    def described(self) -> dict[str, str]:
        """The shape and the group of each parameter, to be compared."""
        owners = [number for number, group in enumerate(self.groups) for _ in group["params"]]
        return {
            name: f"{list(shape)} in group {owner}"
            for group, owner in zip(self.shapes, owners, strict=True)
            for name, shape in group.items()
        }


def recut(before: Callable[[int], RankState], now: RankState, rank: int) -> dict[str, Any]:
    """What a rank would have written, had there been as many ranks as now.

    Args:
        before: Gives what each rank wrote.
        now: What this rank would write now. Its layout counts, not its numbers.
        rank: This rank.

    Raises:
        CannotRecutError: The parameters differ, or the optimizer has a state that cannot be cut.
    """
    first = before(0)
    _compare(first.described(), now.described())
    if len(first.groups) != len(now.groups):
        raise CannotRecutError(f"its optimizer has {len(first.groups)} groups, and this run's {len(now.groups)}")
    moves = [
        Move(rank, width, [(first.slots[name], now.slots[name]) for name in group])
        for group, width in zip(now.shapes, now.widths, strict=True)
    ]
    states = {one: dict(_moments(before, move)) for one, move in zip(now.ids, moves, strict=True)}
    groups = [{**was, "params": goes["params"]} for was, goes in zip(first.groups, now.groups, strict=True)]
    return {
        **first.saved,
        **{name: now.saved[name] for name in _BY_RANKS if name in now.saved},
        now.weights_name: [move.of(lambda source, vector: before(source).weights[vector]) for move in moves],
        now.inner_name: {"state": {one: state for one, state in states.items() if state}, "param_groups": groups},
    }


def _moments(before: Callable[[int], RankState], move: Move) -> Iterator[tuple[str, Any]]:
    """The optimizer's state of a vector: what has a number for each element is cut, what is one for all stays."""
    sources = [(before(rank), vector) for rank, vector in move.sources()]
    states = [state.moments(vector) for state, vector in sources]
    widths = [(state.widths[vector],) for state, vector in sources]
    if any(state.keys() != states[0].keys() for state in states):
        raise CannotRecutError("the optimizer has state for some parameters of a group, and not for others")
    for name, example in states[0].items():
        values = [state[name] for state in states]
        if all(isinstance(value, Tensor) and value.shape == width for value, width in zip(values, widths, strict=True)):
            yield name, move.of(lambda rank, vector, name=name: before(rank).moments(vector)[name])  # type: ignore[misc]
        elif all(_equal(example, value) for value in values):
            yield name, example.clone() if isinstance(example, Tensor) else example
        else:
            raise CannotRecutError(
                f"the optimizer's `{name}` is neither a number for each element nor one for all ranks"
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.numel() == 1 and torch.equal(a, b)
    return isinstance(a, _PLAIN) and type(a) is type(b) and a == b


def _compare(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted(before.keys() | now.keys()):
        was, is_now = before.get(name, "not trained"), now.get(name, "not trained")
        if was != is_now:
            raise CannotRecutError(f"{name} is {was} in it, and {is_now} in this run")
