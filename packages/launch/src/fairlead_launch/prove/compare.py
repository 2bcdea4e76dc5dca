"""How two runs of a proof differ: metrics, the last checkpoint, and what the user's code keeps in memory."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fairlead.cli import main
from fairlead.cli.session import Session
from fairlead.errors import RunFailedError
from fairlead_launch.prove.plan import END, RESTORED, at_step
from fairlead_runs.commit import best_or_newest, newest_complete

_ORDER: Final = ("state_dict.", "optimizer_states.", "lr_schedulers.")
_BESIDE: Final = ("callbacks.", "loops.", "fairlead", "rank-")
"""What a checkpoint holds beside the training itself: of callbacks, of the run, of each rank."""
_OWNER: Final = re.compile(r" of the (callback|model|data|module) ")


@dataclass(frozen=True)
class Unequal:
    """One thing that is not the same in two runs: `train/loss`, `shadow['layer.weight'] of the callback Ema`."""

    kind: Literal["metric", "tensor", "checkpoint", "memory"]
    name: str
    how: str
    in_both: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.how}"

    @property
    def owner(self) -> str | None:
        """Who keeps it: callback, model, data or module."""
        found = _OWNER.search(self.name)
        return found[1] if found else None

    def is_part_of(self, other: Unequal) -> bool:
        """Whether it lies inside of another one: an item of a list that differs as well."""
        (path, _, owner), (container, _, its) = (one.name.rpartition(" of the ") for one in (self, other))
        return owner == its and path.startswith((f"{container}[", f"{container}."))


@dataclass(frozen=True)
class Trained:
    """What a run of a proof left: its run directory, and what its ranks noted."""

    path: Path
    notes: Path

    @property
    def ranks(self) -> int:
        """How many have left notes."""
        return len(list(self.notes.glob(f"{END}-*.json")))

    def not_restored(self, resumed: Trained, saved: int | None = None) -> list[Unequal]:
        """What the user's code kept at the checkpoint, and what a resumed run begins with in its place.

        `saved` is the step of the checkpoint, which may be one of the script's own behind the plan's.

        A variable of a module that only one of them has is no state: the loop sets it, as `for batch in loader` does.
        """
        name = at_step(saved) if saved is not None else RESTORED
        name = name if list(self.notes.glob(f"{name}-*.json")) else RESTORED
        pairs = _memory(self, resumed, name, RESTORED)
        found = [one for one in pairs if one.in_both or one.owner != "module"]
        return [one for one in found if not any(one.is_part_of(other) for other in found)]


def differences(reference: Trained, other: Trained, session: Session) -> list[Unequal]:
    """How a run differs from the undisturbed one, in the order in which it shows."""
    return [*_metrics(reference, other), *_checkpoint(reference, other, session), *_memory(reference, other, END, END)]


def trained_otherwise(found: list[Unequal]) -> bool:
    """Whether the training itself was another one: tensors differ that are neither of a rank nor of a callback."""
    return any(one.kind == "tensor" and not one.name.startswith(_BESIDE) for one in found)


def _metrics(reference: Trained, other: Trained) -> Iterator[Unequal]:
    """The first step at which each column differs, in the order of the steps."""
    rows = [_rows(run.path / "metrics.csv") for run in (reference, other)]
    reported = set()
    for row, its in itertools.zip_longest(*rows, fillvalue={}):
        step = row.get("step") or its.get("step")
        for name in dict.fromkeys([*row, *its]):
            if name not in reported and row.get(name, "") != its.get(name, ""):
                reported.add(name)
                was, became = (one.get(name) or "nothing" for one in (row, its))
                yield Unequal("metric", name, f"{was} became {became} at step {step} (metrics.csv)")


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _checkpoint(reference: Trained, other: Trained, session: Session) -> Iterator[Unequal]:
    """What `fairlead checkpoint diff` finds in the last checkpoints; weights first."""
    newest = [newest_complete(run.path / "checkpoints").checkpoint for run in (reference, other)]
    if newest[0] is None or newest[1] is None or newest[0].step != newest[1].step:
        steps = [one.step if one is not None else "none" for one in newest]
        yield Unequal("checkpoint", "the step of the last checkpoint", f"{steps[0]} became {steps[1]}")
        return
    places = [one.path for one in newest if one is not None]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        words = ["checkpoint", "diff", *map(str, places), "--json"]
        main(words, plugins=session.plugins, environ=session.environ, cwd=session.cwd)
    try:
        found: list[dict[str, Any]] = json.loads(out.getvalue())["differences"]
    except (ValueError, KeyError):
        raise RunFailedError("the checkpoints cannot be compared", why=err.getvalue().strip() or None) from None
    for one in sorted(found, key=_shows):
        yield Unequal("tensor" if one["kind"] == "values" else "checkpoint", one["name"], _how(one))
    chosen = [f"{found.path.name}, {why}" for found, why in map(best_or_newest, (p.parent for p in places))]
    if chosen[0] != chosen[1]:
        yield Unequal("checkpoint", "the checkpoint that an evaluation takes", f"{chosen[0]} became {chosen[1]}")


def _shows(one: dict[str, Any]) -> int:
    """Its place among what differs: weights first, then what was registered, last what a run notes of itself."""
    if one["name"].startswith(_BESIDE):
        return len(_ORDER) + 1
    return next((place for place, start in enumerate(_ORDER) if one["name"].startswith(start)), len(_ORDER))


def _how(one: dict[str, Any]) -> str:
    if one["kind"] == "values":
        return f"{one['differing']} of {one['of']} elements differ, by at most {float(one['max_abs']):.3g}"
    return f"{one.get('a', 'nothing')} became {one.get('b', 'nothing')}"


def _memory(reference: Trained, other: Trained, when: str, its_when: str) -> Iterator[Unequal]:
    """What the user's code keeps, by rank: a rank that says the same as one before it is passed over."""
    reported = set()
    for path in sorted(reference.notes.glob(f"{when}-*.json")):
        its = other.notes / path.name.replace(when, its_when)
        one, two = (json.loads(file.read_bytes()) if file.exists() else {} for file in (path, its))
        for name in dict.fromkeys([*one, *two]):
            if name not in reported and one.get(name) != two.get(name):
                reported.add(name)
                how = f"{one.get(name, 'nothing')} became {two.get(name, 'nothing')}"
                yield Unequal("memory", name, how, in_both=name in one and name in two)
