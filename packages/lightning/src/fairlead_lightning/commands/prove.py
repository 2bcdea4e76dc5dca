"""`fairlead fit JOB --prove-resume`: train undisturbed, and again with a kill and a resume; compare every bit."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fairlead.checks import CheckedJob
from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunFailedError
from fairlead.exactness import last_record, sentence
from fairlead.resolution import Resolution
from fairlead_lightning.commands.prepare import prepare
from fairlead_lightning.commands.prove_compare import Run, Unequal, differences, trained_otherwise
from fairlead_lightning.commands.prove_plan import DECIDED, EPOCHS, PLAN, Epochs, Plan
from fairlead_lightning.trials import fit_words, require_own_start, run_fairlead, trial_folder
from fairlead_runs.commit import best_or_newest, newest_complete
from fairlead_runs.naming import run_directory
from fairlead_runs.waiting import listed

_COMPARED: Final = (
    "weights, optimizers, schedules, callbacks, loaders, generators, metrics.csv, and what your code keeps"
)
_SHOWN: Final = 5
_TAIL: Final = 2000
_FIXES: Final = {
    "callback": "return it from state_dict() of the callback, and take it back in load_state_dict()",
    "model": "make it a buffer, or save it in on_save_checkpoint() and restore it in on_load_checkpoint()",
    "data": "return it from state_dict() of the datamodule, and take it back in load_state_dict()",
    "module": "keep it in the model, as a buffer: a module's variable starts fresh in each process",
}


def prove_resume(arguments: argparse.Namespace, session: Session) -> int:
    """Tries a resume of the job; 0: equal in every bit, 1: not."""
    steps: int = arguments.prove_resume
    checked = _checked(arguments, session)
    job = checked.loaded.job
    assert job is not None
    assert checked.resolution is not None
    folder_of_runs = run_directory(job.model_dump(mode="json"), job.run, checked.resolution.job, session.cwd).parent
    with trial_folder(folder_of_runs, ".prove-") as (folder, kept):
        equal, lines = _Proof(arguments, session, checked.resolution, folder, Plan.of(steps)).report()
        if not equal:
            kept.append(folder)
            lines.append(f"  kept:  {folder}")
    for line in lines:
        session.print(line)
    return 0 if equal else 1


def _checked(arguments: argparse.Namespace, session: Session) -> CheckedJob:
    where = "--prove-resume"
    if arguments.prove_resume < 3:
        raise ConfigError("--prove-resume needs at least 3 steps", where=where, fix="--prove-resume 8")
    if arguments.resume is not None:
        raise ConfigError("--prove-resume starts from the beginning", where="--resume", fix="leave --resume out")
    checked = prepare(arguments, session, uses_run=False)
    resolution = checked.resolution
    assert resolution is not None
    require_own_start(resolution, where, nodes=resolution.num_nodes)
    for name, wrong in (("fast_dev_run", True), ("barebones", True), ("enable_checkpointing", False)):
        if bool(getattr(resolution.trainer, name)) is wrong:
            raise ConfigError(
                "the job writes no checkpoint to resume from", where=f"trainer.{name}", fix=f"leave {name} out"
            )
    return checked


class _Proof:
    def __init__(
        self, arguments: argparse.Namespace, session: Session, resolution: Resolution, folder: Path, plan: Plan
    ) -> None:
        self._arguments = arguments
        self._session = session
        self._folder = folder
        self._plan = plan
        self._whole: Epochs | None = None
        """What the epochs of the job are where they were cut."""
        self._io = resolution.checkpoint_io
        self._trainer = resolution.trainer
        self._monitors = resolution.trainer.checkpoint.monitor is not None
        self._ranks = resolution.world_size
        self._seeds = 0

    def report(self) -> tuple[bool, list[str]]:
        """Whether the resume is equal in every bit, and what to say of it: what differs, and why."""
        undisturbed = self._undisturbed()
        self._to_end("interrupted", kill=True)
        killed, saved = self._killed()
        resumed = self._trained("interrupted", "resumed")
        ranks = f"{self._ranks} rank{'s' if self._ranks > 1 else ''}"
        done = f"{ranks}, killed after step {killed}, resumed from the checkpoint of step {saved}"
        compared = covered(json.loads((undisturbed.notes / DECIDED).read_bytes()), self._plan, self._whole)
        if self._monitors:
            compared += f"; evaluations take {best_or_newest(undisturbed.path / 'checkpoints')[1]}, in both"
        found = differences(undisturbed, resumed, self._session)
        if not found:
            return True, [f"equal in every bit: {done}", compared]
        # Only now: what differs between any two runs is not the resume's doing.
        control = self._trained("control")
        noise = differences(undisturbed, control, self._session)
        if trained_otherwise(noise):
            return False, self._not_deterministic(undisturbed, control, noise)
        names = {one.name for one in noise}
        left = [one for one in found if one.name not in names]
        if not left:
            but = ", ".join(sorted(names)[:_SHOWN])
            text = f"but what differs between any two runs of this job: {but}"
            return True, [f"equal in every bit: {done}", text, compared]
        lost = [one for one in undisturbed.not_restored(resumed) if one.name not in names]
        record = last_record(self._folder / "interrupted" / "run")
        said = [sentence(reason) for reason in record.seen] if record is not None else []
        how = [f"  with:  {self._cut()}"] if self._whole is not None else []
        return False, [f"the resume differs: {done}", *_told(left, lost, said), *how]

    def _not_deterministic(self, undisturbed: Run, control: Run, noise: list[Unequal]) -> list[str]:
        """Two undisturbed runs differ; whether the order of sets is the reason, a third one shows."""
        lines = ["two undisturbed runs differ: no resume of this job can be exact", f"  first: {noise[0]}"]
        lines += [f"  also:  {one}" for one in noise[1:_SHOWN]]
        same_hashes = self._trained("same-hashes", hash_seed=1)
        if not trained_otherwise(differences(undisturbed, same_hashes, self._session)):
            why = "the order of a set, or hash() of a text: two runs with the same PYTHONHASHSEED are equal"
            return [*lines, f"  why:   {why}", "  do:    sort what comes from a set: sorted(set(names))"]
        lines += [f"  why:   {one}" for one in undisturbed.not_restored(control)[:_SHOWN]]
        causes = "a clock, a generator that is not seeded, or kernels that are not deterministic"
        return [*lines, f"  why:   {causes}", "  do:    count steps instead of seconds; trainer.deterministic: true"]

    def _undisturbed(self) -> Run:
        """Trains to the end; again with shorter epochs, if something decides by a metric that these never reach."""
        try:
            return self._trained("undisturbed")
        except RunFailedError:
            place = self._folder / "undisturbed"
            note = place / "notes" / EPOCHS
            if not note.exists():
                raise
            self._whole = Epochs(**json.loads(note.read_bytes()))
            self._plan = self._plan.deciding(self._whole)
            self._session.warn(f"the callbacks decide later than these steps: {self._cut()}")
            shutil.rmtree(place)
            shutil.rmtree(self._folder / "runs")
            return self._trained("undisturbed")

    def _cut(self) -> str:
        assert self._whole is not None
        return f"{self._plan.steps} steps, {cut(self._plan, self._whole)}"

    def _trained(self, name: str, again: str | None = None, hash_seed: int | None = None) -> Run:
        """One run that comes to its end; its directory is moved away, so that all are trained at the same place."""
        self._to_end(again or name, hash_seed=hash_seed, folder=name)
        place = self._folder / name
        shutil.move(self._folder / "runs" / "run", place / "run")
        return Run(place / "run", place / "notes")

    def _to_end(
        self, what: str, *, kill: bool = False, hash_seed: int | None = None, folder: str | None = None
    ) -> None:
        folder = folder or what
        self._seeds += 1
        place = self._folder / folder
        (place / "notes").mkdir(parents=True, exist_ok=True)
        told = self._plan.to_json(place / "notes", kill=kill, monitor=self._monitors)
        environ = {**self._session.environ, PLAN: told}
        if environ.get("PYTHONHASHSEED", "random") == "random":  # else a resumed process has the same as well
            environ["PYTHONHASHSEED"] = str(hash_seed or self._seeds)
        began = time.monotonic()
        log = place / f"{what}.log"
        code = run_fairlead(self._words(), self._session, environ, log)
        short = (place / "notes" / EPOCHS).exists()
        ended = "looked at" if short else "killed" if kill else "trained"
        self._session.warn(f"{what}: {ended} in {time.monotonic() - began:.0f} s")
        if code and not kill:
            text = log.read_text(errors="replace").strip()[-_TAIL:]
            raise RunFailedError(f"the {what} run ended with exit code {code}", why=text)

    def _words(self) -> list[str]:
        plan = self._plan
        sets = {
            "run.dir": str(self._folder / "runs"),
            "run.name": "run",
            "run.resume": "auto",
            "trainer.max_steps": plan.steps,
            "trainer.max_time": None,
            "trainer.min_steps": None,
            "trainer.min_epochs": None,
            "trainer.loggers": [],
            "trainer.log_every_n_steps": 1,
            "trainer.enable_progress_bar": False,
            "trainer.checkpoint.every_n_steps": plan.checkpoint,
            "trainer.checkpoint.every_n_epochs": None,
            "trainer.checkpoint.every_n_minutes": None,
            # The best checkpoint is one of those that a validation has measured.
            "trainer.checkpoint.on_validation": self._monitors and self._trainer.checkpoint.on_validation,
            **plan.settings(self._trainer),
        }
        io = self._io
        if hasattr(io, "url") and hasattr(io, "inner"):  # nothing of a trial goes to the store
            sets["trainer.checkpoint_io"] = io.inner.model_dump(mode="json")
        return fit_words(self._arguments.job, self._arguments.overrides, sets)

    def _killed(self) -> tuple[int, int]:
        """Behind which step the ranks were killed, and the step of the checkpoint that they left."""
        marks = sorted((self._folder / "interrupted" / "notes").glob("killed-*"))
        if not marks:
            log = (self._folder / "interrupted" / "interrupted.log").read_text(errors="replace").strip()[-_TAIL:]
            raise RunFailedError(
                "the run ended before it could be killed behind its first checkpoint",
                why=log or None,
                fix=f"more steps: --prove-resume {4 * self._plan.steps}; and no limit below that, such as max_epochs",
            )
        newest = newest_complete(self._folder / "runs" / "run" / "checkpoints").checkpoint
        assert newest is not None  # they were killed behind it
        return int(marks[0].read_text()), newest.step


def covered(noted: Mapping[str, Any], plan: Plan, whole: Epochs | None) -> str:
    """What a proof compared, and which validations and decisions were in it.

    Args:
        noted: The note `DECIDED` of the undisturbed run.
        plan: The plan that it followed.
        whole: The epochs of the job, where those of the proof were cut.
    """
    how = f", {cut(plan, whole)}" if whole is not None else ""
    found = [f"compared after {noted['step']} steps{how}: {_COMPARED}"]
    validated = sorted(set(noted["validated"]))
    if validated:
        shown = listed([str(step) for step in validated], most=4)
        found.append(f"with the validation{'s' if len(validated) > 1 else ''} after step {shown}")
    elif noted["validates"]:
        found.append("no validation came in these steps")
    begin, checkpoint, end = (noted["decided"].get(when, {}) for when in ("begin", "checkpoint", "end"))
    both: list[str] = []
    for name in begin:
        before, after = begin[name] != checkpoint.get(name), checkpoint.get(name) != end.get(name)
        if before and after:
            both.append(name)
        else:
            when = "before the checkpoint" if after else "after the resume" if before else "in these steps"
            found.append(f"{name} decided nothing {when}")
    if both:
        found.append(f"{listed(both)} decided before the checkpoint and after the resume")
    return "; ".join(found)


def cut(plan: Plan, whole: Epochs) -> str:
    """How the epochs of a proof differ from those of the job."""
    count = f"{plan.epoch} batch{'es' if plan.epoch != 1 else ''}"
    of = f" of {whole.batches}" if whole.batches is not None else ""
    end = ", each with a validation" if whole.validates else ""
    return f"in epochs of {count}{of}{end}"


def _told(found: list[Unequal], lost: list[Unequal], said: list[str]) -> list[str]:
    lines = [f"  first: {found[0]}", *(f"  also:  {one}" for one in found[1:_SHOWN])]
    if len(found) > _SHOWN:
        lines.append(f"         and {len(found) - _SHOWN} more")
    lines += [f"  why:   the start said: {reason}" for reason in said[:_SHOWN]]
    if not lost and not said:
        return [*lines, "  why:   not found in what model, data, callbacks and their modules keep"]
    lines += [f"  why:   not restored: {one}" for one in lost[:_SHOWN]]
    kinds = dict.fromkeys(one.owner for one in lost)
    return [*lines, *(f"  do:    {_FIXES[kind]}" for kind in kinds if kind in _FIXES)]
