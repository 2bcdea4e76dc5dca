"""A shard: many samples' predictions in one file of safetensors, which any reader of these can open.

A tensor of a record is one tensor of the file, `data.<where it is in the record>`, shape `(samples, ...)`. What has
another shape for each sample, or is no tensor, is `data.<where>.bytes`, one item behind the other, with
`data.<where>.lengths`. `index.start` and `index.length` say which samples these are, as runs of neighbouring indices,
in the order of the rows; `batches` has the numbers of the batches in the order of the loader.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fairlead.errors import CheckpointError
from fairlead_distributed.predictions.records import Column, Structure, build, decoded, encoded
from fairlead_runs.commit import FileWriter

_STORED: Final = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""What every version of safetensors has; tensors of another dtype are items."""
_META: Final = "fairlead.predictions"
FORMAT: Final = 1
_Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Batch:
    """What one batch gave: its number in the order of the loader, the samples' indices, their columns."""

    number: int
    indices: Sequence[int]
    structure: Structure
    columns: list[Column]

    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sum(c.nbytes if isinstance(c, Tensor) else sum(map(_size, c)) for c in self.columns)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return 16 + sum(map(_size, inner))


def write_shard(file: FileWriter, loader: int, fingerprint: str, batches: Sequence[Batch]) -> None:
    """Writes these batches, whose records are of one structure, as one shard."""
    structure, count = batches[0].structure, len(batches[0].columns)
    indices = np.concatenate([np.asarray(batch.indices, dtype=np.int64) for batch in batches])
    begins = np.flatnonzero(np.diff(indices, prepend=indices[:1] - 2) != 1)
    tensors = {
        "index.start": torch.from_numpy(indices[begins]),
        "index.length": torch.from_numpy(np.diff(begins, append=len(indices))),
        "batches": torch.tensor([batch.number for batch in batches]),
    }
    names = _names(structure, count)
    for number, name in enumerate(names):
        tensors |= _column(name, [batch.columns[number] for batch in batches])
    about = {"format": FORMAT, "loader": loader, "fingerprint": fingerprint, "structure": structure, "columns": names}
    file.write(save(tensors, {_META: json.dumps(about, ensure_ascii=False, separators=(",", ":"))}))


def _names(structure: Structure, count: int) -> list[str]:
    found: dict[int, str] = {}

    def walk(part: Structure, path: str) -> None:
        if isinstance(part, int):
            found[part] = path
            return
        ((kind, inner),) = part.items()
        for name, one in inner if kind == "dict" else enumerate(inner):
            walk(one, f"{path}.{name}")

    walk(structure, "data")
    names = [found[number] for number in range(count)]
    return names if len(set(names)) == count else [f"data.{number}" for number in range(count)]


def _column(name: str, pieces: list[Column]) -> dict[str, Tensor]:
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    kinds = {(piece.dtype, piece.shape[1:]) for piece in tensors}
    if len(tensors) == len(pieces) and len(kinds) == 1 and tensors[0].dtype in _STORED:
        return {name: torch.cat(tensors)}
    items = [encoded(row) for piece in pieces for row in piece]
    data = np.frombuffer(b"".join(items), dtype=np.uint8)
    return {f"{name}.bytes": torch.from_numpy(data.copy()), f"{name}.lengths": torch.tensor([*map(len, items)])}


class ShardFile:
    """One shard; rows are read when they are requested.

    Raises:
        CheckpointError: It is damaged, or no shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: Any = None
        self._ends: dict[str, Tensor] = {}
        try:
            about = json.loads(self._file().metadata()[_META])
            self.loader: int = about["loader"]
            self.fingerprint: str = about["fingerprint"]
            self.structure: Structure = about["structure"]
            self.columns: list[str] = about["columns"]
            newer = about["format"] > FORMAT
        except SafetensorError as error:
            raise CheckpointError("a shard of predictions is damaged", where=str(path), why=str(error)) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError("this is no shard of predictions", where=str(path), why=str(error)) from error
        finally:
            self.close()
        if newer:
            raise CheckpointError(
                "a newer version of Fairlead has written these predictions",
                where=str(path),
                fix="upgrade Fairlead",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the file itself, as the workers of a loader do."""
        return {**self.__dict__, "_opened": None, "_ends": {}}

    def close(self) -> None:
        """Closes the file; it is reopened when rows are read."""
        self._opened, self._ends = None, {}

    def indices(self) -> _Numbers:
        """The samples in the order of the rows, int64, shape `(samples,)`."""
        file = self._file()
        starts, lengths = file.get_tensor("index.start").numpy(), file.get_tensor("index.length").numpy()
        ends = np.cumsum(lengths)
        return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum(), dtype=np.int64)

    def batches(self) -> _Numbers:
        """The numbers of its batches, int64."""
        numbers: _Numbers = self._file().get_tensor("batches").numpy().copy()
        return numbers

    def rows(self, column: int, begin: int = 0, end: int | None = None) -> Column:
        """Some rows of a column, all without an end: a tensor, shape `(end - begin, ...)`, or a list of items."""
        name, file = self.columns[column], self._file()
        if name in file.keys():  # noqa: SIM118 - no mapping
            found: Tensor = file.get_slice(name)[begin:end].clone()
            return found
        if name not in self._ends:
            self._ends[name] = file.get_tensor(f"{name}.lengths").cumsum(0)
        ends = self._ends[name][slice(begin, end)].tolist()
        bounds = [int(self._ends[name][begin - 1]) if begin else 0, *ends]
        data = file.get_slice(f"{name}.bytes")[bounds[0] : bounds[-1]].numpy().tobytes()
        return [decoded(data[a - bounds[0] : b - bounds[0]]) for a, b in itertools.pairwise(bounds)]

    def records(self, begin: int, end: int) -> list[Any]:
        """Some samples' records; their tensors share no memory with those of other samples."""
        columns = [self.rows(column, begin, end) for column in range(len(self.columns))]

        def record(row: int) -> Any:
            def value(number: int) -> Any:
                item = columns[number][row]
                return item.clone() if isinstance(columns[number], Tensor) and end - begin > 1 else item

            return build(self.structure, value)

        return [record(row) for row in range(end - begin)]

    def _file(self) -> Any:
        if self._opened is None:
            self._opened = safe_open(self.path, "pt")
        return self._opened
