"""The predictions of one loader: rows of several shards as one sequence in the order of the dataset."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
import torch
from torch import Tensor

from fairlead_distributed.predictions.records import Structure, build
from fairlead_distributed.predictions.shard_file import ShardFile, record_at

_OPEN: Final = 4
"""Files that are kept open at a time."""
_ROWS: Final = 256
"""Samples that are read at a time where one follows another."""
_Runs = np.ndarray[Any, Any]


class LoaderPredictions(Sequence[Any]):
    """The predictions of one loader, a part of `Predictions`."""

    def __init__(self, shards: Sequence[ShardFile]) -> None:
        self._shards = shards
        self._opened: OrderedDict[int, ShardFile] = OrderedDict()
        self._runs = _ordered([shard.index_runs() for shard in shards])
        self._ends: _Runs = np.cumsum(self._runs[:, 1])

    def __len__(self) -> int:
        """How many samples were predicted."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """One prediction, or those of a slice as a list."""
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        at = place_of(place, len(self))
        run = int(np.searchsorted(self._ends, at, side="right"))
        _, length, number, row = self._runs[run].tolist()
        return self._records(number, row + at - int(self._ends[run]) + length, 1)[0]

    def __iter__(self) -> Iterator[Any]:
        """All predictions, of which a few are in memory at a time."""
        for _, _, records in self.pieces():
            yield from records

    @cached_property
    def indices(self) -> Tensor:
        """The index in the dataset of each of them, int64, shape `(samples,)`, ascending."""
        runs = self._runs
        first = np.repeat(runs[:, 0] - (self._ends - runs[:, 1]), runs[:, 1])
        return torch.from_numpy(first + np.arange(len(first), dtype=np.int64))

    def pieces(self) -> Iterator[tuple[int, int, list[Any]]]:
        """The predictions, some at a time, with the index of the first of them and how many they are."""
        for first, length, number, row in self._runs.tolist():
            for begin in range(0, length, _ROWS):
                count = min(_ROWS, length - begin)
                yield first + begin, count, self._records(number, row + begin, count)

    def to_torch(self) -> Any:
        """All of them as one batch: each tensor of a record becomes one of shape `(samples, ...)`, the rest lists.

        A tensor whose shape differs between the samples is a list of tensors. Where the records are not all of one
        structure, it is the list of all records.
        """
        structure = self.structure()
        if structure is None:
            return list(self)
        return build(structure, self._whole)

    def structure(self) -> Structure | None:
        """How all records are made of columns; None: they are not alike, or there are none."""
        found = [None if shard.about.mixed else shard.about.structure for shard in self._shards]
        return found[0] if found and all(one == found[0] for one in found) else None

    def _whole(self, column: int) -> Any:
        kinds = {shard.dense(column) for shard in self._shards}
        kind = next(iter(kinds))
        if len(kinds) > 1 or kind is None:
            return [row for *_, piece in self._column(column) for row in _each(piece)]
        made = torch.empty(len(self), *kind[1], dtype=kind[0])
        for begin, count, piece in self._column(column):
            made[begin : begin + count] = piece
        return made

    def _column(self, column: int) -> Iterator[tuple[int, int, Any]]:
        begin = 0
        for _, length, number, row in self._runs.tolist():
            yield begin, length, self._shard(number).rows(column, row, row + length)
            begin += length

    def _records(self, number: int, row: int, count: int) -> list[Any]:
        shard = self._shard(number)
        columns = [shard.rows(one, row, row + count) for one in range(len(shard.about.columns))]
        return [record_at(shard.about, columns, one) for one in range(count)]

    def _shard(self, number: int) -> ShardFile:
        shard = self._opened.pop(number, self._shards[number])
        self._opened[number] = shard
        if len(self._opened) > _OPEN:
            self._opened.popitem(last=False)[1].close()
        return shard


def _each(piece: Any) -> list[Any]:
    return [row.clone() for row in piece] if isinstance(piece, Tensor) else piece


def _ordered(shards: Sequence[_Runs]) -> _Runs:
    """Runs of neighbouring samples as (first index, how many, shard, row), each index once, in order."""
    if not shards:
        return np.empty((0, 4), dtype=np.int64)
    parts = []
    for number, runs in enumerate(shards):
        rows = np.cumsum(runs[:, 1]) - runs[:, 1]
        parts.append(np.column_stack([runs, np.full(len(runs), number), rows]))
    found: _Runs = np.concatenate(parts)
    found = found[np.argsort(found[:, 0], kind="stable")]
    if (found[:-1, 0] + found[:-1, 1] <= found[1:, 0]).all():
        return found
    # Some are there twice: padding that a sampler has added, or a sample that it draws more than once.
    within = np.arange(found[:, 1].sum()) - np.repeat(np.cumsum(found[:, 1]) - found[:, 1], found[:, 1])
    each = np.repeat(found, found[:, 1], axis=0)
    each[:, 0] += within
    each[:, 3] += within
    each[:, 1] = 1
    each = each[np.argsort(each[:, 0], kind="stable")]
    return each[np.diff(each[:, 0], prepend=-1) > 0]


def place_of(place: int, length: int) -> int:
    """A place counted from the front; IndexError where there is none such."""
    at = place + length if place < 0 else place
    if not 0 <= at < length:
        raise IndexError(f"there is no prediction {place}: there are {length}")
    return at
