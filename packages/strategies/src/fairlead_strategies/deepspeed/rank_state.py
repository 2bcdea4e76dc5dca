"""What one rank writes of ZeRO's optimizer, and what another number of ranks would have written in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from deepspeed.checkpoint import constants as key
from torch import Size, Tensor

from fairlead_strategies.deepspeed.places import Move, Place, each_by_itself, end_to_end

Shapes = Sequence[Mapping[str, Size]]
"""The shapes of the parameters in each flat vector, as DeepSpeed notes them."""
_BY_RANKS: Final = (key.GROUP_PADDINGS, key.PARAM_ALIGNMENT_PADDINGS, key.PARTITION_COUNT, key.PARAM_SLICE_MAPPINGS)
"""What of it follows from the number of ranks and the settings alone."""
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
            raise CannotRecutError("it was written with `elastic_checkpoint`, which has a layout of its own")
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
    def places(self) -> dict[str, Place]:
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
        Move(rank, width, [(first.places[name], now.places[name]) for name in group])
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
