"""`fairlead submit --sweep --local`: the trials of a sweep on this machine, so many at once, each a separate run.

A repeated command continues the sweep: a trial that is finished is skipped, one that was stopped or failed resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.checks import CheckedJob, check_job
from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead_launch.forkserver import SERVER_FD
from fairlead_launch.submission.plan import home_of, job_of, load_members, text_of_job, warnings_of, writing
from fairlead_launch.submission.requests import frozen, members
from fairlead_launch.supervise import noted_signals
from fairlead_runs.describe import counted, shown_path
from fairlead_runs.exit_codes import ExitCode
from fairlead_runs.naming import render_name
from fairlead_runs.submitted import LOCAL, SUBMISSIONS, Record, next_number

_POLL_S: Final = 0.05
_GRACE_S: Final = 10.0
"""How long a trial may take to end after a second Ctrl-C, which `fit` obeys by itself within five seconds."""
_STATES: Final[Mapping[int, str]] = {
    ExitCode.DONE: "done",
    **dict.fromkeys((ExitCode.AGAIN, ExitCode.INTERRUPTED, ExitCode.STOPPED), "stopped"),
}
_SHOWN: Final = 20
"""Failed trials that are listed at the end."""
_FINAL: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Trial:
    """One member of a sweep: its run, what is special in it, the files that it has here, and what came of it."""

    run: Path
    settings: tuple[str, ...]
    text: str
    finished: bool
    file: Path
    log: Path
    code: int | None = None
    seconds: float = 0.0

    @property
    def state(self) -> str:
        """`finished` (before), `done`, `stopped`, `failed`, or `not started`."""
        if self.finished:
            return "finished"
        return "not started" if self.code is None else _STATES.get(self.code, "failed")

    def __str__(self) -> str:
        return f"{self.run.name}  {' '.join(self.settings)}"

    def why_failed(self) -> str:
        """The last error that its log shows, in a line, with the exception that caused it."""
        ended = f"ended by {signal.Signals(-self.code).name}" if self.code and self.code < 0 else f"exit {self.code}"
        text = f"\n{self.log.read_text(encoding='utf-8', errors='replace')}"
        _, error, block = text.rpartition("\nerror: ")
        why = block.partition("  why:   ")[2].partition("\n  do: ")[0].strip().splitlines()[-1:]
        return ": ".join([ended, block.partition("\n")[0], *map(str.strip, why)]) if error else ended


@dataclass(frozen=True)
class Sweep:
    """All trials of a sweep, and the variables of each slot at which one runs."""

    home: Path
    folder: Path
    trials: Sequence[Trial]
    slots: Sequence[Mapping[str, str]]


def run_here(arguments: argparse.Namespace, session: Session) -> int:
    """Runs the trials that are not finished; 0 when all are, 1 where one failed, else how it was stopped."""
    for option in ("to", "screen"):
        if getattr(arguments, option):
            fix = f"leave --{option} or --local out"
            raise ConfigError(f"--{option} is for a scheduler", where=f"--{option}", fix=fix)
    if not arguments.sweep:
        fix = "add --sweep PATH=VALUES; a single job runs here by `fairlead fit`"
        raise ConfigError("--local is for a sweep", where="--local", fix=fix)
    made = _planned(arguments, session)
    say = session.warn if arguments.json else session.print
    before = sum(trial.finished for trial in made.trials)
    skipped = f"; {before} finished before" if before else ""
    say(f"sweep     {counted(len(made.trials), 'trial')}, {len(made.slots)} at once{skipped}")
    if arguments.dry_run:
        for trial in made.trials:
            say(f"{'finished' if trial.finished else 'would run':<10}{trial}")
        return 0
    code = 0
    if before < len(made.trials):
        _write(made, session)
        code = _Running(made, session, say).until_all_ended()
    if arguments.json:
        session.print_json({"folder": str(made.home), "trials": [_document(trial) for trial in made.trials]})
    else:
        for line in _closing(made, session.cwd):
            session.print(line)
    return code


def _planned(arguments: argparse.Namespace, session: Session) -> Sweep:
    """What is to be run; `WrongJobError` where a finding is an error."""
    grid, cwd = members(arguments.sweep), session.cwd.absolute()
    overrides = [[*arguments.overrides, *one] for one in grid]
    loads = load_members(arguments.job, overrides, session.plugins, cwd, session.environ)
    home, names = _names(loads, cwd)
    checked = [_checked(loaded, name, session) for loaded, name in zip(loads, names, strict=True)]
    for finding in warnings_of(checked):
        if finding.code != "run-finished":
            session.warn(str(finding))
    folder = home / SUBMISSIONS / str(next_number(home))
    trials = []
    for index, (loaded, name, one, settings) in enumerate(zip(loads, names, checked, grid, strict=True)):
        data = frozen(loaded, [str(code) for code in loaded.root.folders], cwd, name)
        finished = any(finding.code == "run-finished" for finding in one.findings)
        file, log = folder / "members" / f"{index}.yaml", folder / "logs" / f"{index}.log"
        trials.append(Trial(Path(data["run"]["dir"], name), settings, text_of_job(data), finished, file, log))
    resolution = checked[0].resolution
    assert resolution is not None  # without errors there is one
    left = sum(not trial.finished for trial in trials)
    return Sweep(home, folder, trials, _slots(resolution, arguments.max_parallel, left, session.environ))


def _names(loads: Sequence[LoadedJob], cwd: Path) -> tuple[Path, list[str]]:
    """The folder that the trials share, and the name of each: its own, where the template tells them apart."""
    jobs = [job_of(loaded) for loaded in loads]
    home = home_of(jobs[0], cwd)
    names = [render_name(str(job.run.name), job.model_dump(mode="json")) for job in jobs]
    if len(set(names)) < len(names) or home.name in names:
        names = [f"{name}-task-{index}" for index, name in enumerate(names)]
    return home, names


def _checked(loaded: LoadedJob, name: str, session: Session) -> CheckedJob:
    job = job_of(loaded)
    job = job.model_copy(update={"run": job.run.model_copy(update={"name": name})})
    seen = dataclasses.replace(loaded, job=job)
    checked = check_job(
        seen, environ=session.environ, plugins=session.plugins, purpose="run", cwd=session.cwd.absolute()
    )
    if checked.resolution is not None and checked.resolution.topology.launched and checked.resolution.world_size > 1:
        raise ConfigError(
            "--local starts its trials itself, on one machine",
            where="--local",
            why=f"it was started as one of {checked.resolution.world_size} ranks",
            fix="start it as a single process, without a launcher",
        )
    return checked


def _slots(
    resolution: Resolution, requested: int | None, left: int, environ: Mapping[str, str]
) -> list[Mapping[str, str]]:
    """The variables of each slot at which a trial runs: its GPUs, and its share of the processors.

    Where the job has no number of them, as many as there are GPUs for run at once; on processors one by one.
    """
    gpus = resolution.devices_found.count if resolution.device_type == "cuda" else 0
    each = max(1, resolution.devices)
    count = max(1, min(requested or max(1, gpus // each), max(1, left)))
    threads = resolution.settings.get("threads")
    found: list[Mapping[str, str]] = []
    for slot in range(count):
        own: dict[str, str] = {}
        if count > 1 and threads is not None and threads.reason not in ("trainer.threads", "OMP_NUM_THREADS"):
            own["OMP_NUM_THREADS"] = str(max(1, int(threads.value) // count))
        if gpus and resolution.device_indices is None:
            variable = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
            visible = [one.strip() for one in environ.get(variable, "").split(",") if one.strip()]
            visible = visible if len(visible) >= gpus else [str(index) for index in range(gpus)]
            own[variable] = ",".join(visible[(slot * each + index) % gpus] for index in range(min(each, gpus)))
        found.append(own)
    return found


def _write(sweep: Sweep, session: Session) -> None:
    """The job file of each trial, and the record by which `fairlead runs` finds them."""
    record = Record(
        to=LOCAL,
        id=str(os.getpid()),
        job=str(os.getpid()),
        index=0,
        run=str(sweep.home),
        runs=tuple(str(trial.run) for trial in sweep.trials),
        folder=str(sweep.folder),
        output=str(sweep.folder / "logs" / "*.log"),
        submitted=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cwd=str(session.cwd.absolute()),
    )
    with writing(sweep.folder):
        for trial in sweep.trials:
            trial.file.parent.mkdir(parents=True, exist_ok=True)
            trial.log.parent.mkdir(parents=True, exist_ok=True)
            trial.file.write_text(trial.text, encoding="utf-8")
        record.write(sweep.folder)


class _Running:
    """Starts trials as slots become free, and ends them all on a stop."""

    def __init__(self, sweep: Sweep, session: Session, say: Callable[[str], object]) -> None:
        self._sweep, self._session, self._say = sweep, session, say
        self._waiting = [trial for trial in reversed(sweep.trials) if not trial.finished]
        self._free = list(reversed(sweep.slots))
        self._running: dict[subprocess.Popen[bytes], tuple[Trial, Mapping[str, str], float]] = {}
        self._stop: int | None = None
        self._at_once = False

    def until_all_ended(self) -> int:
        """Returns when no trial runs and none is to be started."""
        with noted_signals() as received:
            try:
                while not self._at_once and (self._running or (self._waiting and self._stop is None)):
                    while received:
                        self._pass_on(received.pop(0))
                    while self._waiting and self._free and self._stop is None:
                        self._start()
                    self._look()
                    time.sleep(_POLL_S)
            finally:
                self._end()
            self._stop = self._stop or next(iter(received), None)
        states = {trial.state for trial in self._sweep.trials}
        if "failed" in states:
            return 1
        codes = {trial.code for trial in self._sweep.trials}
        if ExitCode.AGAIN in codes or self._stop not in (None, *_FINAL):
            return ExitCode.AGAIN
        if self._stop is not None and ("stopped" in states or self._waiting):
            return 128 + self._stop
        return max(code or 0 for code in codes)

    def _start(self) -> None:
        trial, slot = self._waiting.pop(), self._free.pop()
        environ = {**{n: v for n, v in self._session.environ.items() if n != SERVER_FD}, **slot}
        # -P: the working directory is searched for code only if the rules for user code say so.
        command = [sys.executable, "-P", "-m", "fairlead", "fit", str(trial.file)]
        with trial.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, *(["--debug"] if self._session.debug else [])],
                cwd=self._session.cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C reaches this process alone, which passes it on once
            )
        self._running[process] = (trial, slot, time.monotonic())
        self._say(f"start     {trial}")

    def _look(self) -> None:
        for process in [process for process in self._running if process.poll() is not None]:
            trial, slot, began = self._running.pop(process)
            trial.code, trial.seconds = process.returncode, time.monotonic() - began
            self._free.append(slot)
            how = f"  {trial.why_failed()}" if trial.state == "failed" else ""
            self._say(f"{trial.state:<10}{trial}  in {trial.seconds:.0f} s{how}")

    def _pass_on(self, signum: int) -> None:
        self._at_once = self._at_once or signum == self._stop == signal.SIGINT
        if self._stop is None:
            advice = "; again to stop them now" if signum == signal.SIGINT else ""
            left = f"; {len(self._waiting)} are not started" if self._waiting else ""
            stop = f"{counted(len(self._running), 'trial')} stop{'s' if len(self._running) == 1 else ''} after a save"
            self._say(f"{signal.Signals(signum).name}: {stop}{left}{advice}")
        if self._stop not in _FINAL:
            self._stop = signum
        for process in self._running:
            process.send_signal(signum)

    def _end(self) -> None:
        """Ends what still runs, whatever has ended the loop: SIGTERM, a grace, SIGKILL."""
        for process in self._running:
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # nothing of its process group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._look()


def _closing(sweep: Sweep, cwd: Path) -> Iterator[str]:
    """How many are done, which failed and where their logs are, and what to do next."""
    states = [trial.state for trial in sweep.trials]
    done = sum(state in ("done", "finished") for state in states)
    rest = [f"{states.count(state)} {state}" for state in ("failed", "stopped", "not started") if state in states]
    yield f"sweep     {', '.join([f'{done} of {len(states)} done', *rest])}"
    failed = [trial for trial in sweep.trials if trial.state == "failed"]
    for trial in failed[:_SHOWN]:
        yield f"failed    {trial}  {trial.why_failed()}"
        yield f"          log: {shown_path(trial.log, cwd)}"
    if len(failed) > _SHOWN:
        yield f"          and {len(failed) - _SHOWN} more: {shown_path(sweep.folder / 'logs', cwd)}"
    yield f"compare   fairlead runs {shown_path(sweep.home, cwd)}"
    if done < len(states):
        yield "continue  repeat the command: it skips the trials that are done, and resumes the others"


def _document(trial: Trial) -> dict[str, Any]:
    return {
        "run": str(trial.run),
        "settings": list(trial.settings),
        "state": trial.state,
        "exit_code": trial.code,
        "seconds": round(trial.seconds, 1),
        "log": str(trial.log) if trial.code is not None else None,
    }
