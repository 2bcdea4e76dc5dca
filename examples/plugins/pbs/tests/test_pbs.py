"""The public conformance suites over this plugin, and what a job of PBS gets by it.

`qstat` and `qrerun` are STAND-INS: scripts on the PATH, of which the first prints JSON made after qstat(1B), and the
second notes how it was called. Nothing here was seen on a real PBS.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fairlead import PluginManager, TrainerConfig
from fairlead.errors import RunFailedError
from fairlead.resolve import resolve
from fairlead.testing import EnvironmentConformance, RequeueConformance
from fairlead_hpc_signals import SchedulerRequeuer, why_stopped
from fairlead_pbs.pbs import PBSRequeueConfig, pbs, requeue
from fairlead_runs.scheduler import ask_for_job

SYSTEM_PATH = "/usr/bin:/bin"
LOOP = """
from fairlead_hpc_signals import PreemptionGuard, requeuer_here

with PreemptionGuard() as guard:
    print("ready", flush=True)
    while not guard.should_stop():
        guard.flags.wait(0.1)
    outcome = guard.save_and_requeue(lambda: None, requeuer_here())
    print(outcome.reason.why, outcome.requeued, flush=True)
    outcome.exit()
"""


class TestPBS(EnvironmentConformance):
    plugin_name = "pbs"


class TestPBSRequeue(RequeueConformance):
    plugin_name = "pbs"


class Cluster:
    """The stand-ins for PBS's commands, and the variables of a batch job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": f"{folder}:{SYSTEM_PATH}", "PBS_JOBID": "17.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
        self.command("qstat", f"cat {folder}/qstat.json")
        self.command("qrerun", f'echo "$@" >> {folder}/qrerun.log')

    def command(self, name: str, body: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.folder / name).chmod(0o755)

    def shows(self, state: str, *, limit: str = "01:00:00", comment: str = "") -> None:
        """What qstat prints of the job, which started a minute ago."""
        started = (datetime.now() - timedelta(minutes=1)).strftime("%a %b %d %H:%M:%S %Y")
        job = {"job_state": state, "Rerunable": "True", "stime": started, "comment": comment}
        answer = {"Jobs": {"17.server": {**job, "Resource_List": {"walltime": limit}}}}
        (self.folder / "qstat.json").write_text(json.dumps(answer))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_scheduler_is_chosen_without_a_setting() -> None:
    environ = {"PBS_JOBID": "17.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
    resolution = resolve(TrainerConfig(accelerator="cpu"), environ=environ, plugins=PluginManager())
    assert resolution.settings["requeue"].value == "pbs"
    environ["PBS_ENVIRONMENT"] = "PBS_INTERACTIVE"  # of `qsub -I` nothing is left that could be started again
    resolution = resolve(TrainerConfig(accelerator="cpu"), environ=environ, plugins=PluginManager())
    assert resolution.settings["requeue"].value == "none"


@pytest.mark.parametrize(
    ("state", "limit", "printed"),
    [
        ("R", "01:00:00", "unknown qrerun 17.server"),
        ("R", "00:01:30", "time_limit qrerun 17.server"),
        ("Q", "01:00:00", "requeued None"),
    ],
)
def test_a_job_saves_and_is_requeued(state: str, limit: str, printed: str, cluster: Cluster) -> None:
    """A real process is sent SIGTERM; one that PBS has queued again already is not requeued twice."""
    cluster.shows(state, limit=limit)
    environ = {**cluster.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", LOOP], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (out.strip(), process.returncode) == (printed, 75)
    asked = cluster.folder / "qrerun.log"
    assert asked.exists() == ("qrerun" in printed)


def test_a_refusal_says_what_to_do(cluster: Cluster) -> None:
    cluster.command("qrerun", "echo 'qrerun: Unauthorized Request 17.server' >&2; exit 159")
    requeuer = SchedulerRequeuer(PBSRequeueConfig(), cluster.environ, pbs.fairlead_job(cluster.environ), requeue)
    with pytest.raises(RunFailedError) as caught:
        requeuer.requeue()
    assert "argv: [qsub, job.sh]" in str(caught.value.fix)


def test_the_queue_is_asked(cluster: Cluster) -> None:
    cluster.shows("Q", comment="Not Running: Insufficient amount of resource: ngpus")
    status = ask_for_job("pbs:17.server", PluginManager(), cluster.environ)
    assert status is not None
    assert (status.state, status.why) == ("queued", "Not Running: Insufficient amount of resource: ngpus")
    cluster.shows("R")
    status = ask_for_job("pbs:17.server", PluginManager(), cluster.environ)
    assert status is not None
    assert status.state == "running"
    assert 3500 < (status.ends or 0) - time.time() <= 3540


@pytest.mark.parametrize("answer", ["", "qstat: Unknown Job Id 17.server", "{}"])
def test_an_answer_that_says_nothing(answer: str, cluster: Cluster) -> None:
    (cluster.folder / "qstat.json").write_text(answer)
    assert why_stopped(cluster.environ).why == "unknown"
