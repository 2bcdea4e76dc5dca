"""What is tried: a job, how many ranks and workers, and how it is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from integration_tests.exact.attempts import Attempt, Cold, Ended, Warm
from integration_tests.exact.jobs.probe import PLACE, RESULT

__all__ = ["JOBS", "Case", "Starter", "cold", "run", "warm"]

_FOLDER = Path(__file__).parent / "jobs"
JOBS = ("mlp", "conv", "gpt", "metrics")
_WORKERS = {"gpt": "data.args.num_workers"}

Starter = Callable[["Case", Path, Mapping[str, str]], Attempt]


@dataclass(frozen=True)
class Case:
    """One setting of a job.

    Args:
        job: The name of a folder in `jobs/`.
        ranks: Processes; more than one are DDP on gloo.
        workers: Of each loader.
        sets: Further `--set PATH=VALUE`.
        command: What `fairlead` is to do.
    """

    job: str
    ranks: int = 1
    workers: int = 0
    sets: tuple[str, ...] = ()
    command: str = "fit"

    def words(self) -> list[str]:
        """The words behind `fairlead`."""
        workers = _WORKERS.get(self.job, "data.args.workers")
        sets = (f"trainer.devices={self.ranks}", f"{workers}={self.workers}", *self.sets)
        return [self.command, str(_FOLDER / self.job / "job.yaml"), *(word for s in sets for word in ("--set", s))]

    def setting(self, *sets: str) -> Case:
        """The same with further settings."""
        return replace(self, sets=(*self.sets, *sets))

    def doing(self, command: str) -> Case:
        """The same for another command."""
        return replace(self, command=command)

    def directory(self, cwd: Path) -> Path:
        """The run directory."""
        return cwd / "runs" / self.job

    def __str__(self) -> str:
        return f"{self.job}-{self.ranks}-ranks-{self.workers}-workers"


def cold(case: Case, cwd: Path, environ: Mapping[str, str]) -> Attempt:
    """Starts `fairlead fit`."""
    _forget(cwd)
    return Cold(case.words(), cwd, environ)


def warm(case: Case, cwd: Path, environ: Mapping[str, str]) -> Attempt:
    """Starts forked ranks."""
    _forget(cwd)
    return Warm(case.words(), case.ranks, cwd, environ)


def run(case: Case, cwd: Path, starter: Starter, environ: Mapping[str, str] | None = None) -> Ended:
    """Runs a job to its end without disturbing it.

    Raises:
        AssertionError: It did not end as it should.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    ended = starter(case, cwd, environ or {}).end()
    assert ended.code == 0, f"{case} ended with {ended.code}: {ended.text}"
    assert (cwd / RESULT).exists(), f"{case} came to no result: {ended.text}"
    return ended


def _forget(cwd: Path) -> None:
    """An earlier start's places are not this one's."""
    for path in cwd.glob(PLACE.format(rank="*")):
        path.unlink()
