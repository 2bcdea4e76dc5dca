"""`fairlead verify JOB`: trains a job's layout and the same in one process, and shows how they compare."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

from fairlead.checks import CheckedJob, check_job
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.findings import raise_errors
from fairlead.jobs import load_job
from fairlead_lightning.trials import fit_words, require_own_start, run_fairlead, trial_folder
from fairlead_lightning.verify.layout import Layout, layout_of
from fairlead_lightning.verify.plan import PLAN, REPORT, Plan
from fairlead_lightning.verify.text import page
from fairlead_runs.naming import run_directory

_ONE_PROCESS: Final = {
    "trainer.strategy": "single_device",
    "trainer.devices": 1,
    "trainer.layer_sync": None,
    "trainer.checkpoint_io": "torch",
}


def verify(arguments: argparse.Namespace, session: Session) -> int:
    """0: equal within the noise of float32; 1: not, or nothing was alive; 2: it cannot be verified."""
    for name in ("steps", "repeats"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} needs at least 1", where=f"--{name}", fix=f"leave --{name} out")
    checked = _checked(arguments, session)
    resolution, job = checked.resolution, checked.loaded.job
    assert resolution is not None
    assert job is not None
    layout = layout_of(resolution, full=arguments.full)
    require_own_start(resolution, "fairlead verify", nodes=1)
    place = run_directory(job.model_dump(mode="json"), job.run, resolution.job, session.cwd).parent
    with trial_folder(place, ".verify-") as (folder, _):
        trial = _Trial(arguments, session, checked, layout, folder)
        code = trial.run("layout", layout.settings) or trial.run("reference", {**layout.settings, **_ONE_PROCESS})
        if code:
            return code
        found: dict[str, Any] = json.loads((folder / "notes" / REPORT).read_text())
    said = {"job": arguments.job, "strategy": resolution.strategy.name, "scaled": list(layout.said)}
    found = {"ok": found.pop("ok"), **said, **found}
    if arguments.json:
        session.print_json(found)
    else:
        for line in page(found):
            session.print(line)
    return 0 if found["ok"] else 1


def _checked(arguments: argparse.Namespace, session: Session) -> CheckedJob:
    """The job as it is asked for, which need not fit this machine; ranks of several nodes are counted as of one."""
    given = list(arguments.overrides)
    loaded = load_job(arguments.job, plugins=session.plugins, cwd=session.cwd, overrides=given)
    trainer = loaded.job.trainer if loaded.job is not None else None
    if trainer is not None and isinstance(trainer.num_nodes, int) and isinstance(trainer.devices, int):
        ranks = trainer.num_nodes * trainer.devices
        if trainer.num_nodes > 1:
            given += ["trainer.num_nodes=1", f"trainer.devices={ranks}"]
            loaded = load_job(arguments.job, plugins=session.plugins, cwd=session.cwd, overrides=given)
    checked = check_job(loaded, environ=session.environ, plugins=session.plugins, cwd=session.cwd, uses_run=False)
    raise_errors(checked.findings)
    return checked


class _Trial:
    """Starts one side after the other, in a folder that both share."""

    def __init__(
        self, arguments: argparse.Namespace, session: Session, checked: CheckedJob, layout: Layout, folder: Path
    ) -> None:
        self._arguments = arguments
        self._session = session
        self._checked = checked
        self._ranks = layout.ranks
        self._folder = folder
        self._notes = folder / "notes"
        self._notes.mkdir()

    def run(self, role: Any, settings: dict[str, Any]) -> int:
        """One side; what it says is shown when it fails, as `fairlead fit` shows it."""
        plan = Plan(role, str(self._notes), self._arguments.repeats)
        log = self._folder / f"{role}.log"
        words = fit_words(self._arguments.job, self._arguments.overrides, {**self._settings(role), **settings})
        began = time.monotonic()
        code = run_fairlead(words, self._session, {**self._session.environ, PLAN: plan.to_json()}, log)
        said = log.read_text(errors="replace").strip()
        if code:
            self._session.warn(said)
            return code
        which = f"{self._ranks} ranks" if role == "layout" else "one process"
        if not self._arguments.json:
            self._session.warn(f"{which}: trained in {time.monotonic() - began:.0f} s")
        return 0

    def _settings(self, role: str) -> dict[str, Any]:
        asked = self._checked.resolution
        assert asked is not None
        sets: dict[str, Any] = {
            "run.dir": str(self._folder / "runs"),
            "run.name": role,
            "run.resume": "never",
            "trainer.max_steps": self._arguments.steps,
            "trainer.max_epochs": 1,
            "trainer.max_time": None,
            "trainer.min_steps": None,
            "trainer.min_epochs": None,
            "trainer.loggers": [],
            "trainer.log_every_n_steps": 1,
            "trainer.limit_val_batches": 0,
            "trainer.num_sanity_val_steps": 0,
            "trainer.enable_checkpointing": False,
            "trainer.enable_progress_bar": False,
            "trainer.enable_model_summary": False,
            "trainer.fast_dev_run": False,
            "trainer.barebones": False,
            "trainer.profiler": None,
        }
        for name in ("base_batch_size", "lr_rule"):  # the same rate on both sides, which have other batches
            if getattr(asked.trainer, name) is not None:
                sets[f"trainer.{name}"] = None
        return sets
