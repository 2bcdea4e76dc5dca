"""Whether two runs ended alike, bit for bit; and if not, what differs first, by name."""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairlead_runs.commit import Checkpoint, best, list_checkpoints
from integration_tests.exact.jobs.probe import RESULT

__all__ = ["differences", "recorded", "scalars"]

# What a manifest says of its own making, and not of the training.
_OF_THIS_START = {"start"}
# Files of TensorBoard are named after the time and the process; their content is compared.
_OF_THIS_PROCESS = {"logger_positions"}
_MOST = 12


def differences(reference: Path, run: Path) -> list[str]:
    """How a run differs from the undisturbed one, the most telling first; empty: not at all.

    Args:
        reference: The run directory of the undisturbed run.
        run: That of the other. Both working directories hold a `result.json`.
    """
    found = itertools.chain(
        _metrics(reference, run), _checkpoints(reference, run), _events(reference, run), _results(reference, run)
    )
    return list(itertools.islice(found, _MOST))


# -- metrics.csv


def _metrics(reference: Path, run: Path) -> Iterator[str]:
    one, other = ((folder / "metrics.csv").read_bytes() for folder in (reference, run))
    if one == other:
        return
    rows, others = one.decode().splitlines(), other.decode().splitlines()
    for number, (row, its) in enumerate(itertools.zip_longest(rows, others), start=1):
        if row != its:
            yield f"metrics.csv line {number}: {row!r} became {its!r} (of {rows[0]!r})"
            return
    yield "metrics.csv: the ends of lines"


# -- checkpoints


def _checkpoints(reference: Path, run: Path) -> Iterator[str]:
    one, other = (_newest_of_steps(folder) for folder in (reference, run))
    final = max(one, default=-1)
    # The final weights first: everything else shows in them, or does not matter as much.
    for step in sorted(one.keys() & other.keys(), key=lambda step: (step != final, step)):
        yield from _files(one[step], other[step])
    if one.keys() != other.keys():
        yield f"checkpoints: of steps {sorted(one)} became those of {sorted(other)}"
    for step in sorted(one.keys() & other.keys()):
        said, its = ({k: v for k, v in c.metadata.items() if k not in _OF_THIS_START} for c in (one[step], other[step]))
        yield from _unequal(said, its, f"step {step}: manifest")
    rated = [_rated(list(folder.values())) for folder in (one, other)]
    if rated[0] != rated[1]:
        yield f"best checkpoints: {rated[0]} became {rated[1]}"


def _newest_of_steps(run: Path) -> dict[int, Checkpoint]:
    """By step; of two of one step the newest."""
    ordered = sorted(list_checkpoints(run / "checkpoints"), key=lambda item: item.order)
    return {item.step: item for item in ordered}


def _rated(checkpoints: list[Checkpoint]) -> list[tuple[int, Any]]:
    monitor = next((item.metadata["monitor"] for item in checkpoints if item.metadata["monitor"]), None)
    if monitor is None:
        return []
    return [(item.step, item.metadata["metrics"][monitor]) for item in best(checkpoints, monitor)]


def _files(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    names, others = (sorted(p.name for p in c.path.iterdir() if p.suffix in (".ckpt", ".pt")) for c in (one, other))
    if names != others:
        yield f"step {one.step}: files {names} became {others}"
    for name in sorted(set(names) & set(others), reverse=True):
        contents = [torch.load(c.path / name, weights_only=False) for c in (one, other)]
        if name.startswith("rank-"):
            contents = [{k: v for k, v in content.items() if k not in _OF_THIS_PROCESS} for content in contents]
        homes = [str(c.path.parents[1]) for c in (one, other)]
        yield from _unequal(contents[0], contents[1], f"step {one.step}: {name}", homes)


def _unequal(one: Any, other: Any, place: str, homes: list[str] | None = None) -> Iterator[str]:
    """The places at which two structures are not the same to the last bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        missing = [repr(k) for k in one if k not in other] + [f"+{k!r}" for k in other if k not in one]
        if missing:
            yield f"{place}: keys {', '.join(missing[:5])}"
        for key in one:
            if key in other:
                yield from _unequal(one[key], other[key], f"{place}[{key!r}]", homes)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{place}: {len(one)} items became {len(other)}"
        for index, (item, its) in enumerate(zip(one, other, strict=False)):
            yield from _unequal(item, its, f"{place}[{index}]", homes)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        yield from _unequal_tensors(one.detach().cpu(), other.detach().cpu(), place)
    elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            yield f"{place}: an array became another"
    elif isinstance(one, float) and isinstance(other, float):
        if struct.pack("d", one) != struct.pack("d", other):
            yield f"{place}: {one!r} became {other!r}"
    elif isinstance(one, str) and isinstance(other, str):
        if homes is not None:
            one, other = one.replace(homes[0], "RUN"), other.replace(homes[1], "RUN")
        if one != other:
            yield f"{place}: {one!r} became {other!r}"
    elif type(one) is not type(other) or one != other:
        yield f"{place}: {one!r:.60} became {other!r:.60}"


def _unequal_tensors(one: torch.Tensor, other: torch.Tensor, place: str) -> Iterator[str]:
    if one.dtype != other.dtype or one.shape != other.shape:
        yield f"{place}: {one.dtype} {tuple(one.shape)} became {other.dtype} {tuple(other.shape)}"
        return
    bits, others = (tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (one, other))
    wrong = (bits != others).any(dim=1)
    if wrong.any():
        most = (one.double() - other.double()).abs().max().item()
        where = int(wrong.nonzero()[0])
        values = one.reshape(-1)[where].item(), other.reshape(-1)[where].item()
        yield (
            f"{place}: {int(wrong.sum())} of {one.numel()} elements differ, by at most {most:.3g};"
            f" element {where} was {values[0]!r}, became {values[1]!r}"
        )


# -- TensorBoard


def _events(reference: Path, run: Path) -> Iterator[str]:
    """Each point as often as in the undisturbed run (Lightning itself writes `epoch` more than once a step)."""
    one, other = (
        Counter((step, tag, struct.pack("f", value)) for tag, step, value in scalars(r)) for r in (reference, run)
    )
    for name, points in (("lost", one - other), ("too many or wrong", other - one)):
        if points:
            step, tag, value = min(points)
            yield (
                f"TensorBoard: {sum(points.values())} points {name}, first {tag!r} at step {step}:"
                f" {struct.unpack('f', value)[0]!r}"
            )


def scalars(run: Path) -> list[tuple[str, int, float]]:
    """All raw points (tag, step, value) in TensorBoard's files of a run, in the order in which they were written."""
    folder = run / "tensorboard"
    if not folder.exists():
        return []
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        RawEventFileLoader,
    )
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    found = []
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            found += [
                (value.tag, int(event.step), float(value.simple_value))
                for value in event.summary.value
                if value.HasField("simple_value")
            ]
    return found


# -- what the process knew at the end


def _results(reference: Path, run: Path) -> Iterator[str]:
    documents = [json.loads((folder.parents[1] / RESULT).read_text()) for folder in (reference, run)]
    for document in documents:
        # `step-00000009.2` is the second checkpoint of a step: how many there were is no property of the training.
        document["best_model_path"] = Path(document["best_model_path"]).parent.name.partition(".")[0]
    yield from _unequal(documents[0], documents[1], RESULT)


def recorded(cwd: Path, name: str) -> list[dict[str, Any]]:
    """What a job noted in a file of its working directory."""
    return [json.loads(line) for line in (cwd / name).read_text().splitlines()]
