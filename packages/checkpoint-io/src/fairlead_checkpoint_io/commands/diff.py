"""`fairlead checkpoint diff`: which tensors and values of two checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fairlead.cli.session import Session
from fairlead_checkpoint_io.commands.sources import Source, sources
from fairlead_checkpoint_io.commands.states import read_file
from fairlead_checkpoint_io.files.formats import REST
from fairlead_checkpoint_io.files.shards import Shards
from fairlead_checkpoint_io.files.trust import allowed, refuse_unsafe, unsafe_globals
from fairlead_runs.commands.texts import table
from fairlead_runs.describe import plain

_SHOWN: Final = 40
_LONG: Final = 60
_PART: Final = 1 << 22
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Compares two checkpoints; 1 when they differ."""
    with sources((arguments.a, arguments.b), session) as both:
        a, b = (_entries(source, arguments.trust) for source in both)
        weights = arguments.weights or any(source.format.weights_only for source in both)
        if weights:
            a, b = ({name: value for name, value in side.items() if name.startswith("state_dict.")} for side in (a, b))
        with_ranks = [side for side in (a, b) if any(map(_of_rank, side))]
        if len(with_ranks) == 1 and not weights:
            a, b = ({name: value for name, value in side.items() if not _of_rank(name)} for side in (a, b))
        found = list(_differences(a, b))
    same = len(a.keys() | b.keys()) - len(found)
    if arguments.json:
        document = {"a": both[0].location, "b": both[1].location, "weights_only": weights}
        session.print_json(
            {**document, "ranks_compared": len(with_ranks) != 1, "equal": not found, "same": same, "differences": found}
        )
        return 1 if found else 0
    if weights and not arguments.weights:
        session.print("one of them holds weights only; nothing else is compared")
    elif len(with_ranks) == 1 and not weights:
        session.print("one of them is a plain state without the ranks' own parts; those are not compared")
    if not found:
        session.print(f"equal in every bit: {same} tensors and values")
        return 0
    rows = [("name", "what", "max abs", "max rel"), *(_cells(item) for item in found[:_SHOWN])]
    for line in table(rows):
        session.print(line)
    if len(found) > _SHOWN:
        session.print(f"and {len(found) - _SHOWN} more; --json lists all")
    session.print(f"{len(found)} differ, {same} are equal")
    return 1


def _of_rank(name: str) -> bool:
    """Whether an entry is of a rank's own file: generators, positions of loaders."""
    return name.startswith("rank-")


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            side = "b" if name not in a else "a"
            yield {"name": name, "kind": f"only in {side}", side: _text(b[name] if name not in a else a[name])}
            continue
        x, y = a[name], b[name]
        if isinstance(x, LazyTensor) and isinstance(y, LazyTensor):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                kind = "shape" if x.shape != y.shape else "dtype"
                yield {"name": name, "kind": kind, "a": _text(x), "b": _text(y)}
            elif (difference := compare(x.read(), y.read())) is not None:
                numbers = plain(difference._asdict(), lambda value, _: str(value))
                yield {"name": name, "kind": "values", "a": _text(x), "b": _text(y), **numbers}
        elif not _same(x, y):
            yield {"name": name, "kind": "value", "a": _text(x), "b": _text(y)}


def _same(x: Any, y: Any) -> bool:
    if type(x) is not type(y):
        return False
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(_same(p, q) for p, q in zip(x, y, strict=True))
    if isinstance(x, float) and math.isnan(x) and math.isnan(y):
        return True
    try:
        return bool(x == y)
    except (TypeError, ValueError, RuntimeError):  # an object whose equality raises or is no bool
        return False


def _text(value: Any) -> str:
    if isinstance(value, LazyTensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _short(name: str) -> str:
    """A name that leaves room for the other columns: its ends say what it is."""
    return name if len(name) <= _LONG else f"{name[: _LONG // 3]}...{name[-(2 * _LONG // 3 - 3) :]}"


def _cells(item: Mapping[str, Any]) -> tuple[str, ...]:
    name = _short(item["name"])
    if item["kind"] == "values":
        what = f"{item['differing']} of {item['of']} elements, {item['a']}"
        return name, what, *(_number(item[key]) for key in ("max_abs", "max_rel"))
    if item["kind"].startswith("only"):
        side = item["kind"][-1]
        return name, f"only in {side.upper()}: {item[side]}", "", ""
    return name, f"{item['a']} -> {item['b']}", "", ""


def _number(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value


# -- every tensor and value under a name; tensors are read lazily


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read into host memory, or mapped there, when it is compared."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


_HELD: Final = (Mapping, list, tuple, torch.Tensor, LazyTensor)


def _entries(source: Source, trust: Sequence[str] = ()) -> dict[str, Any]:
    """All of a checkpoint: tensors as `LazyTensor`, other values as they are, each by its path (`state_dict.0.weight`).

    Files are mapped, not read: comparing two of 10 GiB takes the memory of two tensors.
    """
    format_ = source.format
    found = dict(_flat(format_.call(format_.entries or format_.read, source.content, trust)))
    if source.own is not None:
        for path in sorted(source.path.glob("rank-*.pt")):
            found.update((f"{path.stem}.{name}", value) for name, value in _flat(_mapped(path, trust)))
    return found


def entries_of_file(path: Path, trust: Sequence[str]) -> Any:
    """A file of torch.save, mapped; weights alone, which have no names around them, as a state."""
    state = _mapped(path, trust)
    bare = isinstance(state, Mapping) and all(isinstance(value, torch.Tensor) for value in state.values())
    return {"state_dict": state} if bare else state


def _mapped(path: Path, trust: Sequence[str]) -> Any:
    refuse_unsafe(path, unsafe_globals(path, trust))
    try:
        with allowed(trust, where="--trust"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # of the old format, which cannot be mapped, or damaged: the thorough reader says which
        return read_file(path, trust)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value by its path; an empty mapping or list is one too."""
    if isinstance(value, torch.Tensor):
        yield path, LazyTensor(tuple(value.shape), value.dtype, lambda: value.detach())
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, _HELD) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}")
    elif path:  # all of an empty file is nothing
        yield path, value


def entries_of_shards(folder: Path, trust: Sequence[str]) -> dict[str, Any]:
    """A distributed folder; a tensor is read when it is compared."""
    shards = Shards(folder)
    stored = shards.contents.state_dict_metadata
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    with allowed(trust, where="--trust"):
        others = shards.read_host([name for name in stored if name not in tensors])
    lazy = {name: _lazy(shards, name, entry) for name, entry in tensors.items()}
    rest = _mapped(folder / REST, trust) if (folder / REST).is_file() else {}
    return shards.checkpoint({**others, **lazy}, rest)


def _lazy(shards: Shards, name: str, entry: TensorStorageMetadata) -> LazyTensor:
    return LazyTensor(tuple(entry.size), entry.properties.dtype, lambda: shards.read_host([name])[name])


# -- two tensors, bit by bit, a part at a time


class Difference(NamedTuple):
    """How two tensors of one shape and dtype differ."""

    differing: int  # by their bits: +0 and -0 differ, a NaN equals the same NaN
    of: int
    max_abs: float  # inf where one is infinite or NaN and the other is not
    max_rel: float  # divided by the larger of both magnitudes


def compare(a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """The difference of two tensors of one shape and dtype; None when they are equal in every bit."""
    if a.is_sparse or a.is_quantized or a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    first, second = a.reshape(-1), b.reshape(-1)
    count, largest, relative = 0, 0.0, 0.0
    for start in range(0, first.numel(), _PART):
        x, y = (side[start : start + _PART].contiguous() for side in (first, second))
        bits = _BITS[x.element_size()]
        other = x.view(bits) != y.view(bits)
        found = int(other.sum())
        if not found:
            continue
        count += found
        x, y = (side.view(bits)[other].view(side.dtype) for side in (x, y))  # torch 2.9 cannot index float8
        apart, part = _apart(x, y)
        largest, relative = max(largest, apart), max(relative, part)
    return Difference(count, first.numel(), largest, relative) if count else None


def _apart(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The largest absolute and relative difference."""
    if not x.is_floating_point() and x.element_size() == 8:
        apart = max(abs(p - q) for p, q in zip(x.tolist(), y.tolist(), strict=True))
        return float(apart), apart / max(1, int(x.abs().max()), int(y.abs().max()))
    p, q = x.double(), y.double()
    apart = (p - q).abs()
    apart = torch.where(p == q, 0.0, torch.where(apart.isnan(), math.inf, apart))
    size = torch.maximum(p.abs(), q.abs())
    part = torch.where(apart == 0, 0.0, apart / size)
    return float(apart.max()), float(torch.where(part.isnan(), math.inf, part).max())
