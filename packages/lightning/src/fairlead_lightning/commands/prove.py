"""`fairlead fit JOB --prove-resume`: train undisturbed, and again with a kill and a resume; compare every bit."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from fairlead.checks import CheckedJob
from fairlead.cli.session import Session
from fairlead.errors import ConfigError, RunFailedError
from fairlead.resolution import Resolution
from fairlead_launch.prove.compare import Trained
from fairlead_launch.prove.course import Proof
from fairlead_launch.trials import trial_folder
from fairlead_lightning.commands.prepare import prepare
from fairlead_lightning.commands.prove_plan import DECIDED, EPOCHS, DecidingPlan, Epochs
from fairlead_lightning.trials import fit_words, require_own_start
from fairlead_runs.commit import best_or_newest
from fairlead_runs.naming import run_directory
from fairlead_runs.waiting import listed

_COMPARED: Final = (
    "weights, optimizers, schedules, callbacks, loaders, generators, metrics.csv, and what your code keeps"
)


def prove_resume(arguments: argparse.Namespace, session: Session) -> int:
    """Tries a resume of the job; 0: equal in every bit, 1: not."""
    steps: int = arguments.prove_resume
    checked = _checked(arguments, session)
    job = checked.loaded.job
    assert job is not None
    assert checked.resolution is not None
    folder_of_runs = run_directory(job.model_dump(mode="json"), job.run, checked.resolution.job, session.cwd).parent
    with trial_folder(folder_of_runs, ".prove-") as (folder, kept):
        return _FitProof(arguments, session, checked.resolution, folder, DecidingPlan.of(steps)).run(kept)


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


class _FitProof(Proof[DecidingPlan]):
    fixes: ClassVar = {
        "callback": "return it from state_dict() of the callback, and take it back in load_state_dict()",
        "model": "make it a buffer, or save it in on_save_checkpoint() and restore it in on_load_checkpoint()",
        "data": "return it from state_dict() of the datamodule, and take it back in load_state_dict()",
        "module": "keep it in the model, as a buffer: a module's variable starts fresh in each process",
    }
    deterministic = "trainer.deterministic: true"

    def __init__(
        self, arguments: argparse.Namespace, session: Session, resolution: Resolution, folder: Path, plan: DecidingPlan
    ) -> None:
        super().__init__(session, " ".join(arguments.job), folder, plan)
        self._arguments = arguments
        self._whole: Epochs | None = None
        """What the epochs of the job are where they were cut."""
        self._io = resolution.checkpoint_io
        self._trainer = resolution.trainer
        self._monitors = resolution.trainer.checkpoint.monitor is not None

    @property
    def enough(self) -> str:
        return f"more steps: --prove-resume {4 * self.plan.steps}; and no limit below that, such as max_epochs"

    def compared(self, undisturbed: Trained) -> str:
        text = covered(json.loads((undisturbed.notes / DECIDED).read_bytes()), self.plan, self._whole)
        if self._monitors:
            text += f"; evaluations take {best_or_newest(undisturbed.path / 'checkpoints')[1]}, in both"
        return text

    def how(self) -> list[str]:
        return [f"  with:  {self._cut()}"] if self._whole is not None else []

    def undisturbed(self) -> Trained:
        """Trains to the end; again with shorter epochs, if something decides by a metric that these never reach."""
        try:
            return self.trained("undisturbed")
        except RunFailedError:
            place = self.folder / "undisturbed"
            note = place / "notes" / EPOCHS
            if not note.exists():
                raise
            self._whole = Epochs(**json.loads(note.read_bytes()))
            self.plan = self.plan.deciding(self._whole)
            self.session.warn(f"the callbacks decide later than these steps: {self._cut()}")
            shutil.rmtree(place)
            shutil.rmtree(self.folder / "runs")
            return self.trained("undisturbed")

    def ended(self, notes: Path, *, kill: bool) -> str:
        return "looked at" if (notes / EPOCHS).exists() else super().ended(notes, kill=kill)

    def _cut(self) -> str:
        assert self._whole is not None
        return f"{self.plan.steps} steps, {cut(self.plan, self._whole)}"

    def instructions(self, notes: Path, *, kill: bool, again: bool) -> str:
        return self.plan.to_json(notes, kill=kill, monitor=self._monitors)

    def words(self) -> list[str]:
        plan = self.plan
        sets = {
            "run.dir": str(self.folder / "runs"),
            "run.name": "run",
            "run.resume": "auto",
            "trainer.requeue": "none",
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


def covered(noted: Mapping[str, Any], plan: DecidingPlan, whole: Epochs | None) -> str:
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


def cut(plan: DecidingPlan, whole: Epochs) -> str:
    """How the epochs of a proof differ from those of the job."""
    count = f"{plan.epoch} batch{'es' if plan.epoch != 1 else ''}"
    of = f" of {whole.batches}" if whole.batches is not None else ""
    end = ", each with a validation" if whole.validates else ""
    return f"in epochs of {count}{of}{end}"
