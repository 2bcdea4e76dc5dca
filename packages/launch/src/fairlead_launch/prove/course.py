"""The course of a proof: a run without a stop, the same with a kill and a resume; what differs, why, and what to do."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from fairlead.cli import main
from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunFailedError
from fairlead.exactness import last_record, sentence
from fairlead_launch.prove.plan import END, PLAN, RESTORED, Plan, at_step
from fairlead_launch.trials import run_fairlead
from fairlead_runs.commit import best_or_newest, newest_complete

_SHOWN: Final = 5
_TAIL: Final = 2000


class Proof(ABC):
    """One proof, in a folder of its own, of a job or of a script.

    Attributes:
        name: The job or the script.
        fixes: What to do about a value that is not restored, by who keeps it: callback, model, data, module.
        deterministic: What makes two runs of this training alike, as far as they differ by clocks or kernels.
    """

    fixes: ClassVar[Mapping[str, str]]
    deterministic: ClassVar[str]

    def __init__(self, session: Session, name: str, folder: Path, plan: Plan) -> None:
        self.name = name
        self.session = session
        self.folder = folder
        self.plan = plan
        self._seeds = 0

    @abstractmethod
    def words(self) -> list[str]:
        """What is behind `fairlead` to train once; in the folder `runs` of `folder`."""

    def compared(self, undisturbed: Trained) -> str:
        """What was compared, for the last line of a proof."""
        newest = newest_complete(undisturbed.path / "checkpoints").checkpoint
        assert newest is not None  # they were compared
        ends = "" if newest.metadata.get("epoch") else "; no epoch ended in these steps"
        text = "all that the checkpoint holds, metrics.csv, and what your code and its modules keep"
        return f"compared after {newest.step} steps: {text}{ends}"

    def run(self, retained: list[Path]) -> int:
        """Tries it and prints the report: 0 where the resume is equal, else 1.

        The folder of a proof that differs, or of a training that failed, is added to `retained`.
        """
        try:
            equal, lines = self.report()
        except RunFailedError as error:
            retained.append(self.folder)
            error.fix = "\n".join(filter(None, (error.fix, f"the files remain in {self.folder}")))
            raise
        if not equal:
            retained.append(self.folder)
            lines.append(f"  files: {self.folder}")
        for line in lines:
            self.session.print(line)
        return 0 if equal else 1

    def report(self) -> tuple[bool, list[str]]:
        """Whether the resume is equal in every bit, and what to say of it: what differs, and why."""
        undisturbed = self.trained("undisturbed")
        self.to_end("interrupted", kill=True)
        killed, saved = self._killed()
        resumed = self.trained("interrupted", "resumed")
        ranks = f"{undisturbed.ranks} rank{'s' if undisturbed.ranks > 1 else ''}"
        done = f"{ranks}, killed after step {killed}, resumed from the checkpoint of step {saved}"
        last = newest_complete(undisturbed.path / "checkpoints").checkpoint
        if last is None or last.step <= saved:
            raise RunFailedError(
                f"nothing was trained between the resume, from step {saved}, and the last checkpoint",
                why=f"the last checkpoint of the undisturbed run is {f'of step {last.step}' if last else 'missing'}",
                fix="a longer training, or more steps",
            )
        compared = self.compared(undisturbed)
        found = differences(undisturbed, resumed, self.session)
        if not found:
            return True, [f"equal in every bit: {done}", compared]
        # Only now: what differs between any two runs is not the resume's doing.
        control = self.trained("control")
        noise = differences(undisturbed, control, self.session)
        if trained_otherwise(noise):
            return False, self._not_deterministic(undisturbed, control, noise)
        names = {one.name for one in noise}
        left = [one for one in found if one.name not in names]
        if not left:
            but = ", ".join(sorted(names)[:_SHOWN])
            text = f"but what differs between any two runs of this job: {but}"
            return True, [f"equal in every bit: {done}", text, compared]
        lost = [one for one in undisturbed.not_restored(resumed, saved) if one.name not in names]
        record = last_record(resumed.path)
        reported = [sentence(reason) for reason in record.seen] if record is not None else []
        return False, [f"the resume differs: {done}", *explained(left, lost, reported, self.fixes)]

    def _not_deterministic(self, undisturbed: Trained, control: Trained, noise: list[Unequal]) -> list[str]:
        """Two undisturbed runs differ; whether the order of sets is the reason, a third one shows."""
        lines = ["two undisturbed runs differ: no resume of this job can be exact", f"  first: {noise[0]}"]
        lines += [f"  also:  {one}" for one in noise[1:_SHOWN]]
        same_hashes = self.trained("same-hashes", hash_seed=1)
        if not trained_otherwise(differences(undisturbed, same_hashes, self.session)):
            why = "the order of a set, or hash() of a text: two runs with the same PYTHONHASHSEED are equal"
            return [*lines, f"  why:   {why}", "  do:    sort what comes from a set: sorted(set(names))"]
        lines += [f"  why:   {one}" for one in undisturbed.not_restored(control)[:_SHOWN]]
        causes = "a clock, a generator that is not seeded, or kernels that are not deterministic"
        return [*lines, f"  why:   {causes}", f"  do:    count steps instead of seconds; {self.deterministic}"]

    def trained(self, name: str, resume_of: str | None = None, hash_seed: int | None = None) -> Trained:
        """One run that comes to its end; its directory is moved away, so that all are trained in the same path."""
        self.to_end(resume_of or name, hash_seed=hash_seed, folder=name, resumes=resume_of is not None)
        folder_of_run = self.folder / name
        shutil.move(self._run(), folder_of_run / "run")
        return Trained(folder_of_run / "run", folder_of_run / "notes")

    def to_end(
        self,
        what: str,
        *,
        kill: bool = False,
        hash_seed: int | None = None,
        folder: str | None = None,
        resumes: bool = False,
    ) -> None:
        """Trains to the end, or to the kill; raises with the training's own error if it failed."""
        self._seeds += 1
        folder_of_run = self.folder / (folder or what)
        notes = folder_of_run / "notes"
        notes.mkdir(parents=True, exist_ok=True)
        for stale in notes.glob("*.json") if resumes else ():
            stale.unlink()  # of the start that was killed
        instructions = self.plan.to_json(notes, kill=kill, runs=str(self.folder / "runs"), resumes=resumes)
        environ = {**self.session.environ, PLAN: instructions}
        if environ.get("PYTHONHASHSEED", "random") == "random":  # else a resumed process has the same as well
            environ["PYTHONHASHSEED"] = str(hash_seed or self._seeds)
        began = time.monotonic()
        log = folder_of_run / f"{what}.log"
        code = run_fairlead(self.words(), self.session, environ, log)
        self.session.warn(f"{what}: {'killed' if kill else 'trained'} in {time.monotonic() - began:.0f} s")
        if code and not kill:
            raise RunFailedError(f"the {what} run ended with exit code {code}", why=_tail(log))

    def _run(self) -> Path:
        runs = self.folder / "runs"
        found = sorted(runs.iterdir()) if runs.is_dir() else []
        if not found:
            raise ConfigError(
                "the training has opened no run: there is nothing to resume",
                where=self.name,
                why="it uses neither fairlead.Run nor the callback Fairlead of Lightning or Hugging Face",
                fix="add one of them, as docs/how-to/custom-loop.md shows",
            )
        return found[0]

    def _killed(self) -> tuple[int, int]:
        """Behind which step the ranks were killed, and the step of the checkpoint that they left."""
        marks = sorted((self.folder / "interrupted" / "notes").glob("killed-*"))
        if not marks:
            raise RunFailedError(
                "the run ended before it could be killed behind its first checkpoint",
                why=_tail(self.folder / "interrupted" / "interrupted.log"),
                fix="a longer training (a limit such as max_epochs ends it?), or fewer steps",
            )
        newest = newest_complete(self._run() / "checkpoints").checkpoint
        assert newest is not None  # they were killed behind it
        return int(marks[0].read_text()), newest.step


def _tail(log: Path) -> str | None:
    return log.read_text(errors="replace").strip()[-_TAIL:] or None


def explained(
    found: Sequence[Unequal], lost: Sequence[Unequal], reported: Sequence[str], fixes: Mapping[str, str]
) -> list[str]:
    """What differs, in order; the reasons that the start reported or the memory shows; what to do."""
    lines = [f"  first: {found[0]}", *(f"  also:  {one}" for one in found[1:_SHOWN])]
    if len(found) > _SHOWN:
        lines.append(f"         and {len(found) - _SHOWN} more")
    lines += [f"  why:   the start reported: {reason}" for reason in reported[:_SHOWN]]
    if not lost and not reported:
        return [*lines, "  why:   not found in what model, data, callbacks and their modules keep"]
    lines += [f"  why:   not restored: {one}" for one in lost[:_SHOWN]]
    kinds = dict.fromkeys(one.owner for one in lost)
    return [*lines, *(f"  do:    {fixes[kind]}" for kind in kinds if kind is not None and kind in fixes)]


_ORDER: Final = ("state_dict.", "optimizer_states.", "lr_schedulers.")
_BESIDE: Final = ("callbacks.", "loops.", "fairlead", "rank-")
"""What a checkpoint holds beside the training itself: of callbacks, of the run, of each rank."""
_LAST_STEP: Final = "the step of the last checkpoint"
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
        """What the user's code held at the checkpoint, and what a resumed run begins with instead.

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
    """Whether the training itself was another one: its last step, or tensors of neither a rank nor a callback."""
    tensors = any(one.kind == "tensor" and not one.name.startswith(_BESIDE) for one in found)
    return tensors or any(one.name == _LAST_STEP for one in found)


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
        yield Unequal("checkpoint", _LAST_STEP, f"{steps[0]} became {steps[1]}")
        return
    paths = [one.path for one in newest if one is not None]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        words = ["checkpoint", "diff", *map(str, paths), "--json"]
        main(words, plugins=session.plugins, environ=session.environ, cwd=session.cwd)
    try:
        found: list[dict[str, Any]] = json.loads(out.getvalue())["differences"]
    except (ValueError, KeyError):
        raise RunFailedError("the checkpoints cannot be compared", why=err.getvalue().strip() or None) from None
    for one in sorted(found, key=_shows):
        yield Unequal("tensor" if one["kind"] == "values" else "checkpoint", one["name"], _how(one))
    chosen = [f"{found.path.name}, {why}" for found, why in map(best_or_newest, (p.parent for p in paths))]
    if chosen[0] != chosen[1]:
        yield Unequal("checkpoint", "the checkpoint that an evaluation takes", f"{chosen[0]} became {chosen[1]}")


def _shows(one: dict[str, Any]) -> int:
    """Its position among what differs: weights first, then what was registered, last what a run notes of itself."""
    if one["name"].startswith(_BESIDE):
        return len(_ORDER) + 1
    return next((position for position, start in enumerate(_ORDER) if one["name"].startswith(start)), len(_ORDER))


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
