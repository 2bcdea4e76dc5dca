"""Why a job is to stop, read from what schedulers print.

SLURM's outputs are real: `scontrol.txt` was recorded on a Slurm 22.05.8 in the situations it names. LSF's are FAKES,
made after IBM's documentation. `scontrol`, `bjobs` and `bhist` themselves are FAKES: scripts that print those outputs.
"""

from __future__ import annotations

import os
import re
import stat
import time
from datetime import datetime
from pathlib import Path

import pytest

from fairlead.facts import StopReason, Why
from fairlead_environments.lsf.queue import read_bhist, read_bjobs
from fairlead_environments.slurm.queue import fields_of, read_job
from fairlead_hpc_signals.scheduler import why_stopped


def recorded() -> dict[str, tuple[float, str]]:
    """By situation: when, and what scontrol printed."""
    text = Path(__file__).with_name("scontrol.txt").read_text()
    found = re.findall(r"^## (.*) \| (.*)\n(.*)$", text, re.MULTILINE)
    return {
        name: (datetime.fromisoformat(when).timestamp() if when != "-" else 0.0, line) for name, when, line in found
    }


RECORDED = recorded()


def read(name: str, restarts: int = 0, nodes: str = "") -> StopReason:
    when, line = RECORDED[name]
    return read_job(fields_of(line), restarts, nodes, when)


# -- SLURM


@pytest.mark.parametrize(
    ("name", "why", "remaining", "again", "may"),
    [
        ("running", "unknown", 299, False, True),
        ("scancel -s USR1", "unknown", 298, False, True),
        ("no limit", "unknown", None, False, True),
        ("no requeue", "unknown", 299, False, False),
        ("scancel", "cancelled", 30, False, True),
        ("scancel, ended", "cancelled", 22, False, True),
        ("scancel in the grace time", "cancelled", 29, False, True),
        ("time limit, before", "unknown", 59, False, True),
        ("time limit, ending", "time_limit", 30, False, True),
        ("time limit, ended", "time_limit", 23, False, True),
        ("preemption REQUEUE, grace", "preempted", 5, False, True),
        ("preemption REQUEUE, ending", "requeued", 30, True, True),
        ("preemption REQUEUE, ended", "requeued", 30, True, True),
        ("preemption CANCEL, grace", "preempted", 5, False, True),
        ("preemption CANCEL, ending", "preempted", 30, False, True),
        ("preemption CANCEL, ended", "preempted", 23, False, True),
        ("scontrol requeue", "requeued", 30, True, True),
        ("scontrol requeue, ended", "requeued", 30, True, True),
        ("node failure", "requeued", 30, True, True),
        ("node failure, no requeue", "node_failure", 29, False, False),
        ("array task", "unknown", None, False, True),
    ],
)
def test_what_slurm_says(name: str, why: Why, remaining: float | None, again: bool, may: bool) -> None:
    """Preemption, time limit, cancel, node failure and requeue are told apart, whichever signal came."""
    reason = read(name)
    assert (reason.why, reason.scheduler_requeues, reason.may_requeue) == (why, again, may)
    if name != "array task":  # of which the time was not noted
        assert reason.remaining_s == remaining


def test_a_failed_node_is_missing_among_the_nodes() -> None:
    assert read("node failure", nodes="n[1-2]").why == "node_failure"
    assert read("preemption REQUEUE, ending", nodes="n[1-2]").why == "requeued"
    assert read("scontrol requeue", nodes="n2").why == "requeued"


def test_a_job_that_was_requeued_before_this_start() -> None:
    """SLURM_RESTART_COUNT tells this start from the next one."""
    assert read("scontrol requeue", restarts=0).why == "requeued"
    assert read("scontrol requeue", restarts=1).why == "cancelled"  # ends, and was not requeued since it started


@pytest.mark.parametrize(("window", "why"), [(600.0, "time_limit"), (60.0, "unknown")])
def test_a_running_job_is_near_its_limit_or_of_an_unknown_reason(window: float, why: Why, fakes: Fakes) -> None:
    """A person's `scancel -s USR1` looks like the warning before the limit; what is left tells them apart."""
    fakes.answers("bjobs", "echo 'RUN|-|0:4 L|-|-'")
    reason = why_stopped({**fakes.environ, "LSB_JOBID": "17"}, limit_window_s=window)
    assert (reason.why, reason.remaining_s) == (why, 240.0)


@pytest.mark.parametrize("name", ["x JobState=CANCELLED", "UserId=a(0) Restarts=9", ""])
def test_a_name_that_looks_like_fields(name: str) -> None:
    """A job may be called anything."""
    line = RECORDED["running"][1].replace("JobName=job.sh", f"JobName={name}")
    fields = fields_of(line)
    assert (fields["JobState"], fields["Restarts"], fields["Requeue"]) == ("RUNNING", "0", "1")


@pytest.mark.parametrize("text", ["", "\n", "JobId", "No jobs in the system"])
def test_what_is_no_job(text: str) -> None:
    assert "JobState" not in fields_of(text)


# -- asking


class Fakes:
    """FAKE commands on a PATH of their own; each call is written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.folder}/calls\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def prints(self, name: str, **by_word: str) -> None:
        """Prints the text of the first word among its arguments."""
        cases = ""
        for word, text in by_word.items():
            (self.folder / f"{name}.{word}").write_text(text)
            cases += f"*{word}*) cat {self.folder}/{name}.{word};; "
        self.answers(name, f'case "$*" in {cases} esac')

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}:/usr/bin:/bin"}


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.mark.parametrize("mode", ["REQUEUE", "CANCEL"])
def test_a_preempted_job_is_ours_to_requeue(mode: str, fakes: Fakes) -> None:
    """SLURM would requeue what is still there when the grace is over; a job that has stopped by then it fails."""
    fakes.prints("scontrol", job=RECORDED[f"preemption {mode}, grace"][1])
    reason = why_stopped({**fakes.environ, "SLURM_JOB_ID": "17", "SLURM_TIME_FORMAT": "%c"})
    assert (reason.why, reason.scheduler_requeues) == ("preempted", False)
    assert fakes.calls == ["scontrol show job -o 17", "scontrol show config"]


def test_an_array_task_is_asked_for_by_its_index(fakes: Fakes) -> None:
    """Its last task has the array's own id, under which all tasks would come."""
    fakes.prints("scontrol", job=RECORDED["array task"][1])
    why_stopped({**fakes.environ, "SLURM_JOB_ID": "4", "SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "1"})
    assert fakes.calls[0] == "scontrol show job -o 4_1"


def test_what_the_cluster_grants_after_sigterm(fakes: Fakes) -> None:
    """As `scontrol show config` writes it; where SLURM does not answer, a newer one's end of the job is known still."""
    job = RECORDED["scancel"][1].replace("'", "")
    fakes.answers("scontrol", f"case $2 in config) echo 'KillWait                = 7 sec';; *) echo '{job}';; esac")
    assert why_stopped({**fakes.environ, "SLURM_JOB_ID": "17"}).grace_s == 7
    assert read_job(fields_of(RECORDED["scontrol requeue"][1]), 0, "", 0.0, 7.0).remaining_s == 7
    fakes.answers("scontrol", "exit 1")
    environ = {**fakes.environ, "SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 120)}
    reason = why_stopped(environ)
    assert (reason.why, reason.grace_s) == ("time_limit", None)
    assert 110 < (reason.remaining_s or 0) <= 120


def test_a_restart_count_from_the_environment(fakes: Fakes) -> None:
    fakes.prints("scontrol", job=RECORDED["scontrol requeue"][1])
    environ = {**fakes.environ, "SLURM_JOB_ID": "3"}
    assert why_stopped(environ).why == "requeued"
    assert why_stopped({**environ, "SLURM_RESTART_COUNT": "1"}).why == "cancelled"


@pytest.mark.parametrize(
    ("body", "evidence"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "Invalid job id specified"),
        ("exit 0", "printed nothing about job 17"),
        ("sleep 60 & sleep 60", r"did not answer within 2\.0 s"),
    ],
)
def test_a_scheduler_that_does_not_answer(body: str, evidence: str, fakes: Fakes) -> None:
    """The reason is unknown, after the deadline at the latest; nothing is left running."""
    fakes.answers("scontrol", f"echo $$ > {fakes.folder}/pid; {body}")
    reason = why_stopped({**fakes.environ, "SLURM_JOB_ID": "17"}, timeout_s=2)
    assert reason.why == "unknown"
    assert re.search(evidence, reason.evidence)
    group = int((fakes.folder / "pid").read_text())
    deadline = time.monotonic() + 60
    while any(f" {group} " in stat_of(process) for process in os.listdir("/proc") if process.isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stat_of(process: str) -> str:
    """Process group and session of a living process, between blanks."""
    try:
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else f" {fields[2]} {fields[3]} "


def test_without_the_command(tmp_path: Path) -> None:
    """As in a container."""
    reason = why_stopped({"PATH": str(tmp_path), "SLURM_JOB_ID": "17"})
    assert (reason.why, reason.evidence) == ("unknown", "scontrol is not on the PATH")


def test_without_a_scheduler() -> None:
    assert why_stopped({}).why == "unknown"


# -- LSF, after its documentation


@pytest.mark.parametrize(
    ("line", "why", "remaining", "again"),
    [
        ("RUN|-|0:4 L|-|-", "unknown", 240.0, False),
        ("RUN|-|0:0 L|-|-", "time_limit", None, False),
        ("RUN|-|23:0 L|-|-", "unknown", 82800.0, False),
        ("RUN|-|0:4 E|-|-", "unknown", None, False),
        ("RUN|-|-|-|-", "unknown", None, False),
        ("EXIT|TERM_RUNLIMIT: job killed after reaching LSF run time limit|-|-|-", "time_limit", None, False),
        ("EXIT|TERM_PREEMPT: job killed after preemption|-|-|-", "preempted", None, False),
        ("SSUSP|-|1:0 L|-|Job was suspended by the scheduler due to preemption", "preempted", 3600.0, False),
        ("EXIT|TERM_OWNER: job killed by owner|-|-|-", "cancelled", None, False),
        ("EXIT|TERM_FORCE_ADMIN: job killed by root or LSF administrator|-|-|-", "cancelled", None, False),
        ("EXIT|TERM_REQUEUE_OWNER: job killed and requeued by owner|-|-|-", "requeued", None, True),
        ("EXIT|TERM_REQUEUE_RC: host is reclaimed by cloud|-|-|-", "preempted", None, True),
        ("PEND|-|-|Job requeued|-", "requeued", None, True),
        ("UNKWN|-|1:0 L|-|-", "node_failure", 3600.0, False),
        ("", "unknown", None, False),
    ],
)
def test_what_bjobs_says(line: str, why: Why, remaining: float | None, again: bool) -> None:
    """With lines made after the documentation of `bjobs -o`."""
    reason = read_bjobs(line)
    assert (reason.why, reason.remaining_s, reason.scheduler_requeues) == (why, remaining, again)


BHIST = """Job <17>, User <ada>, Project <default>, Command <train>
Thu Mar 13 17:30:00: Submitted from host <hostA>, to Queue <normal>;
Thu Mar 13 17:31:00: Dispatched to <hostB>;
Thu Mar 13 17:32:05: Signal <{}> requested by user or
                     administrator <ada>;
"""


@pytest.mark.parametrize(("name", "why"), [("KILL", "cancelled"), ("TERM", "cancelled"), ("USR1", "unknown")])
def test_what_bhist_adds(name: str, why: Why) -> None:
    """A person's `bkill`, in a history whose lines are broken anywhere."""
    assert read_bhist(BHIST.format(name), read_bjobs("")).why == why


def test_lsf_is_asked_with_the_array_index(fakes: Fakes) -> None:
    fakes.answers("bjobs", "echo 'RUN|-|23:0 L|-|-'")
    (fakes.folder / "history").write_text(BHIST.format("KILL"))
    fakes.answers("bhist", f"cat {fakes.folder}/history")
    reason = why_stopped({**fakes.environ, "LSB_JOBID": "17", "LSB_JOBINDEX": "3"})
    assert reason.why == "cancelled"
    fields = "stat exit_reason time_left pend_reason suspend_reason delimiter='|'"
    assert fakes.calls == [f"bjobs -noheader -o {fields} 17[3]", "bhist -l 17[3]"]
