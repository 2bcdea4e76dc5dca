"""A shard: many samples' predictions in one file, which is a file of safetensors that every reader of these can open.

A tensor of a record is one tensor of the file, `data.<where it is in the record>`, shape `(samples, ...)`. What has
another shape for each sample, or is no tensor, is `data.<where>.bytes`, one item behind the other, with
`data.<where>.lengths`. `index.start` and `index.length` say which samples these are, as runs of neighbouring indices,
in the order of the rows. The layout is that of https://github.com/huggingface/safetensors#format; it is written here so
that the pieces are hashed and written as they come, with no copy of the whole.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fairlead.errors import CheckpointError
from fairlead_distributed.predictions.records import Column, Structure, build, decoded, encoded
from fairlead_runs.commit import FileWriter

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BY_NAME: Final = {name: dtype for dtype, name in _DTYPES.items()}
_LENGTH: Final = struct.Struct("<Q")
_META: Final = "fairlead.predictions"
FORMAT: Final = 1


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


@dataclass(frozen=True)
class About:
    """What a shard says of itself; `batches` are its batches' numbers, as runs of first number and count.

    `mixed`: its records are of several structures, and are the items of one column.
    """

    loader: int
    fingerprint: str
    samples: int
    batches: list[list[int]]
    structure: Structure
    columns: list[str]
    mixed: bool


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return 16 + sum(map(_size, inner))


def _array(numbers: Sequence[int]) -> np.ndarray[Any, Any]:
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.int64)
    return np.asarray(numbers, dtype=np.int64)


def runs_of(numbers: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers as runs of neighbours, in their order: shape `(runs, 2)`, the first number and how many."""
    array = np.asarray(numbers, dtype=np.int64)
    if not len(array):
        return np.empty((0, 2), dtype=np.int64)
    begins = np.flatnonzero(np.diff(array, prepend=array[0] - 2) != 1)
    return np.stack([array[begins], np.diff(begins, append=len(array))], axis=1)


def write_shard(file: FileWriter, loader: int, fingerprint: str, batches: Sequence[Batch]) -> None:
    """Writes these batches as one shard; records of one structure get columns, of several an item for each sample."""
    structure, columns = batches[0].structure, len(batches[0].columns)
    mixed = any(batch.structure != structure for batch in batches)
    if mixed:
        structure, columns = 0, 1
        pieces: list[list[Column]] = [[_whole_records(batch) for batch in batches]]
    else:
        pieces = [[batch.columns[number] for batch in batches] for number in range(columns)]
    names = _names(structure, columns)
    indices = runs_of(np.concatenate([_array(batch.indices) for batch in batches]))
    tensors = {"index.start": [_narrow(indices[:, 0])]}
    if len(indices) and indices[:, 1].max() > 1:
        tensors["index.length"] = [_narrow(indices[:, 1])]
    for name, column in zip(names, pieces, strict=True):
        tensors |= _column(name, column)
    about = {
        "format": FORMAT,
        "loader": loader,
        "fingerprint": fingerprint,
        "samples": sum(len(batch.indices) for batch in batches),
        "batches": runs_of(sorted(batch.number for batch in batches)).tolist(),
        "structure": structure,
        "columns": names,
        "mixed": mixed,
    }
    _write(file, tensors, about)


def _whole_records(batch: Batch) -> list[Any]:
    def record(row: int) -> Any:
        return {"structure": batch.structure, "columns": [column[row] for column in batch.columns]}

    return [record(row) for row in range(len(batch.indices))]


def _names(structure: Structure, count: int) -> list[str]:
    found: dict[int, str] = {}

    def walk(part: Structure, path: str) -> None:
        if isinstance(part, int):
            found[part] = path
            return
        ((kind, inner),) = part.items()
        if kind == "array":
            walk(inner, path)
            return
        named = inner[2] if kind == "record" else inner if kind == "dict" else enumerate(inner)
        for name, one in named:
            walk(one, f"{path}.{name}")

    walk(structure, "data")
    names = [found[number] for number in range(count)]
    return names if len(set(names)) == count else [f"data.{number}" for number in range(count)]


def _column(name: str, pieces: list[Column]) -> dict[str, list[Tensor]]:
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    kinds = {(piece.dtype, piece.shape[1:]) for piece in tensors}
    if len(tensors) == len(pieces) and len(kinds) == 1 and tensors[0].dtype in _DTYPES:
        return {name: tensors}
    items = [encoded(row) for piece in pieces for row in piece]
    lengths = _narrow(np.fromiter(map(len, items), dtype=np.int64, count=len(items)))
    return {f"{name}.bytes": [_bytes(b"".join(items))], f"{name}.lengths": [lengths]}


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _narrow(values: np.ndarray[Any, Any]) -> Tensor:
    small = not len(values) or (values.max() < 2**31 and values.min() >= -(2**31))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32 if small else np.int64))


def _write(file: FileWriter, tensors: dict[str, list[Tensor]], about: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {_META: json.dumps(about, ensure_ascii=False, separators=(",", ":"))}}
    position = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].element_size())  # so that each begins aligned
    for name, pieces in ordered:
        size = sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        offsets = [position, position + size]
        header[name] = {"dtype": _DTYPES[pieces[0].dtype], "shape": shape, "data_offsets": offsets}
        position += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    file.write(_LENGTH.pack(len(text)) + text)
    for _, pieces in ordered:
        for piece in pieces:
            if piece.nbytes:
                file.write(memoryview(piece.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


class ShardFile:
    """One shard; rows are read when they are asked for.

    Raises:
        CheckpointError: It is no whole shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                self._header: dict[str, Any] = json.loads(file.read(min(length, size)))
            about = json.loads(self._header.pop("__metadata__")[_META])
            newer = about.pop("format") > FORMAT
            if not newer:
                self.about = About(**about)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise CheckpointError("this is no shard of predictions", where=str(path), why=str(error)) from error
        self._begin = _LENGTH.size + length
        if newer or any(entry["dtype"] not in _BY_NAME for entry in self._header.values()):
            raise CheckpointError(
                "a newer version of Fairlead has written these predictions",
                where=str(path),
                fix="upgrade Fairlead",
            )
        if size != self._begin + max((entry["data_offsets"][1] for entry in self._header.values()), default=0):
            raise CheckpointError("a shard of predictions is damaged", where=str(path), why=f"it has {size} bytes")
        self._fd: int | None = None
        self._closed: Any = None
        self._ends: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the file itself, as the workers of a loader do."""
        return {**self.__dict__, "_fd": None, "_ends": {}, "_closed": None}

    def index_runs(self) -> np.ndarray[Any, Any]:
        """The samples in the order of the rows, as runs: shape `(runs, 2)`, first index and how many."""
        starts = self._tensor("index.start").to(torch.int64)
        lengths = self._tensor("index.length") if "index.length" in self._header else torch.ones_like(starts)
        self.close()
        return torch.stack([starts, lengths.to(torch.int64)], dim=1).numpy()

    def dense(self, column: int) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """The dtype of a column that is a tensor, and the shape of a row; None of another column."""
        entry = self._header.get(self.about.columns[column])
        return None if entry is None else (_BY_NAME[entry["dtype"]], tuple(entry["shape"][1:]))

    def rows(self, column: int, begin: int, end: int) -> Column:
        """Some rows of a column: a tensor, shape `(end - begin, ...)`, or a list of items."""
        name = self.about.columns[column]
        if name in self._header:
            return self._tensor(name, begin, end)
        if name not in self._ends:
            self._ends[name] = self._tensor(f"{name}.lengths").to(torch.int64).cumsum(0)
        ends = self._ends[name]
        places = [int(ends[begin - 1]) if begin else 0, *ends[begin:end].tolist()]
        data = self._tensor(f"{name}.bytes", places[0], places[-1]).numpy().tobytes()
        return [decoded(data[a - places[0] : b - places[0]]) for a, b in itertools.pairwise(places)]

    def close(self) -> None:
        """Closes the file; it is opened again when it is asked."""
        if self._fd is not None:
            self._closed()
        self._fd, self._ends = None, {}

    def _tensor(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        entry = self._header[name]
        dtype, shape = _BY_NAME[entry["dtype"]], entry["shape"]
        end = shape[0] if end is None else end
        row = int(np.prod(shape[1:], dtype=np.int64))
        count = (end - begin) * row
        if not count:
            return torch.empty((end - begin, *shape[1:]), dtype=dtype)
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY)
            self._closed = weakref.finalize(self, os.close, self._fd)
        made = torch.empty((end - begin, *shape[1:]), dtype=dtype)
        view = memoryview(made.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        place = self._begin + entry["data_offsets"][0] + begin * row * dtype.itemsize
        while view.nbytes and (read := os.preadv(self._fd, [view], place)):
            view, place = view[read:], place + read
        if view.nbytes:
            raise CheckpointError("a shard of predictions was cut off", where=str(self.path))
        return made


def record_at(about: About, columns: Sequence[Column], row: int) -> Any:
    """One sample's record; its tensors share no memory with those of other samples."""
    if about.mixed:
        whole: Any = columns[0][row]
        return build(whole["structure"], whole["columns"].__getitem__)

    def value(number: int) -> Any:
        column = columns[number]
        return column[row].clone() if isinstance(column, Tensor) and len(column) > 1 else column[row]

    return build(about.structure, value)
