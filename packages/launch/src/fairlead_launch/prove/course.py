"""The course of a proof: a run without a stop, the same with a kill and a resume; what differs, why, and what to do."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunFailedError
from fairlead.exactness import last_record, sentence
from fairlead_launch.prove.compare import Trained, Unequal, differences, trained_otherwise
from fairlead_launch.prove.plan import PLAN, Plan
from fairlead_launch.trials import run_fairlead
from fairlead_runs.commit import newest_complete

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

    def run(self, kept: list[Path]) -> int:
        """Tries it and prints the report: 0 where the resume is equal, else 1.

        What is left of one that differs, or of a training that failed, is added to what is `kept`.
        """
        try:
            equal, lines = self.report()
        except RunFailedError as error:
            kept.append(self.folder)
            error.fix = "\n".join(filter(None, (error.fix, f"the files are kept: {self.folder}")))
            raise
        if not equal:
            kept.append(self.folder)
            lines.append(f"  kept:  {self.folder}")
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
        said = [sentence(reason) for reason in record.seen] if record is not None else []
        return False, [f"the resume differs: {done}", *explained(left, lost, said, self.fixes)]

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

    def trained(self, name: str, again: str | None = None, hash_seed: int | None = None) -> Trained:
        """One run that comes to its end; its directory is moved away, so that all are trained at the same place."""
        self.to_end(again or name, hash_seed=hash_seed, folder=name, again=again is not None)
        place = self.folder / name
        shutil.move(self._run(), place / "run")
        return Trained(place / "run", place / "notes")

    def to_end(
        self,
        what: str,
        *,
        kill: bool = False,
        hash_seed: int | None = None,
        folder: str | None = None,
        again: bool = False,
    ) -> None:
        """Trains to the end, or to the kill; raises with what the training said where it failed."""
        self._seeds += 1
        place = self.folder / (folder or what)
        notes = place / "notes"
        notes.mkdir(parents=True, exist_ok=True)
        for stale in notes.glob("*.json") if again else ():
            stale.unlink()  # of the start that was killed
        instructions = self.plan.to_json(notes, kill=kill, runs=str(self.folder / "runs"), again=again)
        environ = {**self.session.environ, PLAN: instructions}
        if environ.get("PYTHONHASHSEED", "random") == "random":  # else a resumed process has the same as well
            environ["PYTHONHASHSEED"] = str(hash_seed or self._seeds)
        began = time.monotonic()
        log = place / f"{what}.log"
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
    found: Sequence[Unequal], lost: Sequence[Unequal], said: Sequence[str], fixes: Mapping[str, str]
) -> list[str]:
    """What differs, first that which shows first; why, as the start has said or as the memory shows; what to do."""
    lines = [f"  first: {found[0]}", *(f"  also:  {one}" for one in found[1:_SHOWN])]
    if len(found) > _SHOWN:
        lines.append(f"         and {len(found) - _SHOWN} more")
    lines += [f"  why:   the start said: {reason}" for reason in said[:_SHOWN]]
    if not lost and not said:
        return [*lines, "  why:   not found in what model, data, callbacks and their modules keep"]
    lines += [f"  why:   not restored: {one}" for one in lost[:_SHOWN]]
    kinds = dict.fromkeys(one.owner for one in lost)
    return [*lines, *(f"  do:    {fixes[kind]}" for kind in kinds if kind is not None and kind in fixes)]
