"""Short trainings of a job, as `fairlead fit` does them, of which nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import fairlead
from fairlead.cli.main import main
from fairlead.cli.session import Session
from fairlead.config import JobConfig
from fairlead.config_bases import AXES, BackendConfig
from fairlead.jobs import LoadedJob
from fairlead.user_code import CodeRoot
from fairlead_diagnostics.bench.layouts import Layout, Measured
from fairlead_launch.forkserver import CAN_FORK, SERVER_FD, ForkServer
from fairlead_launch.preloading import RANK_VARIABLES
from fairlead_launch.processes import Process, fork, forkable, search_path, spawn

_PRELOAD: Final = "fairlead_lightning.commands.preload"
_TAIL: Final = 2000
_GRACE_S: Final = 20.0  # for a trial to end after a stop request


@dataclass(frozen=True)
class Steps:
    """How long a trial is, in optimizer steps: those before the clock starts, and those that are timed."""

    warm_up: int
    timed: int

    def blocks(self, layout: Layout) -> list[int]:
        """With several processes, half of the timed ones, as many without communication, and both once more."""
        if layout.processes == 1:
            return [self.timed + 1]  # the first of a block does not count
        half = -(-self.timed // 2) + 1
        return [half, half, half, half]

    def total(self, layout: Layout) -> int:
        """All of them."""
        return self.warm_up + sum(self.blocks(layout))


class TrialFailedError(Exception):
    """A trial did not finish; its text is its error, or the end of its output; `short` is a line of it."""

    def __init__(self, text: str, code: int) -> None:
        begin = text.rfind("error: ") if text.startswith("error: ") or "\nerror: " in text else 0
        message = text[begin:].removeprefix("error: ").strip() or f"exit code {code}"
        if code < 0:
            message += f"\nended by {signal.Signals(-code).name}: is there enough memory?"
        super().__init__(message)
        self.short = message.splitlines()[0 if begin or text.startswith("error: ") else -1]


def trial_settings(
    job: JobConfig, layout: Layout, steps: Steps, folder: Path, *, launched: bool = False
) -> dict[str, Any]:
    """What a trial changes in a job, by its settings: where and how long it runs, and that it saves and shows nothing.

    A launcher that starts the ranks (`launched`) also says how many there are, and where. Callbacks are left out: what
    they write is not ours to change. The job's own limits stay as far as they are longer, as schedules of the
    learning rate are made from them.
    """
    total = 10 * steps.total(layout)  # a step counts more than once where there are several optimizers
    trainer = job.trainer
    accumulated = trainer.accumulate_grad_batches * total
    limits: dict[str, Any] = {"max_steps": max(trainer.max_steps, total), "max_epochs": -1}
    if trainer.max_steps == -1:  # an epoch may have one batch
        limits = {"max_steps": -1, "max_epochs": max(trainer.max_epochs or 1000, accumulated)}
        if trainer.max_epochs == -1:
            limits["max_epochs"] = -1
    timing = {"folder": str(folder), "warm_up": steps.warm_up, "blocks": steps.blocks(layout)}
    changed: dict[str, Any] = {
        **limits,
        "callbacks": [{"class": "fairlead_diagnostics.bench.step_times:StepTimes", "args": timing}],
        "devices": layout.processes,
        "threads": layout.threads,
        "num_nodes": 1,
        "batch_size": "per_device",  # the trial's own is that of a process, and no learning rate follows it
        "base_batch_size": None,
        "lr_rule": None,
        "environment": "lightning",
        "requeue": "none",
        "checkpoint_io": "auto",
        "enable_checkpointing": False,
        "loggers": [],
        "profiler": None,
        "check_divergence_every_n_steps": None,
        "on_divergence": "ignore",
        "check_samples": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "fast_dev_run": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "max_time": None,
        "min_steps": None,
        "min_epochs": None,
    }
    if launched:
        changed |= dict.fromkeys(("devices", "num_nodes", "environment", "threads"), "auto")
    if getattr(trainer.strategy, "name", None) == "single_device":
        changed["strategy"] = "auto"
    run = {"dir": str(folder), "name": "run", "resume": "never", "ckpt_path": None}
    return {f"run.{name}": value for name, value in run.items()} | {f"trainer.{n}": v for n, v in changed.items()}


def plugins_as_fields(loaded: LoadedJob) -> dict[str, Any]:
    """The settings that replace a job file's `trainer.plugins`, which are on the same axes as a trial's."""
    trainer = loaded.data.get("trainer") if isinstance(loaded.data, Mapping) else None
    if loaded.job is None or not isinstance(trainer, Mapping) or not trainer.get("plugins"):
        return {}
    fields = {axis: getattr(loaded.job.trainer, axis, None) for axis in AXES}
    dumped = {axis: one.model_dump(mode="json") for axis, one in fields.items() if isinstance(one, BackendConfig)}
    return {"trainer.plugins": []} | {f"trainer.{axis}": value for axis, value in dumped.items()}


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """The settings as `--set` words."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


class Trials:
    """Runs trials of one job, each in a separate folder that is deleted afterwards.

    What is imported is imported once: a server forks each trial, and lends it a server for its ranks. A `launcher`, as
    `srun -n {workers}`, starts the ranks where there is one; they see the trial's folder in the working directory.
    """

    def __init__(
        self,
        session: Session,
        sources: Sequence[str],
        overrides: Sequence[str],
        job: JobConfig,
        root: CodeRoot,
        launcher: str | None = None,
    ) -> None:
        self._session, self._job, self._launcher = session, job, launcher
        self._words = ["fit", *sources, *(word for one in overrides for word in ("--set", one))]
        lent = session.environ.get(SERVER_FD)
        # What says how a process was started is not true of these, and each has as many threads as it is given.
        gone = {*RANK_VARIABLES, SERVER_FD, "OMP_NUM_THREADS"}
        self._environ = {name: value for name, value in session.environ.items() if name not in gone}
        self._server = self._serve(root, lent) if launcher is None else None

    def _serve(self, root: CodeRoot, lent: str | None) -> ForkServer | None:
        if not CAN_FORK:
            return None
        job = self._job
        names = [str(spec.class_).partition(":")[0] for spec in (job.model, job.data) if spec is not None]
        server = ForkServer(
            [_PRELOAD, "fairlead_diagnostics.bench.step_times"],
            list(dict.fromkeys(names)),
            path=search_path(root),
            environ={"OMP_NUM_THREADS": "1", **self._environ},
            title=("fairlead", *self._session.argv),
            connection=socket.socket(fileno=int(lent)) if lent is not None else None,
        )
        return forkable(server, (), self._session.warn)

    def run(self, layout: Layout, steps: Steps, settings: Mapping[str, Any]) -> Measured:
        """Trains so many steps with so many processes and threads, and with these further settings of the job.

        Raises:
            TrialFailedError: It did not come to its end.
        """
        with self.folder() as folder:
            self.fit(self.settings(layout, steps, folder) | dict(settings), folder, layout.processes)
            files = sorted(folder.glob("rank-*.json"))
            if len(files) != layout.processes:
                raise TrialFailedError(f"error: {len(files)} ranks have trained, not {layout.processes}", 1)
            ranks = [json.loads(file.read_text()) for file in files]
            first = ranks[0]  # they wait for each other in every step, so that one of them tells the time of all
            if not first["complete"] or not first["batches"]:
                raise TrialFailedError(
                    "error: no two steps could be timed\n  why:   an epoch has a single step, or the model ended the "
                    "training\n  do:    a smaller batch, or more data",
                    1,
                )
            step_s = first["seconds"] / first["batches"]
            share = None
            if first["batches_without"]:
                share = max(0.0, 1 - first["seconds_without"] / first["batches_without"] / step_s)
            rate = first["samples"] / first["seconds"] * layout.processes
            memory = sum(one["memory"] for one in ranks)
            return Measured(rate, step_s * first["batches_of_a_step"], share, memory, ranks)

    def settings(self, layout: Layout, steps: Steps, folder: Path) -> dict[str, Any]:
        """`trial_settings` of this job."""
        return trial_settings(self._job, layout, steps, folder, launched=self._launcher is not None)

    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """A folder that all ranks see, and that is gone afterwards."""
        return _folder(self._session.cwd if self._launcher is not None else None)

    def fit(self, settings: Mapping[str, Any], folder: Path, workers: int, *words: str) -> None:
        """Runs `fairlead fit` on the job with these settings and further words.

        Raises:
            TrialFailedError: It has failed.
        """
        log = folder / "output.log"
        words = (*self._words, *words, *as_words(settings))
        with log.open("ab") as out, self._started(words, out.fileno(), workers) as process:
            code = process.wait()
        if code:
            raise TrialFailedError(log.read_text(errors="replace").strip()[-_TAIL:], code)

    @contextlib.contextmanager
    def _started(self, words: Sequence[str], out: int, workers: int) -> Iterator[Process]:
        """A `fairlead` with these words; whatever ends this ends it."""
        with contextlib.ExitStack() as lent:
            environ, inherited = dict(self._environ), []
            if self._server is not None and self._server.alive():
                connection = lent.enter_context(self._server.lend())
                environ[SERVER_FD], inherited = str(connection.fileno()), [connection.fileno()]
                start = fork(self._server, _run_fairlead, *words, cwd=str(self._session.cwd))
            else:
                # -P: the working directory is not searched for code unless the rules for user code say so.
                by = shlex.split(self._launcher.format(workers=workers)) if self._launcher is not None else []
                start = spawn([*by, sys.executable, "-P", "-m", "fairlead", *words])
            process = start(environ, (out, out), inherited)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()


def _run_fairlead(*words: str) -> None:
    """What a forked trial does: `python -m fairlead WORDS`."""
    sys.argv = [str(Path(fairlead.__file__).with_name("__main__.py")), *words]
    sys.exit(main(list(words)))


@contextlib.contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A folder that is gone afterwards, also on SIGTERM."""

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    folder = Path(tempfile.mkdtemp(prefix="fairlead-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)
