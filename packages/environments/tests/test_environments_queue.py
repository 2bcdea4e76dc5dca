"""What SLURM and LSF say of a job from outside of it, for `fairlead status`.

The lines of `scontrol` are real ones of Slurm 22.05, shortened; those of `bjobs` are as IBM documents them.
"""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from fairlead import PluginManager
from fairlead.testing import FakeEntryPoint
from fairlead_environments.lsf import lsf
from fairlead_environments.lsf.queue import read_status as read_bjobs
from fairlead_environments.slurm import slurm
from fairlead_environments.slurm.queue import fields_of, read_status
from fairlead_runs.scheduler import JobQueue, JobStatus, ask_for_jobs

HEAD = "JobId=3 JobName=job.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901757 "
REQUEUED = (
    f"{HEAD}JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=1 RunTime=00:00:00 "
    "TimeLimit=UNLIMITED SubmitTime=2026-11-21T16:24:43 EligibleTime=2026-11-21T16:24:49 "
    "StartTime=2026-11-21T16:24:49 EndTime=Unknown Deadline=N/A NodeList= NumNodes=1"
)
RUNNING = (
    f"{HEAD}JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 RunTime=00:00:01 TimeLimit=00:05:00 "
    "SubmitTime=2026-11-21T16:24:16 StartTime=2026-11-21T16:24:16 EndTime=2026-11-21T16:29:16 NodeList=n1"
)


def local(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_a_requeued_job_waits_and_says_until_when() -> None:
    status = read_status(fields_of(REQUEUED))
    assert (status.state, status.detail, status.restarts) == ("queued", "PENDING, BeginTime", 1)
    assert "120 s by default" in status.why
    assert status.starts == local("2026-11-21T16:24:49")
    assert status.ends is None


def test_a_running_job_has_a_time_limit() -> None:
    status = read_status(fields_of(RUNNING))
    assert (status.state, status.detail, status.restarts) == ("running", "RUNNING", 0)
    assert status.since == local("2026-11-21T16:24:16")
    assert status.ends == local("2026-11-21T16:29:16")


@pytest.mark.parametrize(
    ("line", "state", "said", "why"),
    [
        ("JobState=PENDING Reason=QOSMaxGRESPerUser", "queued", "PENDING, QOSMaxGRESPerUser", "quality of service"),
        ("JobState=PENDING Reason=NewInVersion99", "queued", "PENDING, NewInVersion99", ""),
        ("JobState=PENDING Reason=DependencyNeverSatisfied", "queued", "PENDING, DependencyNeverSatisfied", "never"),
        ("JobState=COMPLETING Reason=None", "ending", "COMPLETING", ""),
        ("JobState=CANCELLED Reason=None", "ended", "CANCELLED", ""),
        ("JobState=RUNNING", "running", "RUNNING", ""),  # a version that leaves fields out
        ("", "unknown", "scontrol printed nothing about the job", ""),
    ],
)
def test_states_and_reasons(line: str, state: str, said: str, why: str) -> None:
    status = read_status(fields_of(line))
    assert (status.state, status.detail) == (state, said)
    assert why in status.why


def fake(folder: Path, name: str, body: str) -> dict[str, str]:
    """A FAKE command of the scheduler."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_one_question_with_a_deadline(tmp_path: Path) -> None:
    """Of an array all tasks are shown under the number of the last; a scheduler that hangs is not waited for."""
    deadline = time.monotonic() + 30
    environ = fake(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/calls\necho "{RUNNING}"\necho "{REQUEUED}"')
    assert isinstance(slurm, JobQueue)
    found = slurm.job_status("slurm:3", environ, deadline)
    assert found.state == "running"
    assert (tmp_path / "calls").read_text() == "show job -o 3\n"
    gone = fake(tmp_path, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert slurm.job_status("slurm:3", gone, deadline) == JobStatus("unknown", "SLURM knows no job 3 any more")
    hangs = fake(tmp_path, "scontrol", "sleep 60")
    began = time.monotonic()
    slow = slurm.job_status("slurm:3", hangs, began + 0.3)
    assert "did not answer within" in slow.detail
    assert time.monotonic() - began < 30
    assert slurm.job_cancel("slurm:3", queued=True) == ("scancel", "--state=PENDING", "3")
    assert slurm.job_cancel("slurm:3", queued=False) == ("scancel", "3")


def test_many_jobs_are_one_question(tmp_path: Path) -> None:
    """A job of an array is found by its own number as well as by that of the array; fields as squeue(1) names them."""
    rows = (
        "20|17_3|RUNNING|None|2026-11-21T16:24:16|2026-11-21T16:29:16|5:00",
        "21|17_4|PENDING|Priority|N/A|N/A|UNLIMITED",
    )
    said = "\n".join(f"echo '{row}'" for row in rows)
    environ = fake(tmp_path, "squeue", f'echo "$@" >> {tmp_path}/calls\n{said}')
    plugins = PluginManager([FakeEntryPoint("environment.slurm", slurm)])
    many = [str(number) for number in range(100, 108)]  # fewer than these are asked about one by one
    jobs = {Path(name): f"slurm:{name}" for name in ("20", "17_3", "17_4", "9", *many)}
    found = ask_for_jobs(jobs, plugins, environ, 30)
    assert [found[run].state for run in jobs] == ["running", "running", "queued", *["unknown"] * 9]
    assert found[Path("20")].ends == local("2026-11-21T16:29:16")
    assert found[Path("17_4")].detail == "PENDING, Priority"
    assert found[Path("9")].detail == "SLURM knows no job 9 any more"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith(" --jobs=20,17_3,17_4,9," + ",".join(many))
    down = fake(tmp_path, "squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert "Unable to contact" in ask_for_jobs(jobs, plugins, down, 30)[Path("20")].detail


def test_lsf_as_documented(tmp_path: Path) -> None:
    now = 1000.0
    status = read_bjobs("RUN|90 second(s)|2:30 L|-", now)
    assert (status.state, status.since, status.ends) == ("running", 910.0, 10_000.0)
    status = read_bjobs("PEND|0 second(s)|-|Not enough job slot(s): 4 hosts;", now)
    assert (status.state, status.why) == ("queued", "Not enough job slot(s): 4 hosts")
    assert read_bjobs("", now).state == "unknown"
    assert read_bjobs("RUN|5 second(s)|0:30 E|-", now).ends is None  # an estimate, by which nothing is ended
    assert isinstance(lsf, JobQueue)
    environ = fake(tmp_path, "bjobs", 'echo "EXIT|1 second(s)|-|-"')
    found = lsf.job_status("lsf:7[3]", environ, time.monotonic() + 5)
    assert found.state == "ended"
    assert lsf.job_cancel("lsf:7[3]", queued=True) == ("bkill", "7[3]")
