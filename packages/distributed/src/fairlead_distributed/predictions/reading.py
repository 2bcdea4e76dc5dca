"""`Predictions`: what a prediction has written, as one sequence in the order of the dataset."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import torch
from torch import Tensor

from fairlead.errors import CheckpointError
from fairlead_distributed.predictions.records import build
from fairlead_distributed.predictions.shard_file import ShardFile
from fairlead_runs.commit import Manifest, read_manifest, verify

_OPEN: Final = 2
"""Files that are open at a time: their pages count as memory of the process."""
_ROWS: Final = 256
"""Samples that are read at a time."""


class _Samples(Sequence[Any]):
    """A sequence of which one item is read at a time."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """One prediction, or those of a slice as a list."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"there is no prediction {index}: there are {len(self)}")
        return self._one(at)

    @abstractmethod
    def _one(self, at: int) -> Any: ...


class LoaderPredictions(_Samples):
    """The predictions of one loader, a part of `Predictions`."""

    def __init__(self, shards: Sequence[ShardFile]) -> None:
        self._shards = shards
        self._opened: OrderedDict[int, ShardFile] = OrderedDict()
        parts = [shard.indices() for shard in shards]
        for shard in shards:
            shard.close()
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        found = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        # A sample may be there twice: padding that a sampler has added, or one that it draws more than once.
        indices, self._rows = np.unique(found, return_index=True)
        self.indices: Tensor = torch.from_numpy(indices)
        """The index in the dataset of each of them, int64, shape `(samples,)`, ascending."""

    def __len__(self) -> int:
        """How many samples were predicted."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        """All predictions, of which a few are in memory at a time."""
        for begin in range(0, len(self), _ROWS):
            rows = self._rows[begin : begin + _ROWS]
            shards = np.searchsorted(self._ends, rows, side="right")
            # Where one row follows another in the same shard, they are read together.
            cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(shards) != 0)) + 1
            for run in np.split(np.arange(len(rows)), cuts):
                yield from self._records(int(shards[run[0]]), int(rows[run[0]]), len(run))

    def to_torch(self) -> Any:
        """All of them as one batch: each tensor of a record becomes one of shape `(samples, ...)`, the rest lists.

        A tensor whose shape differs between the samples is a list of tensors. Where the records are not all of one
        structure, it is the list of all records.
        """
        if not self._shards or any(shard.structure != self._shards[0].structure for shard in self._shards):
            return list(self)
        return build(self._shards[0].structure, self._joined)

    def _joined(self, number: int) -> Any:
        columns = [shard.rows(number) for shard in self._shards]
        if len({(c.dtype, c.shape[1:]) if isinstance(c, Tensor) else None for c in columns}) == 1 and isinstance(
            columns[0], Tensor
        ):
            return torch.cat([column for column in columns if isinstance(column, Tensor)])[self._rows]
        rows = [row for column in columns for row in column]
        return [rows[index] for index in self._rows]

    def _one(self, at: int) -> Any:
        row = int(self._rows[at])
        return self._records(int(np.searchsorted(self._ends, row, side="right")), row, 1)[0]

    def _records(self, number: int, row: int, count: int) -> list[Any]:
        shard = self._opened.pop(number, self._shards[number])
        self._opened[number] = shard
        if len(self._opened) > _OPEN:
            self._opened.popitem(last=False)[1].close()
        begin = row - (int(self._ends[number - 1]) if number else 0)
        return shard.records(begin, begin + count)


class Predictions(_Samples):
    """The predictions in a folder, in the order of the dataset, each sample once, read when they are requested.

    What `predict_step` returned for a batch is taken apart: a tensor gives its row, a list its item, and a dict or
    tuple of these one with the row or item of each; a named tuple or dataclass comes as a dict, an array as a tensor.
    With several loaders, the samples of the first come first; `loaders` has each apart.

    It holds 16 bytes a sample in memory, no predictions.

    Args:
        folder: What `fairlead predict --out` or `DistributedPredictionWriter` has written.

    Raises:
        CheckpointError: There are no predictions, they are not complete, or a file is not as it was written.

    Example:
        >>> predictions = Predictions("out")                    # doctest: +SKIP
        >>> len(predictions), predictions[7], predictions[-2:]  # doctest: +SKIP
        >>> predictions.to_torch()                              # doctest: +SKIP
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        manifest = _manifest(self.folder)
        self._refuse_damage(deep=False)
        files = [ShardFile(self.folder / name) for name in sorted(manifest.files) if name.endswith(".safetensors")]
        count = int(manifest.metadata["loaders"])
        self.loaders: tuple[LoaderPredictions, ...] = tuple(
            LoaderPredictions([file for file in files if file.loader == number]) for number in range(count)
        )
        """The predictions of each loader, sequences as this one."""
        self._begins = list(itertools.accumulate(map(len, self.loaders), initial=0))

    def __len__(self) -> int:
        """How many samples were predicted."""
        return self._begins[-1]

    def __iter__(self) -> Iterator[Any]:
        """All predictions, of which a few are in memory at a time."""
        return itertools.chain.from_iterable(self.loaders)

    def __repr__(self) -> str:
        return f"Predictions({str(self.folder)!r}): {len(self)} samples"

    def verify(self) -> None:
        """Compares every byte with the checksums; CheckpointError says which file has changed."""
        self._refuse_damage(deep=True)

    def to_torch(self) -> Any:
        """All predictions in memory, as one batch: tensors of shape `(samples, ...)`, lists for what is no such tensor.

        With several loaders a list, with what each gave. See `LoaderPredictions.to_torch`.
        """
        made = [one.to_torch() for one in self.loaders]
        return made[0] if len(made) == 1 else made

    def _one(self, at: int) -> Any:
        number = next(n for n, begin in enumerate(self._begins[1:]) if at < begin)
        return self.loaders[number][at - self._begins[number]]

    def _refuse_damage(self, *, deep: bool) -> None:
        damage = verify(self.folder, deep=deep)
        if damage:
            raise CheckpointError(
                "the predictions are damaged",
                where=str(self.folder),
                why="\n".join(map(str, damage[:5])),
                fix="predict again into another folder",
            )


def _manifest(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        begun = folder.is_dir() and any(folder.glob("loader-*.safetensors"))
        raise CheckpointError(
            "these predictions are not complete" if begun else "there are no predictions",
            where=str(folder),
            why="the prediction has not ended" if begun else error.why,
            fix="run it again with the same folder: it resumes where it stopped" if begun else None,
        ) from None
    if manifest.metadata.get("predictions") != 1:
        raise CheckpointError("these are no predictions", where=str(folder), why="its manifest is of something else")
    return manifest
