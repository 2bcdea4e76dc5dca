"""`fairlead checkpoint diff`: which tensors and values of two checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead_checkpoint_io.commands.differences import Difference, compare
from fairlead_checkpoint_io.commands.entries import WEIGHTS, Lazy, entries_of
from fairlead_checkpoint_io.commands.places import Source
from fairlead_checkpoint_io.commands.stored import sources
from fairlead_runs.commands.texts import table

__all__ = ["run"]

_SHOWN: Final = 40
_LONG: Final = 60


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Compares two checkpoints; 1 when they differ."""
    with sources((arguments.a, arguments.b), session) as both:
        return _compared(both, arguments, session)


def _compared(both: Sequence[Source], arguments: argparse.Namespace, session: Session) -> int:
    a, b = (entries_of(source, arguments.trust) for source in both)
    weights = arguments.weights or any(source.format == "safetensors" for source in both)
    if weights:
        a, b = ({name: value for name, value in side.items() if name.startswith(WEIGHTS)} for side in (a, b))
    alone = [side for side in (a, b) if any(map(_of_rank, side))]
    if len(alone) == 1 and not weights:
        a, b = ({name: value for name, value in side.items() if not _of_rank(name)} for side in (a, b))
    found = list(_differences(a, b))
    same = len(a.keys() | b.keys()) - len(found)
    if arguments.json:
        document = {"a": both[0].place, "b": both[1].place, "weights_only": weights}
        session.print_json(
            {**document, "ranks_compared": len(alone) != 1, "equal": not found, "same": same, "differences": found}
        )
        return 1 if found else 0
    if weights and not arguments.weights:
        session.print("one of them holds weights only; nothing else is compared")
    elif len(alone) == 1 and not weights:
        session.print("one of them is a plain state without the ranks' own parts; those are not compared")
    if not found:
        session.print(f"equal in every bit: {same} tensors and values")
        return 0
    rows = [("name", "what", "max abs", "max rel", "max ULP"), *(_cells(item) for item in found[:_SHOWN])]
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
            yield {"name": name, "kind": f"only in {side}", side: _told(b[name] if name not in a else a[name])}
            continue
        x, y = a[name], b[name]
        if isinstance(x, Lazy) and isinstance(y, Lazy):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                kind = "shape" if x.shape != y.shape else "dtype"
                yield {"name": name, "kind": kind, "a": _told(x), "b": _told(y)}
            elif (difference := compare(x.read(), y.read())) is not None:
                yield {"name": name, "kind": "values", "a": _told(x), "b": _told(y), **_numbers(difference)}
        elif not _same(x, y):
            yield {"name": name, "kind": "value", "a": _told(x), "b": _told(y)}


def _same(x: Any, y: Any) -> bool:
    if type(x) is not type(y):
        return False
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(_same(p, q) for p, q in zip(x, y, strict=True))
    if isinstance(x, float) and math.isnan(x) and math.isnan(y):
        return True
    try:
        return bool(x == y)
    except (TypeError, ValueError, RuntimeError):  # an object with an equality of its own
        return False


def _numbers(found: Difference) -> dict[str, Any]:
    return {
        "differing": found.count,
        "of": found.total,
        "max_abs": _finite(found.max_abs),
        "max_rel": _finite(found.max_rel),
        "max_ulp": found.max_ulp,
    }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no infinity


def _told(value: Any) -> str:
    if isinstance(value, Lazy):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _cells(item: Mapping[str, Any]) -> tuple[str, ...]:
    if item["kind"] == "values":
        what = f"{item['differing']} of {item['of']} elements, {item['a']}"
        return item["name"], what, *(_number(item[key]) for key in ("max_abs", "max_rel")), _ulp(item["max_ulp"])
    if item["kind"].startswith("only"):
        side = item["kind"][-1]
        return item["name"], f"only in {side.upper()}: {item[side]}", "", "", ""
    return item["name"], f"{item['a']} -> {item['b']}", "", "", ""


def _number(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value


def _ulp(value: int | None) -> str:
    return "-" if value is None else str(value)
