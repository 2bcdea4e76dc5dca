"""`fairlead verify JOB`: trains a job's layout and the same in one process, and shows how they compare."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any, Final

from fairlead.checks import CheckedJob, check_job
from fairlead.cli.job import load_requested
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.findings import raise_errors
from fairlead.resolution import Resolution
from fairlead_launch.trials import run_fairlead, trial_folder
from fairlead_lightning.trials import fit_words, require_own_start
from fairlead_lightning.verify.layout import Layout, layouts_of
from fairlead_lightning.verify.plan import PLAN, REPORT, Plan
from fairlead_lightning.verify.standing import ENDED_AFTER, REPORTED_AFTER, standing
from fairlead_lightning.verify.text import page
from fairlead_runs.naming import run_directory

_ONE_PROCESS: Final = {
    "trainer.strategy": "single_device",
    "trainer.devices": 1,
    "trainer.layer_sync": None,
    "trainer.checkpoint_io": "torch",
}


def verify(arguments: argparse.Namespace, session: Session) -> int:
    """0: equal within the noise of float32; 1: not, or the model is dead; 2: no verdict."""
    for name in ("steps", "repeats"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} needs at least 1", where=f"--{name}", fix=f"leave --{name} out")
    checked = _checked(arguments, session)
    resolution, job = checked.resolution, checked.loaded.job
    assert resolution is not None
    assert job is not None
    layouts = layouts_of(resolution, full=arguments.full)
    require_own_start(resolution, "fairlead verify", nodes=1)
    parent = run_directory(job.model_dump(mode="json"), job.run, resolution.job, session.cwd).parent
    verdicts: list[dict[str, Any]] = []
    with trial_folder(parent, ".verify-") as (folder, retained):
        for layout in layouts:
            own = folder / f"{layout.ranks}-ranks"
            trial = _Trial(arguments, session, checked, layout, own)
            try:
                trial.run("layout", layout.settings)
                trial.run("reference", {**layout.settings, **_ONE_PROCESS})
            except _FailedError as failed:
                if failed.code in _OF_THE_CALL or failed.code > 128:
                    return failed.code
                if not trial.deadlocked:
                    shutil.rmtree(own / "notes")  # batches and weights; the logs stay
                    retained.append(folder)
                return 2
            found: dict[str, Any] = json.loads((own / "notes" / REPORT).read_text())
            header = {
                "job": " ".join(arguments.job),
                "strategy": resolution.strategy.name,
                "scaled": list(layout.remarks),
            }
            verdicts.append({"ok": found.pop("ok"), **header, **found})
            if not verdicts[-1]["ok"]:
                break
    found = verdicts[-1]
    found["ranks"] = [one["layout"]["ranks"] for one in verdicts]
    untried = _untried(resolution, found["ranks"], layouts[-1].settings)
    found["not_compared"] = [*untried, *found["not_compared"]]
    if arguments.json:
        session.print_json(found)
    else:
        for line in page(found):
            session.print(line)
    return 0 if found["ok"] else 1


_OF_THE_CALL: Final = (2,)


def _untried(resolution: Resolution, ranks: list[int], settings: dict[str, Any]) -> list[str]:
    found = []
    if resolution.world_size not in ranks:
        found.append(f"the job's {resolution.world_size} ranks (--full)")
    if "trainer.precision" in settings:
        found.append(f"rounding in {resolution.value('precision')}")
    return found


class _FailedError(Exception):
    """One side did not finish, and its output was shown."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _checked(arguments: argparse.Namespace, session: Session) -> CheckedJob:
    """The job as requested, which need not fit this machine; ranks of several nodes are counted as of one."""
    given = list(arguments.overrides)
    loaded = load_requested(arguments, session, given)
    trainer = loaded.job.trainer if loaded.job is not None else None
    if trainer is not None and isinstance(trainer.num_nodes, int) and isinstance(trainer.devices, int):
        ranks = trainer.num_nodes * trainer.devices
        if trainer.num_nodes > 1:
            given += ["trainer.num_nodes=1", f"trainer.devices={ranks}"]
            loaded = load_requested(arguments, session, given)
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
        self._notes.mkdir(parents=True)
        self._reported = False
        self._deadlock: list[dict[str, Any]] = []

    def run(self, role: Any, settings: dict[str, Any]) -> None:
        """One side; its error is shown when it fails, as `fairlead fit` shows it.

        Raises:
            _FailedError: It did.
        """
        plan = Plan(role, str(self._notes), self._arguments.repeats, self._arguments.batch_dim)
        log = self._folder / f"{role}.log"
        words = fit_words(self._arguments.job, self._arguments.overrides, {**self._settings(role), **settings})
        began = time.monotonic()
        environ = {**self._session.environ, PLAN: plan.to_json()}
        code = run_fairlead(words, self._session, environ, log, self._goes_on)
        if self._deadlock:
            self._session.warn(f"error: the ranks wait for each other, for {ENDED_AFTER:.0f} s at the same lines")
            for one in self._deadlock:
                self._session.warn(f"  where: rank {one['rank']}: {one['at']}")
            self._session.warn(
                "  do:    have all ranks make the same calls in the same order: barriers, reductions, "
                "self.log(sync_dist=True), forward and backward passes"
            )
            raise _FailedError(1)
        if code:
            output = log.read_text(errors="replace").strip()
            # What comes before it is of `fit`, and about resuming.
            self._session.warn(output[max(output.find("\nerror: ") + 1, 0) :])
            raise _FailedError(code)
        which = f"{self._ranks} ranks" if role == "layout" else "one process"
        if not self._arguments.json:
            self._session.warn(f"{which}: trained in {time.monotonic() - began:.0f} s")

    @property
    def deadlocked(self) -> bool:
        """Whether its ranks waited for each other."""
        return bool(self._deadlock)

    def _goes_on(self) -> bool:
        """Says once where the ranks stand; False: they wait for each other."""
        found = standing(self._notes)
        if len(found) < self._ranks:
            return True
        if not self._reported:
            self._reported = True
            self._session.warn(f"nothing has moved for {REPORTED_AFTER:.0f} s; the ranks stand at:")
            for one in found:
                self._session.warn(f"  rank {one['rank']}: {one['at']}")
        if all(one["idle"] and one["seconds"] > ENDED_AFTER for one in found):
            self._deadlock = found
            return False
        return True

    def _settings(self, role: str) -> dict[str, Any]:
        requested = self._checked.resolution
        assert requested is not None
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
            "trainer.on_divergence": "ignore",  # copies are compared here, and named with a cause
        }
        for name in ("base_batch_size", "lr_rule"):  # the same rate on both sides, which have other batches
            if getattr(requested.trainer, name) is not None:
                sets[f"trainer.{name}"] = None
        return sets
