"""The conformance suite over this plugin, and what a job of Grid Engine gets by it.

The variables are those that submit(1) names. `qstat` and `qmod` are STAND-INS: scripts on the PATH, of which the first
prints XML made after qstat(1) and the second notes how it was called. Nothing here was seen on a real Grid Engine.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fairlead import PluginManager, RunConfig, TrainerConfig
from fairlead.detect import choose_environment
from fairlead.errors import ConfigError
from fairlead.resolve import resolve
from fairlead.testing import EnvironmentConformance, SubmitterConformance
from fairlead_hpc_signals import why_stopped
from fairlead_launch.submission import Request
from fairlead_runs.naming import run_directory
from fairlead_sge.qsub import SGESubmitter, SGESubmitterConfig

BATCH = {"JOB_ID": "4711", "SGE_TASK_ID": "undefined", "JOB_NAME": "train", "JOB_SCRIPT": "/spool/4711", "NHOSTS": "1"}
ARRAY = {**BATCH, "SGE_TASK_ID": "3"}
SYSTEM_PATH = "/usr/bin:/bin"
LOOP = """
import os, signal, sys
from fairlead_hpc_signals import PreemptionGuard, requeuer_here

with PreemptionGuard() as guard:
    print("ready", flush=True)
    while not guard.should_stop():
        guard.flags.wait(0.1)
    outcome = guard.save_and_requeue(lambda: None, requeuer_here())
    print(outcome.reason.why, outcome.requeued, flush=True)
    outcome.exit()
"""


class TestSGE(EnvironmentConformance):
    plugin_name = "sge"


class TestQsub(SubmitterConformance):
    plugin_name = "sge"

    def test_renders_and_asks_without_its_scheduler(self, tmp_path: Path) -> None:
        """It asks for one host; on two it says so."""
        with pytest.raises(ConfigError, match="one host"):
            super().test_renders_and_asks_without_its_scheduler(tmp_path)


class Cluster:
    """The stand-ins for Grid Engine's commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": f"{folder}:{SYSTEM_PATH}", **BATCH}
        self._write("qmod", f'echo "$@" >> {folder}/qmod.log; echo "Pushed rescheduling of job 4711"')
        self._write("qstat", f"cat {folder}/qstat.xml")

    def _write(self, name: str, body: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.folder / name).chmod(0o755)

    def shows(self, state: str, *, task: str = "", h_rt: int | None = None) -> None:
        """What qstat prints of the job, which started a minute ago."""
        started = (datetime.now() - timedelta(minutes=1)).isoformat(timespec="seconds")
        limit = "" if h_rt is None else f'<hard_request name="h_rt" resource_contribution="0.0">{h_rt}</hard_request>'
        tasks = f"<tasks>{task}</tasks>" if task else ""
        (self.folder / "qstat.xml").write_text(
            f"<?xml version='1.0'?><job_info><queue_info><job_list state='running'><JB_job_number>4711</JB_job_number>"
            f"<JB_name>train</JB_name><state>{state}</state><JAT_start_time>{started}</JAT_start_time>"
            f"<slots>1</slots>{tasks}{limit}</job_list></queue_info><job_info></job_info></job_info>"
        )

    @property
    def requeued(self) -> str:
        """What qmod was called with."""
        log = self.folder / "qmod.log"
        return log.read_text().strip() if log.exists() else ""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("state", "code", "printed", "asked"),
    [
        ("dr", 143, "cancelled None", ""),
        ("S", 75, "preempted qmod -rj 4711: Pushed rescheduling of job 4711", "-rj 4711"),
        ("Rq", 75, "requeued None", ""),
    ],
)
def test_qdel_is_told_from_a_preemption(state: str, code: int, printed: str, asked: str, cluster: Cluster) -> None:
    """A real process is sent SIGTERM: a cancelled job never starts again, one that has to yield does."""
    cluster.shows(state)
    environ = {**cluster.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", LOOP], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (code, printed)
    assert cluster.requeued == asked


@pytest.mark.parametrize(
    ("h_rt", "why", "least"), [(3600, "unknown", 3500), (120, "time_limit", 40), (None, "unknown", None)]
)
def test_the_time_limit(h_rt: int | None, why: str, least: float | None, cluster: Cluster) -> None:
    cluster.shows("r", h_rt=h_rt)
    reason = why_stopped(cluster.environ)
    assert reason.why == why
    assert (reason.remaining_s is None) == (least is None)
    assert least is None or least <= (reason.remaining_s or 0) <= least + 60


def test_an_array_task_is_asked_for_by_its_index(cluster: Cluster) -> None:
    cluster.shows("dr", task="3")
    assert why_stopped({**cluster.environ, **ARRAY}).why == "cancelled"
    assert why_stopped({**cluster.environ, **ARRAY, "SGE_TASK_ID": "4"}).evidence == "qstat does not list job 4711.4"


@pytest.mark.parametrize("answer", ["", "error: commlib error: got select error", "<job_info/>"])
def test_an_answer_that_says_nothing(answer: str, cluster: Cluster) -> None:
    (cluster.folder / "qstat.xml").write_text(answer)
    assert why_stopped(cluster.environ).why == "unknown"


def test_the_run_of_an_array_task_has_a_name_of_its_own(tmp_path: Path) -> None:
    resolution = resolve(TrainerConfig(accelerator="cpu"), environ=ARRAY, plugins=PluginManager())
    assert resolution.job is not None
    assert (resolution.job.id, resolution.job.cancel) == ("sge:4711.3", "qdel 4711.3")
    assert resolution.settings["requeue"].value == "command"
    job = {"run": {"name": "sweep"}}
    config = RunConfig(name="sweep", dir=str(tmp_path))
    assert run_directory(job, config, resolution.job, tmp_path).name == "sweep-task-3"


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        ({"NHOSTS": "2"}, ["allocation-unused"]),
        ({"NHOSTS": "1"}, []),
        ({"NHOSTS": "many"}, []),
    ],
)
def test_hosts_that_would_idle_are_named(more: dict[str, str], codes: list[str]) -> None:
    chosen = choose_environment("auto", {**BATCH, **more}, PluginManager())
    assert [found.code for found in chosen.findings] == codes


def test_a_session_is_not_requeued() -> None:
    """Of `qlogin` nothing is left that could be started again."""
    resolution = resolve(
        TrainerConfig(accelerator="cpu"), environ={**BATCH, "JOB_SCRIPT": "QLOGIN"}, plugins=PluginManager()
    )
    assert resolution.settings["requeue"].value == "none"


def test_a_sweep_is_an_array(tmp_path: Path) -> None:
    """Its script is run by bash as Grid Engine runs it: each task has its member's job file."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, body in (("qsub", 'cp "$2" "$0.script"; echo 4711.1-2:1'), ("qstat", "echo '4711 0.5 sine me qw 1'")):
        (bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin / name).chmod(0o755)
    environ = {"PATH": f"{bin}:{SYSTEM_PATH}"}
    members = tuple(tmp_path / f"1/members/{n}.yaml" for n in (1, 2))
    request = Request("a sweep", tmp_path / "1", members, members, (1, 2), cwd=tmp_path, command=["echo"])
    submitter = SGESubmitter(SGESubmitterConfig(queue="all.q"), environ)
    (text,) = submitter.render(request).values()
    assert {"#$ -N 'a sweep'", "#$ -t 1-2", "#$ -q all.q", "#$ -pe smp 1", "#$ -notify"} <= set(text.splitlines())
    done = subprocess.run(["bash"], input=text, env={**environ, "SGE_TASK_ID": "2"}, capture_output=True, text=True)
    assert done.stdout == f"fit {tmp_path}/1/members/2.yaml\n"
    (tmp_path / "job.sh").write_text(text)
    assert submitter.submit(request, [tmp_path / "job.sh"]) == "4711"
    assert submitter.state("4711.2").phase == "queued"
