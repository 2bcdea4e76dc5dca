"""Positions as the ranks that share a sequence count them when each begins with 0: in one process, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COUNTING: Final = (torch.arange, torch.linspace, torch.range)
_SUMS: Final = (torch.cumsum, Tensor.cumsum)


def local_positions(lengths: set[int], parts: int) -> Iterator[LocalPositions]:
    """Each way in which ranks may have counted: parts of a sequence, and what counts.

    Args:
        lengths: Those of full sequences.
        parts: The ranks that share one.
    """
    for balanced in (True, False):
        for plain in (False, True):
            yield LocalPositions(lengths, parts, balanced=balanced, plain=plain)


class LocalPositions(TorchFunctionMode):
    """Inside, what counts the tokens of a full sequence counts those of each part.

    Args:
        lengths: Those of full sequences.
        parts: The ranks that share one.
        balanced: Each has a part of the head of the sequence and one of its tail.
        plain: Also `torch.arange(length)`, which context parallelism answers by itself.
    """

    def __init__(self, lengths: set[int], parts: int, *, balanced: bool, plain: bool) -> None:
        super().__init__()
        chunks = 2 * parts if balanced else parts
        self._lengths = {one for one in lengths if one % chunks == 0}
        self._parts = parts
        self._balanced = balanced
        self._plain = plain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _COUNTING and made.numel() in self._lengths:
            if not self._plain and func is torch.arange and args in ((made.numel(),), (0, made.numel())):
                return made
            length = made.numel()
            shorter = {length + off: length // self._parts + off for off in (-1, 0, 1)}

            def own(value: Any) -> Any:
                return shorter.get(value, value) if isinstance(value, int | float) else value

            local = func(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
            return self._by_rank(made, 0, lambda _: local) if local.numel() * self._parts == length else made
        if func is torch.tensor and made.ndim == 1 and made.numel() in self._lengths:
            return self._by_rank(made, 0, lambda _: made[: made.numel() // self._parts])
        if func in _SUMS:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            if args[0].shape[dim] in self._lengths:
                return self._by_rank(args[0], dim, lambda part: func(part, dim))
        return made

    def _by_rank(self, whole: Tensor, dim: int, of_part: Callable[[Tensor], Tensor]) -> Tensor:
        """What each rank makes of its tokens, in the order of the sequence."""
        parts = self._parts
        if not self._balanced:
            return torch.cat([of_part(one) for one in whole.chunk(parts, dim)], dim)
        chunks = whole.chunk(2 * parts, dim)
        made = [of_part(torch.cat([chunks[i], chunks[2 * parts - 1 - i]], dim)).chunk(2, dim) for i in range(parts)]
        return torch.cat([*(head for head, _ in made), *(tail for _, tail in reversed(made))], dim)
