"""The guard in a plain loop, in real processes: same step, saved, requeued once, one exit code.

`scontrol` is a FAKE here: a script that records how it was called and prints what the real one printed in the same
situation (the fields that are read of it).
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fairlead.errors import ConfigError, FairleadError, RunFailedError
from fairlead.facts import StopReason, Why
from fairlead.interfaces import Requeuer
from fairlead_distributed.testing import run_ranks
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_hpc_signals.none import NoneRequeueConfig
from fairlead_hpc_signals.outcomes import (
    StopOutcome,
    StopPolicy,
    exit_code_without_requeue,
    start_wanted,
)
from fairlead_hpc_signals.stopping import PreemptionGuard
from fairlead_runs.guard import Overdue

PATIENCE = 60.0
RUNNING = "JobId=17 JobState=RUNNING Reason=None Requeue=1 Restarts=0 EndTime=Unknown PreemptTime=None Partition=main"
CANCELLED = "JobId=17 JobState=COMPLETING Reason=None Requeue=1 Restarts=0 EndTime=Unknown PreemptTime=None"
REQUEUED = "JobId=17 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=Unknown"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a SLURM job with a FAKE scontrol; `answer` in it is a file with what it prints."""
    program, answer = tmp_path / "scontrol", tmp_path / "answer"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {answer}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    answer.write_text(RUNNING)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "answer": str(answer)}


def calls(slurm: dict[str, str]) -> list[str]:
    path = Path(slurm["answer"]).with_name("calls")
    return path.read_text().splitlines() if path.exists() else []


class Requeue(Requeuer):
    """Counts how often the job was requeued, over all processes."""

    def __init__(self, path: Path, error: FairleadError | None = None) -> None:
        super().__init__(NoneRequeueConfig(), {})
        self.path = path
        self.error = error

    def requeue(self) -> str:
        with self.path.open("a") as log:
            log.write("requeued\n")
        if self.error is not None:
            raise self.error
        return "requeued by a test"

    @property
    def count(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0


def stopped(guard: PreemptionGuard) -> int:
    """The step at which a loop stops."""
    deadline, step = time.monotonic() + 50, 0
    while time.monotonic() < deadline:
        if guard.should_stop():
            return step
        step += 1
    raise AssertionError("the loop did not stop")


def guarded(slurm: dict[str, str], number: int = signal.SIGUSR1, policy: StopPolicy | None = None) -> PreemptionGuard:
    """A guard of one process that was signalled and has stopped."""
    flags = SignalFlags()
    guard = PreemptionGuard(environ=slurm, policy=policy, flags=flags)
    assert not guard.should_stop()
    flags.note(number)
    assert guard.should_stop()
    return guard


# -- one process


def test_a_loop_of_one_process(slurm: dict[str, str], tmp_path: Path) -> None:
    """Without torch's group, no store is needed; save, durable, finish, requeue, in this order."""
    order: list[str] = []
    requeue = Requeue(tmp_path / "log")
    with PreemptionGuard(["USR1"], environ=slurm) as guard:
        assert not guard.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert guard.should_stop()
        outcome = guard.save_and_requeue(
            lambda: order.append("save"),
            requeue,
            durable=lambda: order.append("durable"),
            finish=lambda reason: order.append(f"finish {reason.why} {requeue.count}"),
        )
    guard.flags.uninstall()
    assert order == ["save", "durable", "finish unknown 0"]
    assert (outcome.exit_code, outcome.start_wanted, outcome.requeued) == (75, True, "requeued by a test")
    assert requeue.count == 1
    assert guard.decision is not None
    assert guard.decision.signals == ("SIGUSR1",)
    with pytest.raises(SystemExit) as end:
        outcome.exit()
    assert end.value.code == 75


@pytest.mark.parametrize(
    ("answer", "number", "why", "code", "count"),
    [
        (RUNNING, signal.SIGTERM, "unknown", 75, 1),
        (RUNNING, signal.SIGINT, "unknown", 130, 0),
        (CANCELLED, signal.SIGTERM, "cancelled", 143, 0),
        (REQUEUED, signal.SIGTERM, "requeued", 75, 0),
        ("", signal.SIGUSR2, "unknown", 75, 1),
    ],
)
def test_who_is_started_again(
    answer: str, number: int, why: Why, code: int, count: int, slurm: dict[str, str], tmp_path: Path
) -> None:
    """A cancelled job never is; one that SLURM has requeued is not a second time."""
    Path(slurm["answer"]).write_text(answer)
    requeue = Requeue(tmp_path / "log")
    outcome = guarded(slurm, number).save_and_requeue(lambda: None, requeue)
    assert (outcome.reason.why, outcome.exit_code, requeue.count) == (why, code, count)


def test_auto_requeue_false_means_it(slurm: dict[str, str], tmp_path: Path) -> None:
    requeue = Requeue(tmp_path / "log")
    outcome = guarded(slurm, policy=StopPolicy(auto_requeue=False)).save_and_requeue(lambda: None, requeue)
    assert (outcome.exit_code, outcome.start_wanted, requeue.count) == (143, False, 0)


def test_an_unknown_reason_has_a_default(slurm: dict[str, str], tmp_path: Path) -> None:
    requeue = Requeue(tmp_path / "log")
    outcome = guarded(slurm, policy=StopPolicy(requeue_unknown=False)).save_and_requeue(lambda: None, requeue)
    assert (outcome.exit_code, requeue.count) == (143, 0)


def test_a_requeuer_with_a_code_of_its_own(slurm: dict[str, str]) -> None:
    """Kubernetes retries 128 and above only."""

    class ByCode(Requeuer):
        exit_code = 138

        def requeue(self) -> str:
            return "exit code 138"

    assert guarded(slurm).save_and_requeue(lambda: None, ByCode(NoneRequeueConfig(), {})).exit_code == 138


def test_a_requeue_that_fails_is_told(slurm: dict[str, str], tmp_path: Path) -> None:
    """Everything is saved and a start is wanted: the exit code still asks for it."""
    requeue = Requeue(tmp_path / "log", RunFailedError("the scheduler refused"))
    with pytest.warns(UserWarning, match="the scheduler refused"):
        outcome = guarded(slurm).save_and_requeue(lambda: None, requeue)
    assert (outcome.exit_code, outcome.requeued, outcome.error) == (75, None, "the scheduler refused")


def test_a_job_that_is_cancelled_while_it_saves(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is asked again before the requeue, when some time has passed."""
    monkeypatch.setattr("fairlead_hpc_signals.deadline._STALE", 0.0)
    requeue = Requeue(tmp_path / "log")

    def save() -> None:
        deadline = time.monotonic() + PATIENCE
        while not calls(slurm):  # the first question, while this saves
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        Path(slurm["answer"]).write_text(CANCELLED)

    outcome = guarded(slurm, signal.SIGTERM).save_and_requeue(save, requeue)
    assert (outcome.reason.why, outcome.exit_code, requeue.count) == ("cancelled", 143, 0)


def test_with_little_time_only_the_checkpoint_and_the_requeue(slurm: dict[str, str], tmp_path: Path) -> None:
    """The loggers are left open, the save and the requeue are not left out."""
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 20))
    Path(slurm["answer"]).write_text(RUNNING.replace("EndTime=Unknown", f"EndTime={end}"))
    done: list[str] = []
    requeue = Requeue(tmp_path / "log")
    outcome = guarded(slurm).save_and_requeue(
        lambda: done.append("save"), requeue, durable=lambda: done.append("durable"), finish=lambda _: done.append("no")
    )
    assert (done, outcome.cut, requeue.count) == (["save", "durable"], ("finish",), 1)
    assert outcome.reason.why == "time_limit"


def test_a_logger_that_cannot_be_closed_does_not_stop_the_requeue(slurm: dict[str, str], tmp_path: Path) -> None:
    requeue = Requeue(tmp_path / "log")

    def finish(reason: StopReason) -> None:
        raise ConnectionError("the logger's server is gone")

    with pytest.warns(UserWarning, match="the logger's server is gone"):
        outcome = guarded(slurm).save_and_requeue(lambda: None, requeue, finish=finish)
    assert (outcome.exit_code, requeue.count) == (75, 1)


def test_a_disk_that_refuses_the_last_save_does_not_end_the_job(
    slurm: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next start goes on from the checkpoint before, and everybody is told."""
    requeue = Requeue(tmp_path / "log")

    def save() -> None:
        raise OSError("no space left on device")

    outcome = guarded(slurm).save_and_requeue(save, requeue)
    assert (outcome.exit_code, outcome.unsaved, requeue.count) == (75, "rank 0: OSError: no space left on device", 1)
    assert "not saved there: rank 0: OSError: no space left" in capsys.readouterr().err


def test_a_save_with_a_bug_is_not_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    """It would come again for ever; the error is the user's to see."""
    requeue = Requeue(tmp_path / "log")

    def save() -> None:
        raise TypeError("a wrong argument")

    with pytest.raises(TypeError, match="a wrong argument"):
        guarded(slurm).save_and_requeue(save, requeue)
    assert requeue.count == 0


def test_a_start_makes_no_requeuer(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """To resolve one costs a third of a second, and most starts need none, or have another."""
    made = []
    monkeypatch.setattr("fairlead_hpc_signals.stopping.requeuer_here", lambda environ: made.append(environ))
    guard = PreemptionGuard(environ=slurm, flags=SignalFlags()).start()
    guard.when_overdue(Overdue())
    guard.close()
    assert made == []


def test_misuse_is_told(slurm: dict[str, str]) -> None:
    guard = PreemptionGuard(environ=slurm, flags=SignalFlags())
    assert not guard.should_stop()
    with pytest.raises(ConfigError, match="no stop was agreed on"):
        guard.save_and_requeue(lambda: None)
    guard.ask("the budget is spent")
    assert guard.should_stop()
    assert guard.save_and_requeue(lambda: None).exit_code == 75
    with pytest.raises(ConfigError, match="already"):
        guard.save_and_requeue(lambda: None)


def test_the_outcome_survives_the_store() -> None:
    reason = StopReason("preempted", "PreemptTime=...", 4.5, True, True)
    outcome = StopOutcome(75, reason, True, "scontrol requeue 17", None, ("finish",))
    assert StopOutcome.from_json(outcome.to_json()) == outcome


def test_the_codes_of_a_stop() -> None:
    """CLI.md: 130 after an interrupt alone, else 143."""
    assert exit_code_without_requeue(["SIGINT"]) == 130
    assert exit_code_without_requeue(["SIGTERM", "SIGINT"]) == 143
    assert start_wanted(StopReason("preempted", ""), ["SIGTERM", "SIGINT"], StopPolicy())


def test_it_needs_no_torch() -> None:
    """A loop of another library is guarded as well; torch is not imported for it."""
    script = """
import os, signal, sys
from fairlead_hpc_signals.stopping import PreemptionGuard
guard = PreemptionGuard(["TERM"], environ={})
os.kill(os.getpid(), signal.SIGTERM)
assert guard.should_stop()
assert "torch" not in sys.modules
os.kill(os.getpid(), signal.SIGTERM)     # a second one, as while the job is requeued
guard.save_and_requeue(lambda: print("saved", flush=True)).exit()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (process.returncode, process.stdout) == (75, "saved\n"), process.stderr


# -- several


def train(rank: int, slurm: dict[str, str], log: str, answer: str, flagged: int) -> tuple[int, StopOutcome, list[str]]:
    """A loop with an all-reduce a step; one rank gets a signal."""
    Path(slurm["answer"]).write_text(answer)
    order: list[str] = []
    with PreemptionGuard(["USR1", "TERM"], environ=slurm) as guard:
        value = torch.zeros(1)
        for step in range(10_000_000):
            if guard.should_stop():
                break
            dist.all_reduce(value)
            if rank == flagged and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)

        def save() -> None:
            dist.barrier()  # as a save of all ranks together
            order.append("save")

        outcome = guard.save_and_requeue(
            save, Requeue(Path(log)), finish=lambda reason: order.append(f"finish {reason.why}")
        )
        assert guard.decision is not None
        assert [request.rank for request in guard.decision.requests] == [flagged]
    return step, outcome, order


@pytest.mark.parametrize(("answer", "code", "count"), [(RUNNING, 75, 1), (CANCELLED, 143, 0), (REQUEUED, 75, 0)])
def test_all_ranks_save_and_end_alike(
    answer: str, code: int, count: int, slurm: dict[str, str], tmp_path: Path
) -> None:
    """A signal to one rank; all save at one step, one requeues, one rank asks the scheduler."""
    results = run_ranks(train, 3, slurm, str(tmp_path / "log"), answer, 2)
    assert all(result == results[0] for result in results)
    _, outcome, order = results[0]
    cut = [] if outcome.cut else [f"finish {outcome.reason.why}"]
    assert order == ["save", *cut]
    assert outcome.exit_code == code
    assert Requeue(tmp_path / "log").count == count
    assert calls(slurm).count("show job -o 17") <= 2  # one at the start of the loop


def one_cannot_save(rank: int, slurm: dict[str, str], log: str, bad: int, kind: type[Exception]) -> str | None:
    with PreemptionGuard(["USR1"], environ=slurm) as guard:
        guard.start()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        stopped(guard)

        def save() -> None:
            if rank == bad:
                raise kind("no space left on device")

        try:
            return guard.save_and_requeue(save, Requeue(Path(log))).unsaved
        except (TypeError, RunFailedError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("bad", [0, 2])
def test_a_checkpoint_without_one_ranks_part_is_none(bad: int, slurm: dict[str, str], tmp_path: Path) -> None:
    """Every rank hears whose is missing, and the job starts again from the one before."""
    results = run_ranks(one_cannot_save, 3, slurm, str(tmp_path / "log"), bad, OSError)
    assert results == [f"rank {bad}: OSError: no space left on device"] * 3
    assert Requeue(tmp_path / "log").count == 1


@pytest.mark.parametrize("bad", [0, 2])
def test_no_rank_goes_on_after_a_bug_in_another(bad: int, slurm: dict[str, str], tmp_path: Path) -> None:
    results = run_ranks(one_cannot_save, 3, slurm, str(tmp_path / "log"), bad, TypeError)
    for rank, result in enumerate(results):
        assert result is not None
        assert result.startswith("TypeError") if rank == bad else f"rank {bad}: TypeError" in result
    assert Requeue(tmp_path / "log").count == 0


def two_guards(rank: int) -> list[tuple[str, ...]]:
    """One after the other on one process group."""
    told = []
    for name in ("SIGUSR1", "SIGUSR2"):
        flags = SignalFlags([name]).install()
        guard = PreemptionGuard(environ={}, flags=flags).start()
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.Signals[name])
        stopped(guard)
        assert guard.decision is not None
        told.append(guard.decision.signals)
        guard.close()
        flags.uninstall()
    return told


def test_two_guards_on_one_process_group() -> None:
    assert run_ranks(two_guards, 2) == [[("SIGUSR1",), ("SIGUSR2",)]] * 2
