"""`touch runs/x/SAVE` and `touch runs/x/STOP`: all ranks at the same step, and once for each file."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairlead.facts import StopReason
from fairlead.interfaces import Requeuer
from fairlead_distributed import group_store
from fairlead_distributed.testing import run_ranks
from fairlead_hpc_signals import NoneRequeueConfig, PreemptionGuard, SignalFlags
from fairlead_hpc_signals.agreement import StopAgreement
from fairlead_hpc_signals.switches import SwitchFiles
from fairlead_runs.switches import SAVE, STOP, find_switch

PATIENCE = 60.0


class Requeue(Requeuer):
    """Says that it was asked."""

    def requeue(self) -> str:
        return "requeued by a test"


def switched_guard(run: Path, events: list[tuple[str, dict[str, Any]]] | None = None) -> PreemptionGuard:
    """A guard of a loop without Lightning."""
    guard = PreemptionGuard(environ={}, flags=SignalFlags()).start()  # without handlers, which would stay
    guard.watch_switches(run, lambda name, **fields: events.append((name, fields)) if events is not None else None)
    return guard


def loop(rank: int, folder: str, collective: bool) -> tuple[list[int], int, int, str | None]:
    """Where this rank saves and stops; rank 0 is the person who makes a file whenever the one before has worked."""
    run, saves, step = Path(folder), list[int](), 0
    value, until = torch.zeros(1), time.monotonic() + PATIENCE
    asked = 0
    guard = switched_guard(run)
    while not guard.should_stop():
        assert time.monotonic() < until
        if guard.should_save():
            saves.append(step)
            dist.barrier()  # as a save of all ranks together
        if rank == 0 and asked == len(saves) and asked < 4 and step > 3 * asked:
            asked += 1
            (run / (SAVE if asked < 4 else STOP)).touch()
        if collective:
            dist.all_reduce(value)
        else:
            time.sleep(0.001 * (1 + rank))
        step += 1
    outcome = guard.save_and_requeue(lambda: None, Requeue(NoneRequeueConfig(), {}))
    guard.close()
    return saves, step, outcome.exit_code, outcome.requeued


@pytest.mark.parametrize("collective", [True, False])
def test_all_ranks_save_at_the_same_steps_and_go_on(tmp_path: Path, collective: bool) -> None:
    """Three saves and a stop, asked for by files; whether the ranks wait for each other in each step or not."""
    results = run_ranks(loop, 3, str(tmp_path), collective)
    assert all(result == results[0] for result in results)
    saves, stop, code, requeued = results[0]
    assert len(saves) == 3
    assert saves == sorted(set(saves))
    assert saves[-1] < stop
    assert (code, requeued) == (143, None)
    assert not list(tmp_path.iterdir())  # each file was taken away


def with_one_that_is_silent(rank: int) -> tuple[int, bool, str]:
    """Two ranks train; the third does not answer, as one whose C code holds the interpreter's lock."""
    saved, said = False, io.StringIO()
    if rank < 2:
        store = group_store()
        assert store is not None
        patience = timedelta(seconds=0.5)
        agreement = StopAgreement(SignalFlags(), dist.PrefixStore("test", store), rank, 3, answer_timeout=patience)
        with contextlib.redirect_stderr(said):
            if rank == 0:
                agreement.ask_save()
            number, until = 0, time.monotonic() + PATIENCE
            while agreement._round == 0 and time.monotonic() < until:
                number += 1
                saved |= agreement.boundary(number) is not None
                time.sleep(0.01)
        rounds = agreement._round
    dist.barrier()
    return (rounds if rank < 2 else 1), saved, said.getvalue()


def test_where_a_rank_does_not_answer_nothing_is_saved_and_the_training_goes_on() -> None:
    """And it is said; a save is never half of the ranks'."""
    results = run_ranks(with_one_that_is_silent, 3)
    assert [(rounds, saved) for rounds, saved, _ in results] == [(1, False)] * 3
    said = "".join(text for _, _, text in results)
    assert said == "nothing is saved: rank 2 did not answer within 0.5 s; training continues\n"


def one_after_the_other(wishes: Sequence[Callable[[], object]], own: random.Random) -> None:
    for wish in wishes:
        time.sleep(own.uniform(0, 0.01))
        wish()


def asked_for_both(rank: int, seed: int) -> list[tuple[list[int], int, tuple[str, ...]]]:
    """Saves and a stop, asked for by several ranks at any time, also at once."""
    store, own = group_store(), random.Random(seed * 10 + rank)
    assert store is not None
    found = []
    for number in range(20):
        flags = SignalFlags()
        agreement = StopAgreement(flags, dist.PrefixStore(f"both/{seed}/{number}", store), rank, dist.get_world_size())
        wishes = [*own.choices([agreement.ask_save, lambda: None], k=3), partial(flags.note, signal.SIGUSR1)]
        asking = threading.Thread(target=one_after_the_other, args=(wishes, own))
        asking.start()
        saves, step, value = list[int](), 0, torch.zeros(1)
        while (agreed := agreement.boundary(step)) != "stop":
            if agreed == "save":
                saves.append(step)
                dist.barrier()
            dist.all_reduce(value)
            step += 1
        assert agreement.decision is not None
        asking.join()
        agreement.close()
        found.append((saves, step, agreement.decision.signals))
    return found


def test_saves_and_stops_at_once_are_the_same_on_all_ranks() -> None:
    """One agreement serves both; a wish that came too late for one round is in the next."""
    results = run_ranks(asked_for_both, 3, 1, timeout=120)
    assert all(result == results[0] for result in results)
    assert any(saves for saves, _, _ in results[0])
    assert all(signals == ("SIGUSR1",) for *_, signals in results[0])


def test_a_stop_is_a_persons_and_no_other_start_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though the reason alone would want one; who asked is in the record and in what is said."""
    events: list[tuple[str, dict[str, Any]]] = []
    (tmp_path / STOP).touch()
    me = find_switch(tmp_path, STOP)
    assert me is not None
    with switched_guard(tmp_path, events) as guard:
        assert guard.should_stop()  # there before the start: no step is taken
        assert (tmp_path / STOP).exists()  # a process that is killed now has not stopped yet
        outcome = guard.save_and_requeue(lambda: None, Requeue(NoneRequeueConfig(), {}))
    assert (outcome.exit_code, outcome.requeued, outcome.reason.why) == (143, None, "cancelled")
    assert events == [("switch", {"file": "STOP", "by": me.by})]
    assert not (tmp_path / STOP).exists()
    assert f"as {me.by} requested it by the file STOP; everything is saved" in capsys.readouterr().err


def test_a_stop_that_is_older_than_the_start_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody may have made it yesterday, for a run that had ended by then."""
    (tmp_path / STOP).touch()
    os.utime(tmp_path / STOP, (0, 1_700_000_000))
    with switched_guard(tmp_path) as guard:
        assert guard.should_stop()
        guard.save_and_requeue(lambda: None)
    assert "before this start, which therefore trains nothing; the next one resumes" in capsys.readouterr().err


def test_a_signal_and_the_file_together_want_no_other_start(tmp_path: Path) -> None:
    """A person's word is the last, also where the time limit comes in the same step."""
    (tmp_path / STOP).touch()
    with switched_guard(tmp_path) as guard:
        guard.flags.note(signal.SIGUSR1)
        assert guard.should_stop()
        assert guard.save_and_requeue(lambda: None, Requeue(NoneRequeueConfig(), {})).requeued is None


def test_a_stop_of_a_job_that_its_scheduler_starts_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job would go on after all: SLURM requeues a preempted job by itself."""
    again = StopReason("requeued", "Restarts=1", scheduler_requeues=True)
    monkeypatch.setattr("fairlead_hpc_signals.stopping.why_stopped", lambda *_, **__: again)
    (tmp_path / STOP).touch()
    with switched_guard(tmp_path) as guard:
        assert guard.should_stop()
        guard.save_and_requeue(lambda: None)
    assert (tmp_path / STOP).exists()


def test_a_file_that_cannot_be_removed_asks_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, and it asks once all the same."""
    (tmp_path / SAVE).mkdir()
    files = SwitchFiles(tmp_path, interval_s=0.01)
    asked = []
    for _ in range(3):
        files._look(lambda: asked.append(1), lambda why, *, final: None)
    assert asked == [1]
    assert "cannot be removed (Is a directory): remove it yourself" in capsys.readouterr().err


def test_without_a_file_a_step_pays_for_one_look_at_a_flag(tmp_path: Path) -> None:
    """No question to the file system in the loop."""
    with switched_guard(tmp_path) as guard:
        began = time.process_time()
        for _ in range(100_000):
            if guard.should_stop() or guard.should_save():
                raise AssertionError
        assert time.process_time() - began < 2.0  # 20 microseconds each; one `stat` over NFS is a thousand
