"""Stops whose scheduler answers late, or whose ranks do not answer: over in time, requeued once, in real processes.

`scontrol` is a FAKE here: a script that records how it was called, and takes as long as a test wants.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairlead.facts import Job
from fairlead_distributed import bind_listener, tcp_store
from fairlead_hpc_signals import Overdue, PreemptionGuard, StopPolicy
from fairlead_hpc_signals.deadline import Deadline
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_hpc_signals.outcomes import StopOutcome
from fairlead_hpc_signals.slurm import SLURMRequeueConfig, SLURMRequeuer, slurm

PATIENCE = 60.0
FORKS = multiprocessing.get_context("forkserver")  # a fork of a process that has trained may wait for its threads
FORKS.set_forkserver_preload(["torch.distributed", "fairlead_distributed.testing", "fairlead_hpc_signals"])
JOB = Job("slurm:17", requeue=("scontrol", "requeue", "17"))
RUNNING = "JobId=17 JobState=RUNNING Reason=None Requeue=1 Restarts=0 EndTime=Unknown PreemptTime=None Partition=main"


def scontrol(folder: Path, show: str = f"echo {RUNNING}", requeue: str = "true") -> dict[str, str]:
    """The environment of a SLURM job with a FAKE scontrol that does this for each of two commands."""
    program = folder / "scontrol"
    done = f'echo "$@" >> {folder}/calls'
    program.write_text(f'#!/bin/sh\ncase "$1" in show) {show};; requeue) {requeue}; {done};; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}


def requeues(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def stopped_alone(environ: dict[str, str], grace_s: float) -> tuple[float, StopOutcome]:
    """How long a stop of one process took after SIGTERM, and how it ended."""
    flags = SignalFlags()
    policy = StopPolicy(grace_s=grace_s)
    guard = PreemptionGuard(environ=environ, flags=flags, policy=policy)
    assert not guard.should_stop()
    began = time.monotonic()
    flags.note(signal.SIGTERM)
    assert guard.should_stop()
    requeuer = SLURMRequeuer(SLURMRequeueConfig(timeout_s=grace_s, retries=0), environ, JOB, slurm)
    outcome = guard.save_and_requeue(lambda: None, requeuer)
    guard.close()
    return time.monotonic() - began, outcome


# -- the scheduler


def test_a_scheduler_that_is_slow_is_not_waited_for(tmp_path: Path) -> None:
    """Two thirds of the grace for each answer, as 20 s of a KillWait of 30: the job is requeued before its end."""
    environ = scontrol(tmp_path, show=f"sleep 6; echo {RUNNING}", requeue="sleep 6")
    took, outcome = stopped_alone(environ, grace_s=9.0)
    assert requeues(tmp_path) == ["requeue 17"]
    assert took < 9.0
    assert (outcome.exit_code, outcome.start_wanted, outcome.error) == (75, True, None)


def test_a_question_without_an_answer_is_no_obstacle(tmp_path: Path) -> None:
    took, outcome = stopped_alone(scontrol(tmp_path, show="sleep 600"), grace_s=4.0)
    assert requeues(tmp_path) == ["requeue 17"]
    assert took < 4.0
    assert outcome.reason.why == "unknown"


def test_a_requeue_without_an_answer_is_asked_for_again(tmp_path: Path) -> None:
    """Until there is no more time: whoever ends before ends a job that nothing starts again."""
    first = f"if mkdir {tmp_path}/first 2>/dev/null; then sleep 600; fi"
    environ = scontrol(tmp_path, requeue=first)
    flags = SignalFlags()
    guard = PreemptionGuard(environ=environ, flags=flags, policy=StopPolicy(grace_s=20.0))
    assert not guard.should_stop()
    flags.note(signal.SIGTERM)
    assert guard.should_stop()
    outcome = guard.save_and_requeue(
        lambda: None, SLURMRequeuer(SLURMRequeueConfig(timeout_s=1.0, retries=0), environ, JOB, slurm)
    )
    guard.close()
    assert outcome.requeued == "scontrol requeue 17"
    assert requeues(tmp_path) == ["requeue 17"]


def test_a_warning_in_a_job_without_an_answer_is_taken_for_minutes() -> None:
    """And SIGTERM for what SLURM grants by default."""
    environ = {"SLURM_JOB_ID": "17"}
    flags = SignalFlags()
    deadline = Deadline(flags, environ, StopPolicy())
    flags.note(signal.SIGUSR1)
    assert 590 < deadline.left() <= 600
    flags.note(signal.SIGTERM)
    assert 25 < deadline.left() <= 30
    assert deadline.left_to_save() < 21
    deadline.learn(120.0)
    assert 110 < deadline.left() <= 120
    deadline.learn(0.0)  # a job that SLURM lets run beyond its limit
    assert 20 < deadline.left() <= 30
    assert Deadline(flags, {}, StopPolicy()).left() > 1700  # nobody is known to be in a hurry
    assert Deadline(flags, environ, StopPolicy(grace_s=7)).left() <= 7


def test_what_the_scheduler_said_at_the_start_counts_where_it_is_silent_at_the_signal(tmp_path: Path) -> None:
    """Its KillWait, and the end of the job, of which `--signal=USR1@120` warns."""
    once = f"if mkdir {tmp_path}/$2 2>/dev/null; then echo {RUNNING}; echo KillWait = 90 sec; else sleep 600; fi"
    environ = scontrol(tmp_path, show=once)
    flags = SignalFlags()
    guard = PreemptionGuard(environ=environ, flags=flags).start()
    until = time.monotonic() + PATIENCE
    while guard._deadline._kill_wait != 90 and time.monotonic() < until:
        time.sleep(0.05)
    flags.note(signal.SIGTERM)
    assert 80 < guard._deadline.left() <= 90
    guard.close()
    deadline = Deadline(flags := SignalFlags(), environ, StopPolicy())
    deadline.expect(120.0, 10.0)
    flags.note(signal.SIGUSR1)
    assert 110 < deadline.left() <= 120
    flags.note(signal.SIGTERM)
    assert 5 < deadline.left() <= 10


# -- several ranks


class Rank:
    """A rank of a test: a forked process, and what it says."""

    def __init__(self, what: Callable[..., None], rank: int, *args: Any) -> None:
        self.summary, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=what, args=(rank, theirs, *args))
        self.process.start()
        theirs.close()

    def says(self, word: str) -> None:
        assert self.summary.poll(PATIENCE)
        assert self.summary.recv() == word

    def code(self, seconds: float = PATIENCE) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode


def hold_the_lock(seconds: int) -> None:
    """As C code does that never lets other threads run."""
    ctypes.PyDLL(None).sleep(seconds)


def work(
    rank: int, told: Connection, port: int, folder: str, environ: dict[str, str], trouble: str, bad: int, grace: float
) -> None:
    """A loop with an all-reduce a step; the bad rank has a trouble at its place."""
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, 3, False), rank=rank, world_size=3)
    requeuer = SLURMRequeuer(SLURMRequeueConfig(), environ, JOB, slurm)
    value = torch.zeros(1)
    with PreemptionGuard(environ=environ, policy=StopPolicy(grace_s=grace)) as guard:
        guard.start()
        record = Path(folder, "record")
        guard.when_overdue(Overdue(lambda: requeuer, record=lambda plan: record.write_text(str(plan.unsaved))))
        step = 0
        while not guard.should_stop():
            dist.all_reduce(value)
            step += 1
            if step == 20:
                told.send("trains")
                dist.barrier()
            if step == 30 and rank == bad and trouble == "holds the lock":
                told.send("in trouble")
                hold_the_lock(6)
            time.sleep(0.01)

        def save() -> None:
            if rank == bad and trouble == "dies before it saves":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            if rank == bad and trouble == "dies after it saved":
                os.kill(os.getpid(), signal.SIGKILL)

        outcome = guard.save_and_requeue(save, requeuer)
    os._exit(outcome.exit_code)


class Run:
    """Three ranks in a loop, one of them in trouble."""

    def __init__(self, folder: Path, trouble: str, bad: int, grace: float) -> None:
        self.folder, self.bad = folder, bad
        self.store = tcp_store(bind_listener([0], "127.0.0.1"))
        environ = scontrol(folder)
        self.ranks = [Rank(work, r, self.store.port, str(folder), environ, trouble, bad, grace) for r in range(3)]
        for rank in self.ranks:
            rank.says("trains")

    def codes(self, seconds: float = PATIENCE) -> list[int | None]:
        """How the ranks end; the bad one is killed then, as its scheduler does."""
        others = [rank for number, rank in enumerate(self.ranks) if number != self.bad]
        codes = [rank.code(seconds) for rank in others]
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
        return codes


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_is_stopped_holds_nobody_up(tmp_path: Path, bad: int) -> None:
    """After half of the time the others go without it, and say which it was."""
    run = Run(tmp_path, "", bad, grace=8.0)
    os.kill(run.ranks[bad].process.pid or 0, signal.SIGSTOP)
    for number, rank in enumerate(run.ranks):
        if number != bad:
            os.kill(rank.process.pid or 0, signal.SIGTERM)
    assert run.codes() == [75, 75]
    assert requeues(tmp_path) == ["requeue 17"]
    # On a busy machine the time may be over before the patience with the rank is.
    said = rf"rank {bad} did not answer within \d(\.\d+)? s|no time is left, and this rank is still .*"
    assert re.fullmatch(said, (tmp_path / "record").read_text())


@pytest.mark.parametrize("trouble", ["dies before it saves", "dies after it saved"])
def test_a_rank_that_dies_in_the_stop_does_not_end_the_job(tmp_path: Path, trouble: str) -> None:
    """The newest complete checkpoint counts, and the job is requeued: it was FAILED before."""
    run = Run(tmp_path, trouble, 2, grace=8.0)
    os.kill(run.ranks[0].process.pid or 0, signal.SIGTERM)
    assert run.codes() == [75, 75]
    assert requeues(tmp_path) == ["requeue 17"]


def test_a_rank_that_holds_the_interpreters_lock_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """It is healthy, and the time is enough for it."""
    run = Run(tmp_path, "holds the lock", 1, grace=60.0)
    run.ranks[1].says("in trouble")
    os.kill(run.ranks[0].process.pid or 0, signal.SIGTERM)
    assert [rank.code() for rank in run.ranks] == [75, 75, 75]
    assert requeues(tmp_path) == ["requeue 17"]
    assert not (tmp_path / "record").exists()


# A rank dies without a word, and the other hears of it only after torchrun's SIGTERM, as in a long step.
KILLED = """
import os, signal
import torch, torch.distributed as dist
from fairlead_hpc_signals import PreemptionGuard
dist.init_process_group("gloo")
with PreemptionGuard() as guard:
    assert not guard.should_stop()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    guard.flags.wait()
    dist.all_reduce(torch.zeros(1))
"""


@pytest.mark.full
def test_a_rank_that_is_killed_under_torchrun_is_a_failure(tmp_path: Path) -> None:
    """torchrun then ends the other by SIGTERM, which is no stop: nothing is requeued, and who died is named."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, **scontrol(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, str(script)], env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert requeues(tmp_path) == []
    assert "not saved there" not in done.stderr
    assert re.search(r"rank\s*: 1 .*\n\s*exitcode\s*: -9", done.stderr), done.stderr


# -- a main thread that does not come back

HUNG = """
import ctypes, sys
from fairlead_hpc_signals import PreemptionGuard, StopPolicy
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with PreemptionGuard(environ={}, policy=StopPolicy(grace_s=float(sys.argv[1]))) as guard:
    assert not guard.should_stop()
    libc.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, as a collective does: no handler of Python's is called
"""


@pytest.mark.parametrize(
    ("name", "grace", "code"), [("SIGTERM", "12", 75), ("SIGTERM", "600", 75), ("SIGINT", "600", 130)]
)
def test_a_step_that_hangs_is_ended(name: str, grace: str, code: int) -> None:
    """By SIGTERM within the time there is, and by a second SIGTERM or Ctrl-C; the first is answered at once."""
    command = [sys.executable, "-c", HUNG, grace]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "hangs\n"
    time.sleep(0.5)  # from its last words into the call
    began = time.monotonic()
    process.send_signal(signal.Signals[name])
    again = "; again to stop now" if name == "SIGINT" else ""
    assert process.stderr.readline() == f"{name}: stopping after this step, then saving{again}\n"
    assert time.monotonic() - began < 5.0
    if grace == "600":
        time.sleep(1.2)  # two SIGTERM within a second are one: a launcher sends several
        process.send_signal(signal.Signals[name])
        began = time.monotonic() - 15.0
    _, words = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, words
    assert time.monotonic() - began < 20.0
    assert words.startswith("stopped, on request; not saved there: ")
