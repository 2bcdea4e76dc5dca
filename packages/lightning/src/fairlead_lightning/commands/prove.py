"""`fairlead fit JOB --prove-resume`: train undisturbed, then with a kill and a resume; compare every bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

from fairlead.checks import CheckedJob
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.resolution import Resolution
from fairlead_launch.prove.course import Proof
from fairlead_launch.prove.plan import Plan
from fairlead_launch.trials import trial_folder
from fairlead_lightning.commands.prepare import prepare
from fairlead_lightning.trials import fit_words, require_own_start
from fairlead_runs.naming import run_directory


def prove_resume(arguments: argparse.Namespace, session: Session) -> int:
    """Tries a resume of the job; 0: equal in every bit, 1: not."""
    steps: int = arguments.prove_resume
    checked = _checked(arguments, session)
    job = checked.loaded.job
    assert job is not None
    assert checked.resolution is not None
    folder_of_runs = run_directory(job.model_dump(mode="json"), job.run, checked.resolution.job, session.cwd).parent
    with trial_folder(folder_of_runs, ".prove-") as (folder, retained):
        return _FitProof(arguments, session, checked.resolution, folder, Plan.of(steps)).run(retained)


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


class _FitProof(Proof):
    fixes: ClassVar = {
        "callback": "return it from state_dict() of the callback, and take it back in load_state_dict()",
        "model": "make it a buffer, or save it in on_save_checkpoint() and restore it in on_load_checkpoint()",
        "data": "return it from state_dict() of the datamodule, and take it back in load_state_dict()",
        "module": "keep it in the model, as a buffer: a module's variable starts fresh in each process",
    }
    deterministic = "trainer.deterministic: true"

    def __init__(
        self, arguments: argparse.Namespace, session: Session, resolution: Resolution, folder: Path, plan: Plan
    ) -> None:
        super().__init__(session, " ".join(arguments.job), folder, plan)
        self._arguments = arguments
        self._io = resolution.checkpoint_io

    def words(self) -> list[str]:
        sets = {
            "run.dir": str(self.folder / "runs"),
            "run.name": "run",
            "run.resume": "auto",
            "trainer.requeue": "none",
            "trainer.loggers": [],
            "trainer.log_every_n_steps": 1,  # so that the first step shows that differs
            "trainer.enable_progress_bar": False,
        }
        io = self._io
        if hasattr(io, "url") and hasattr(io, "inner"):  # nothing of a trial goes to the store
            sets["trainer.checkpoint_io"] = io.inner.model_dump(mode="json")
        return fit_words(self._arguments.job, self._arguments.overrides, sets)
