"""All ranks stop at the same step, whoever was signalled and whenever; nobody hangs."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from fairlead_distributed import bind_listener, tcp_store
from fairlead_distributed.testing import run_ranks
from fairlead_hpc_signals.agreement import StopAgreement
from fairlead_hpc_signals.decision import DECISION, AgreementError, StopDecision
from fairlead_hpc_signals.flags import SignalFlags

PATIENCE = 60.0  # seconds after which a wait in a test counts as a hang
numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return tcp_store(bind_listener([0], "127.0.0.1"))


@pytest.fixture
def store(server: dist.TCPStore) -> dist.Store:
    return dist.PrefixStore(f"test/{next(numbers)}", server)


# -- the protocol, every interleaving of it


class Model:
    """The protocol as a transition system; each move is one access to what threads share.

    A main thread enters a boundary, looks whether it is frozen, waits if it is, and else takes a step that ends only
    when all ranks have come to it (a collective), unless the steps are `free`. A rank's second thread freezes, then
    reads what was entered. `wrong` names a mistake to make, to see that it is found.
    """

    def __init__(self, ranks: int, steps: int, wrong: str = "", free: bool = False) -> None:
        self.ranks, self.steps, self.wrong, self.free = ranks, steps, wrong, free

    def explore(self) -> tuple[int, set[str]]:
        """The number of states, and the faults in them."""
        # Of each rank: place of the main thread, boundary, entered, what it saw; place of the second, answer.
        first = (False, tuple(("enter", 0, -1, False, "idle", -1) for _ in range(self.ranks)))
        seen, todo, faults = {first}, [first], set[str]()
        while todo:
            state = todo.pop()
            following = list(self.moves(state))
            if not following:
                faults |= self.faults(state)
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
        return len(seen), faults

    def faults(self, state: tuple) -> set[str]:  # type: ignore[type-arg]  # of nested tuples
        ends = {(place, number) for place, number, *_ in state[1]}
        if any(place not in ("stopped", "done") for place, _ in ends):
            return {"hang"}
        return {"ranks stop at different steps"} if len(ends) > 1 else set()

    def moves(self, state: tuple) -> Iterator[tuple]:  # type: ignore[type-arg]
        asked, ranks = state
        if not asked:
            yield True, ranks  # a signal, now, at any rank: that rank asks all
        answers = [rank[5] for rank in ranks]
        decided = max(answers) if all(answer >= 0 for answer in answers) else None
        if self.wrong == "all mains must wait" and any(rank[0] != "held" for rank in ranks):
            decided = None
        for index, (place, number, entered, saw, second, answer) in enumerate(ranks):
            frozen = second != "idle"
            for new in self.main(place, number, entered, saw, frozen, decided, ranks):
                yield asked, (*ranks[:index], (*new, second, answer), *ranks[index + 1 :])
            told: tuple[str, int] | None = None
            if second == "idle" and asked:
                told = "frozen", answer
            elif second == "frozen":
                told = "answered", entered + (self.wrong != "stop at the last entered")
            if told is not None:
                told = (told[0], max(told[1], 0)) if told[0] == "answered" else told
                yield asked, (*ranks[:index], (place, number, entered, saw, *told), *ranks[index + 1 :])

    def main(
        self,
        place: str,
        number: int,
        entered: int,
        saw: bool,
        frozen: bool,
        decided: int | None,
        ranks: tuple,  # type: ignore[type-arg]
    ) -> Iterator[tuple[str, int, int, bool]]:
        late = self.wrong == "look before entering"
        if place == "enter":
            yield ("look", number, entered, frozen) if late else ("look", number, number, False)
        elif place == "look":
            frozen = saw if late else frozen
            yield ("held" if frozen else "step"), number, number, False
        elif place == "held" and decided is not None:
            yield ("stopped" if number >= decided else "step"), number, entered, False
        elif place == "step" and (self.free or all(map(partial(_came_to, number), ranks))):
            yield ("enter" if number + 1 < self.steps else "done"), number + 1, entered, False


def _came_to(number: int, rank: tuple) -> bool:  # type: ignore[type-arg]
    """Whether a rank is in this step, or has it behind it."""
    return bool(rank[1] > number or (rank[1] == number and rank[0] == "step"))


@pytest.mark.parametrize(
    ("ranks", "steps", "free"), [(1, 4, False), (2, 8, False), (3, 5, False), (4, 2, False), (3, 3, True)]
)
def test_in_every_interleaving_all_stop_at_the_same_step(ranks: int, steps: int, free: bool) -> None:
    """Exhaustive, on the protocol; with a collective in each step and without, a signal at any moment."""
    states, faults = Model(ranks, steps, free=free).explore()
    assert not faults
    assert states > 10**ranks


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("stop at the last entered", "hang"),
        ("look before entering", "hang"),
        ("all mains must wait", "hang"),
    ],
)
def test_the_model_finds_what_is_wrong(wrong: str, fault: str) -> None:
    """Without a single one of the three rules there is an interleaving that goes wrong."""
    _, faults = Model(2, 3, wrong).explore()
    assert fault in faults


def test_no_freeze_slips_between_two_lines_of_boundary(store: dist.Store) -> None:
    """The model's rule "enter, then look" in the code itself: a freeze before any line of it."""
    (_, agreement), (_, other) = agreements(store, 2)
    agreement.failure = AgreementError("nobody waits")  # held, the main thread raises it
    for line in range(1, 4):
        agreement._frozen = False
        lines, read = 0, -1
        held: list[int] = []

        def trace(frame: FrameType, event: str, arg: object, stop: int = line, held: list[int] = held) -> Any:
            nonlocal lines, read
            if frame.f_code is StopAgreement._wait_for_decision.__code__:
                held.append(1)
            elif frame.f_code is StopAgreement.boundary.__code__ and event == "line":
                lines += 1
                if lines == stop:
                    agreement._frozen, read = True, agreement._entered
            return trace

        sys.settrace(trace)
        try:
            with contextlib.suppress(AgreementError):
                agreement.boundary(100 + line)
        finally:
            sys.settrace(None)
        assert lines >= line
        assert held or read == 100 + line, "it went on, and the other thread did not see that it had come"
    agreement._frozen = False
    agreement.close()
    other.close()


# -- the real thing, in threads: many rounds


def stop_round(
    seed: int, ranks: int, store: dist.Store, *, collective: bool = True, before_start: bool = False
) -> list[tuple[int, StopDecision | None]]:
    """Where each rank stopped; random ranks are flagged at random moments."""
    chance = random.Random(seed)
    meet = threading.Barrier(ranks)
    results: list[tuple[int, StopDecision | None]] = [(-1, None)] * ranks
    flags = [SignalFlags() for _ in range(ranks)]
    flagged = chance.sample(range(ranks), chance.randint(1, ranks))
    delays = {rank: chance.uniform(0, 0.01) for rank in flagged}
    # Without a collective a rank that is much faster would leave the others thousands of steps to make up for.
    naps = [chance.choice([0.0, 0.0001, 0.001]) if collective else 0.0005 for _ in range(ranks)]

    def main(rank: int) -> None:
        agreement = StopAgreement(flags[rank], store, rank, ranks)
        number = 0
        while not agreement.boundary(number):
            time.sleep(naps[rank])
            if collective:
                meet.wait(PATIENCE)
            number += 1
        results[rank] = number, agreement.decision
        agreement.close()

    def flag(rank: int) -> None:
        time.sleep(delays[rank])
        flags[rank].note(signal.SIGUSR1)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(ranks)]
    threads += [threading.Thread(target=flag, args=(rank,), daemon=True) for rank in flagged]
    if before_start:
        threads.reverse()
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"round {seed} hangs"
    return results


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_hundreds_of_random_flags_in_threads(ranks: int, collective: bool) -> None:
    """One rank, some or all, at random moments, also before the start."""
    for seed in range(150):
        results = stop_round(seed, ranks, dist.HashStore(), collective=collective, before_start=seed % 3 == 0)
        assert len(set(map(repr, results))) == 1, (seed, results)
        assert results[0][1] is not None
        assert results[0][1].signals == ("SIGUSR1",)


# -- real processes, real signals, a real collective in each step


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def in_processes(rank: int, ranks: int, rounds: int, seed: int) -> list[tuple[int, tuple[str, ...], int]]:
    """Each round is a loop with an all-reduce a step, which ends only by an agreement."""
    store = dist.PrefixStore("rounds", dist.distributed_c10d._get_default_store())
    outcomes = []
    with SignalFlags(["USR1", "USR2", "TERM"]) as flags:
        for number in range(rounds):
            common = random.Random(seed * 1000 + number)  # who is signalled: the same on all ranks
            flagged = common.sample(range(ranks), common.randint(1, ranks))
            own = random.Random(seed * 1000 + number * 10 + rank)
            flags.clear()
            dist.barrier()
            agreement = StopAgreement(flags, dist.PrefixStore(str(number), store), rank, ranks)
            sent = [own.choice([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]) for _ in range(own.randint(1, 2))]
            timer = threading.Timer(own.uniform(0, 0.05), send, sent)
            if rank in flagged:
                timer.start()
            step, value = 0, torch.zeros(1)
            while not agreement.boundary(step):
                dist.all_reduce(value)
                if own.random() < 0.1:
                    time.sleep(own.uniform(0, 0.003))
                step += 1
            if rank in flagged:
                timer.join()
            assert agreement.decision is not None
            outcomes.append((step, agreement.decision.signals, agreement.decision.flagged))
            agreement.close()
    return outcomes


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 60), pytest.param(4, 30, marks=pytest.mark.full)])
def test_signals_to_processes_that_sit_in_collectives(ranks: int, rounds: int) -> None:
    """Many rounds; signals of several kinds, alone and in pairs, to random ranks at random times."""
    results = run_ranks(in_processes, ranks, ranks, rounds, ranks, timeout=240)
    assert all(result == results[0] for result in results)
    assert all(flagged >= 1 for _, _, flagged in results[0])
    assert len({step for step, _, _ in results[0]}) > 5  # they did come at different steps


# -- what is agreed, and when it cannot be


def agreements(store: dist.Store, ranks: int, **timeouts: Any) -> list[tuple[SignalFlags, StopAgreement]]:
    both = [SignalFlags() for _ in range(ranks)]
    return [(flags, StopAgreement(flags, store, rank, ranks, **timeouts)) for rank, flags in enumerate(both)]


def frozen(agreement: StopAgreement) -> None:
    """Returns when the agreement has answered."""
    deadline = time.monotonic() + PATIENCE
    while not agreement.mailbox.has(f"0/answer/{agreement.mailbox.rank}"):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_decision_says_who_was_asked_and_by_what(store: dist.Store) -> None:
    """The first signal comes first, wherever it came; ranks that got none are not named."""
    ranks = agreements(store, 3)
    for _, agreement in ranks:
        assert not agreement.boundary(7)
    ranks[2][0].note(signal.SIGTERM)
    ranks[2][0].note(signal.SIGTERM)
    for _, agreement in ranks:
        frozen(agreement)
        assert agreement.boundary(8)
        agreement.close()
    decisions = [agreement.decision for _, agreement in ranks]
    decision = decisions[0]
    assert decision is not None
    assert all(other == decision for other in decisions)
    assert decision.boundary == 8
    assert [(r.rank, r.signals) for r in decision.requests] == [(2, {"SIGTERM": 2})]
    assert (decision.signals, decision.flagged) == (("SIGTERM",), 1)
    assert decision.time == ranks[2][0].flags[0].time
    assert DECISION.validate_json(DECISION.dump_json(decision)) == decision


def test_a_rank_ahead_decides_where(store: dist.Store) -> None:
    """The rank that is behind goes on to where the other already is; numbers may have gaps."""
    (flags, behind), (_, ahead) = agreements(store, 2)
    assert not behind.boundary(10)
    assert not ahead.boundary(30)
    flags.note(signal.SIGUSR1)
    frozen(behind)
    frozen(ahead)
    assert [behind.boundary(number) for number in (20, 30, 40)] == [None, None, "stop"]
    assert ahead.boundary(40)
    behind.close()
    ahead.close()


def test_a_stop_without_a_signal(store: dist.Store) -> None:
    """`ask` for a time budget; the reason reaches all ranks."""
    (_, one), (_, other) = agreements(store, 2)
    one.ask("the time budget is spent")
    frozen(one)
    frozen(other)
    assert one.boundary(0)
    assert other.boundary(0)
    assert other.decision is not None
    assert [(r.rank, r.why, r.signals) for r in other.decision.requests] == [(0, "the time budget is spent", {})]
    one.close()
    other.close()


def test_of_many_that_are_signalled_at_once_few_ring_for_all(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first speaks for all; where it is slow, or was killed, the next does, and not thousands together."""
    asked: list[int] = []
    ask = StopAgreement._ask

    def slow(self: StopAgreement, mailbox: Any) -> None:
        asked.append(mailbox.rank)
        if len(asked) == 1:
            time.sleep(1.6)
        ask(self, mailbox)

    monkeypatch.setattr(StopAgreement, "_ask", slow)
    ranks = agreements(store, 12)
    for flags, _ in ranks:
        flags.note(signal.SIGTERM)
    for _, agreement in ranks:
        frozen(agreement)
        assert agreement.boundary(0)
    assert len(asked) == 2
    for _, agreement in ranks:
        agreement.close()


def test_a_signal_before_the_others_have_started(store: dist.Store) -> None:
    """Ranks that prepare data for longer than an answer may take are waited for; the loop is not entered."""
    flags = SignalFlags()
    flags.note(signal.SIGTERM)
    first = StopAgreement(flags, store, 0, 2, answer_timeout=timedelta(seconds=0.2))
    frozen(first)
    time.sleep(0.5)  # longer than the answer may take
    second = StopAgreement(SignalFlags(), store, 1, 2, answer_timeout=timedelta(seconds=20))
    frozen(second)
    assert first.boundary(0)
    assert second.boundary(0)
    first.close()
    second.close()


def test_a_rank_that_never_starts_is_named(store: dist.Store) -> None:
    flags = SignalFlags()
    flags.note(signal.SIGTERM)
    alone = StopAgreement(flags, store, 0, 2, start_timeout=timedelta(seconds=0.2))
    frozen(alone)
    with pytest.raises(AgreementError, match=r"rank 1\n.*did not start within 0\.2 s") as error:
        alone.boundary(0)
    assert error.value.missing == (1,)
    alone.close()


def test_a_rank_that_has_left_holds_nobody_up(store: dist.Store) -> None:
    """It finished its loop, which it can only have when the others can as well."""
    (_, done), (flags, other) = agreements(store, 2)
    for number in range(3):
        assert not done.boundary(number)
    done.close()
    assert not other.boundary(0)
    flags.note(signal.SIGTERM)
    frozen(other)
    assert [other.boundary(number) for number in (1, 2)] == [None, None]
    other.close()


def test_all_may_leave_without_a_stop(store: dist.Store) -> None:
    ranks = agreements(store, 3)
    before = threading.active_count()
    for _, agreement in ranks:
        assert not agreement.boundary(0)
        agreement.close()
        agreement.close()
    assert threading.active_count() == before - 6
    assert not store.check(["stop/1/0/verdict"])


def rank_that_is_killed(port: int, ready: Connection) -> None:
    flags = SignalFlags()
    agreement = StopAgreement(flags, tcp_store(("127.0.0.1", port)), 1, 3)
    agreement.boundary(0)
    ready.send("here")
    time.sleep(PATIENCE)


def test_a_rank_that_was_killed_does_not_hang_the_others() -> None:
    """It is named, on every rank that is left, within the time given."""
    server = tcp_store(bind_listener([0], "127.0.0.1"))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    victim = multiprocessing.get_context("spawn").Process(target=rank_that_is_killed, args=(server.port, theirs))
    victim.start()
    assert ours.poll(PATIENCE)
    victim.kill()
    victim.join()
    patience = timedelta(seconds=5)  # also for those that live
    flags = SignalFlags()
    others = [
        StopAgreement(flags, server, 0, 3, answer_timeout=patience),
        StopAgreement(SignalFlags(), server, 2, 3, answer_timeout=patience),
    ]
    flags.note(signal.SIGTERM)
    for agreement in others:
        frozen(agreement)
        with pytest.raises(AgreementError, match="did not answer within 5 s") as error:
            agreement.boundary(0)
        assert error.value.missing == (1,)
        agreement.close()


def without_store(rank: int, parent: int) -> list[str]:
    """What happens at boundaries after the store has gone: first without a signal, then with one."""
    server = tcp_store(bind_listener([0], "127.0.0.1"))
    client = tcp_store(("127.0.0.1", server.port))
    told = []
    with SignalFlags(["USR2"]) as flags:
        agreement = StopAgreement(flags, client, 0, 2)
        assert not agreement.boundary(0)
        del server  # ends it
        told.append(str(any(agreement.boundary(number) for number in range(1, 100_000))))
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + PATIENCE
        try:
            while not agreement.boundary(100_000):
                assert time.monotonic() < deadline
        except AgreementError as error:
            told.append(error.block())
        agreement.close()
    return told


def test_without_a_signal_nothing_is_asked_of_the_store() -> None:
    """No communication at a boundary; and when a stop is asked for, the loss of the store is told."""
    quiet, told = run_ranks(without_store, 1, 0, init=False)[0]
    assert quiet == "False"
    assert "lost the store" in told


def test_close_ends_the_threads_where_the_store_has_just_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes back from torch while the interpreter ends aborts a rank whose work is done."""
    agreement = StopAgreement(SignalFlags(), tcp_store(bind_listener([0], "127.0.0.1")), 0, 2)
    monkeypatch.setattr(agreement.mailbox, "arrive", Mock(side_effect=RuntimeError("Connection reset by peer")))
    ours = [thread for thread in threading.enumerate() if thread.name in ("fairlead-control", "fairlead-stop-watch")]
    agreement.close()
    assert ours
    assert not [thread.name for thread in ours if thread.is_alive()]


def forked(rank: int, parent: int) -> tuple[str | None, str | None]:
    server = tcp_store(bind_listener([0], "127.0.0.1"))
    (flags, one), (_, other) = agreements(server, 2)
    child = os.fork()
    if child == 0:
        one.close()  # as its exit handlers would
        os._exit(0)
    os.waitpid(child, 0)
    assert not one.mailbox.has("0/answer/0")
    flags.note(signal.SIGUSR1)
    frozen(one)
    frozen(other)
    return one.boundary(0), other.boundary(0)


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    assert run_ranks(forked, 1, 0, init=False) == [("stop", "stop")]
