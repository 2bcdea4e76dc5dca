"""A small training on the test cluster: submitted, watched at its places, compared with an undisturbed one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.exact.cases import Case
from integration_tests.exact.compare import differences
from integration_tests.exact.jobs.probe import PAUSE, PLACE
from integration_tests.exact.references import References
from integration_tests.jobs import FAIRLEAD
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job, submit
from integration_tests.slurm.system import wait_until

__all__ = [
    "CASE",
    "PAIR",
    "PASSED_ON",
    "QUICK_AGAIN",
    "STEP",
    "as_if_nothing_had_happened",
    "fit",
    "history",
    "nothing_runs",
    "the_same",
    "until_at",
    "until_saved",
]

CASE = Case("mlp", ranks=4)
"""24 optimizer steps in three epochs, each with a validation behind it."""
PAIR = Case("mlp", ranks=2)
"""The same with half as many processes to start."""
QUICK_AGAIN = f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then unset {PAUSE}; fi\n'
"""The first lines of a script whose steps are slowed only until a test has stopped it."""
STEP = "srun {command}\n"
"""The script of a job that is one step."""
PASSED_ON = """\
srun {command} &
step=$!
trap 'kill -USR1 $step' USR1
while kill -0 $step 2>/dev/null; do sleep 1; done
wait $step
"""
"""One that passes a warning on to its step, as `--signal=B:USR1@...` needs it (docs/how-to/slurm.md)."""

_WAITS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def fit(
    cluster: Cluster,
    cwd: Path,
    *options: str,
    pause: Mapping[str, float] | float = 0.0,
    script: str = STEP,
    sets: tuple[str, ...] = (),
    case: Case = CASE,
    nodes: int = 2,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Submits `fairlead fit`, by default on two nodes with two tasks each.

    Args:
        cluster: Where.
        cwd: The working directory, with `runs/`.
        options: Of sbatch.
        pause: Seconds by which places of the job take longer; a number is for each step until the job is requeued.
        script: The batch script with `{command}` in it.
        sets: Further `--set PATH=VALUE`.
        case: The job.
        nodes: On how many; each has the same number of tasks.
        environ: Further variables.
    """
    tasks = case.ranks // nodes
    sets = (f"trainer.devices={tasks}", f"trainer.num_nodes={nodes}", *sets)
    command = shlex.join([FAIRLEAD, *case.words(), *(word for one in sets for word in ("--set", one))])
    pauses = pause if isinstance(pause, Mapping) else {"train_batch_start": pause}
    slowed = {PAUSE: " ".join(f"{place}={seconds}" for place, seconds in pauses.items())}
    quick = "" if isinstance(pause, Mapping) else QUICK_AGAIN
    return submit(
        cluster,
        quick + script.format(command=command),
        cwd,
        f"-N{nodes}",
        f"--ntasks-per-node={tasks}",
        "--exclusive",
        *options,
        environ={**slowed, "OMP_NUM_THREADS": "1", **(environ or {})},
    )


def history(cwd: Path, *names: str, run: Path | None = None) -> list[dict[str, Any]]:
    """The events of the run, or those of some kinds."""
    file = (run or CASE.directory(cwd)) / "history.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [event for event in events if not names or event["event"] in names]


def until_saved(job: Job, cwd: Path, step: int, run: Path | None = None) -> None:
    """Waits until a checkpoint of this step or a later one is committed."""

    def saved() -> bool:
        assert job.state() in _WAITS, job.text()
        return any(event["step"] >= step for event in history(cwd, "checkpoint", run=run))

    wait_until(f"step {step} is saved", saved, 300)


def until_at(job: Job, cwd: Path, place: str, step: int = 0, rank: int = 0) -> None:
    """Waits until a rank is at a place of its loops, at this optimizer step or a later one."""
    file = cwd / PLACE.format(rank=rank)

    def there() -> bool:
        assert job.state() in _WAITS, job.text()
        words = file.read_text().split() if file.exists() else []
        return len(words) == 2 and words[0] == place and int(words[1]) >= step

    wait_until(f"rank {rank} is at {place} of step {step}", there, 300)


def as_if_nothing_had_happened(
    references: References,
    cwd: Path,
    job: Job,
    *reasons: str,
    restarts: int | None = None,
    stepless: int = 0,
    case: Case = CASE,
) -> None:
    """The job has ended with the weights of an undisturbed run, and did no step twice.

    Args:
        references: The undisturbed runs.
        cwd: The working directory.
        job: The job.
        reasons: Why it was stopped, each time.
        restarts: How often SLURM has started it again; None: as often as it was stopped.
        stepless: Starts that were stopped before they had taken up the training.
        case: The job.
    """
    assert job.wait(seconds=400) == "COMPLETED", job.text()
    the_same(references, cwd, job, case)
    stops = history(cwd, "stop")
    assert [stop["reason"] for stop in stops] == list(reasons), job.text()
    assert job.shown()["Restarts"] == str(len(reasons) if restarts is None else restarts)
    # Each start went on exactly where the one before had stopped: no step was lost, none done twice.
    at, trained = 0, 0
    for event in history(cwd, "training", "stop"):
        assert event["event"] == "stop" or event["step"] == at, job.text()
        at, trained = event["step"], trained + (event["event"] == "training")
    assert len(history(cwd, "start")) == trained + stepless
    assert [event["event"] for event in history(cwd)][-1] == "finished"
    nothing_runs(job)


def the_same(references: References, cwd: Path, job: Job, case: Case = CASE) -> None:
    """The run has the weights, checkpoints and metrics of the undisturbed one, to the last bit."""
    found = differences(references.of(case).run, case.directory(cwd))
    assert not found, "\n".join(["not as if nothing had happened:", *found, job.text()])


def nothing_runs(job: Job) -> None:
    """No process of the job is left on any node."""
    for node in job.cluster.plan.nodes:
        left = job.cluster.run(*job.cluster.on(node, "sh", "-c", "pgrep -af 'fairlead (fit|validate)' || true"))
        assert not left.strip(), f"on {node}: {left}"
