"""`fairlead.submit`: a job is submitted from Python, and its state and result are read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairlead.config import JobConfig
from fairlead.errors import ConfigError, RunFailedError
from fairlead.plugins import PluginManager, default_plugins
from fairlead_launch.submission.interface import JobState, Submitter
from fairlead_launch.submission.plan import make_plan
from fairlead_runs import RunState, state
from fairlead_runs.programs import ask
from fairlead_runs.submitted import Record

_TAIL = 20  # lines of output in an error
_ASK_S = 60.0  # seconds for a scheduler's answer


@dataclass(frozen=True)
class Submission:
    """A job that was handed to a scheduler.

    Args:
        records: What is known of each of its runs.
        submitter: The scheduler.

    Example:
        >>> submission = fairlead.submit("job.yaml", to="slurm")  # doctest: +SKIP
        >>> submission.result(timeout=3600).metrics  # doctest: +SKIP
        {'val/loss': 0.021}
    """

    records: Sequence[Record]
    submitter: Submitter

    @property
    def id(self) -> str:
        """The job's id at the scheduler; of a sweep that of the array."""
        return self.records[0].job

    @property
    def runs(self) -> list[Path]:
        """The run directories."""
        return [Path(record.run) for record in self.records]

    def state(self) -> JobState:
        """What the scheduler says."""
        return self.submitter.state(self.id)

    def logs(self) -> str:
        """What the job has printed so far, of all members one after the other."""
        pattern = self.records[0].output
        if pattern is None:
            words = self.submitter.logs_command(self.id)
            answer, problem = ask(words, time.monotonic() + _ASK_S, self.submitter.environ) if words else ("", "")
            if problem or not words:
                raise RunFailedError(f"the output of job {self.id} is not to be had", why=problem or "it is in no file")
            return answer
        path = Path(pattern)
        files = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def cancel(self) -> None:
        """Ends the job; what was saved stays, and it is not restarted."""
        self.submitter.cancel(self.id)

    def result(self, timeout: float | None = None, *, poll_s: float = 10.0) -> RunState | list[RunState]:
        """Waits until the run is finished, through any number of requeues; of a sweep until all of its members are.

        Args:
            timeout: Seconds to wait at most; None: for ever.
            poll_s: Seconds between two questions to the scheduler.

        Raises:
            RunFailedError: The job ended, or was cancelled, and the run is not finished.
            TimeoutError: It took longer.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            job_state = self.state()  # before the runs are looked at: it may end in between
            states = [state(run) for run in self.runs]
            if all(one.state == "finished" for one in states):
                return states if len(states) > 1 or self.records[0].index is not None else states[0]
            if job_state.phase in ("finished", "failed", "cancelled"):
                raise self._failed(job_state, states)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"job {self.id} is {job_state.phase} after {timeout:g} s")
            time.sleep(poll_s if left is None else min(poll_s, left))

    def _failed(self, job_state: JobState, states: Sequence[RunState]) -> RunFailedError:
        left = [f"{one.name}: {one.state} ({one.reason})" for one in states if one.state != "finished"]
        printed = self.logs().splitlines()[-_TAIL:] if self.records[0].output is not None else []
        ended = f"{job_state.phase}" + (f" ({job_state.reason})" if job_state.reason else "")
        return RunFailedError(
            f"job {self.id} is {ended}, and the run is not finished",
            where=self.records[0].folder,
            why="\n".join([*left[:5], *([f"and {len(left) - 5} more"] if len(left) > 5 else []), *printed]),
            fix="resubmit the job: it resumes from its newest checkpoint",
        )


def submit(
    job: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | JobConfig,
    to: str | None = None,
    *,
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    max_parallel: int | None = None,
    environ: Mapping[str, str] | None = None,
    plugins: PluginManager | None = None,
    cwd: Path | None = None,
) -> Submission:
    """Hands a job to a scheduler, as `fairlead submit` does.

    Args:
        job: A job file or several, `module:object`, or a `JobConfig` with a `run.name`.
        to: The scheduler; None: what the job's `submit.to` says.
        overrides: As `--set`: `["trainer.max_steps=100"]`.
        sweep: As `--sweep`: `["run.seed=range(3)"]`.
        max_parallel: How many members of a sweep may run at once.
        environ: The environment variables that the job gets; None: those of this process.
        plugins: Where schedulers are found; None: those that are installed.
        cwd: Where the job works; None: here.

    Raises:
        ConfigError: The job is wrong, as its check says; nothing is queued.
        RunFailedError: The scheduler refused it.
    """
    environ, plugins = os.environ if environ is None else environ, plugins or default_plugins()
    files = [job] if isinstance(job, str | os.PathLike) else job
    if not isinstance(files, JobConfig | list | tuple):
        raise ConfigError(
            f"{job!r:.80} is no job", where="submit", fix="give a job file, several in a list, or a JobConfig"
        )
    made = make_plan(
        files if isinstance(files, JobConfig) else [os.fspath(one) for one in files],
        to=to,
        overrides=overrides,
        sweep=sweep,
        max_parallel=max_parallel,
        environ=environ,
        plugins=plugins,
        cwd=(cwd or Path.cwd()).absolute(),
    )
    return Submission(made.submit(), made.submitter)
