"""Signals set a flag and nothing else; real signals to real processes."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from fairlead.errors import ConfigError
from fairlead_hpc_signals.flags import Conflict, SignalFlags

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGURG)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def me(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def in_child(body: Callable[[], bool]) -> bool:
    """What the body says in a forked child."""
    child = os.fork()
    if child == 0:
        answer = False
        try:
            answer = body()
        finally:
            os._exit(0 if answer else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- what came


def test_a_signal_sets_the_flag() -> None:
    """Its name, when it came, how often."""
    with SignalFlags(["USR1", "SIGTERM"]) as flags:
        assert not flags.raised
        began = time.time()
        me(signal.SIGTERM)
        me(signal.SIGUSR1)
        me(signal.SIGUSR1)
        assert flags.raised
        assert flags.counts == {"SIGTERM": 1, "SIGUSR1": 2}
        assert [flag.signal for flag in flags.flags] == ["SIGTERM", "SIGUSR1", "SIGUSR1"]
        times = [began, *(flag.time for flag in flags.flags), time.time()]
        assert times == sorted(times)
        flags.clear()
        assert not flags.raised
        assert not flags.wait(0)


def test_a_burst_into_handlers_that_still_run() -> None:
    """Signals back to back run nested handlers; none is lost but those that the kernel merges, none raises."""
    script = """
import os, signal, subprocess, sys
from fairlead_hpc_signals.flags import SignalFlags
flags = SignalFlags(["USR1", "USR2", "TERM"]).install()
print("ready", flush=True)
while len(flags.counts) < 3:
    sys.stdout.write("x" * 500)  # buffered I/O is what a handler must not interrupt with its own
print()
print(sorted(flags.counts))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(300):
                process.send_signal(signal.SIGUSR1)
                process.send_signal(signal.SIGUSR2)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()  # what hangs must not outlive the test, and fail another
    assert process.returncode == 0
    assert output.splitlines()[-1] == "['SIGTERM', 'SIGUSR1', 'SIGUSR2']"


def test_nested_handlers_lose_no_signal() -> None:
    """A handler that is interrupted by another signal notes its own all the same."""
    order: list[int] = []

    def earlier(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            me(signal.SIGUSR2)
        order.append(number)

    signal.signal(signal.SIGUSR1, earlier)
    signal.signal(signal.SIGUSR2, earlier)
    with SignalFlags(["USR1", "USR2"]) as flags:
        me(signal.SIGUSR1)
        assert flags.counts == {"SIGUSR1": 1, "SIGUSR2": 1}
    assert order == [signal.SIGUSR2, signal.SIGUSR1]


def test_a_sender_that_never_stops() -> None:
    """Neither the memory nor the pipe fills: handlers go on, and what is kept is bounded."""
    with SignalFlags(["USR1"]) as flags:
        for _ in range(70_000):  # more than the pipe holds
            flags.note(signal.SIGUSR1)
        me(signal.SIGUSR1)
        assert flags.counts == {"SIGUSR1": 1000}
        flags.clear()
        assert not flags.wait(0)
        me(signal.SIGUSR1)
        assert flags.wait(0)


def test_another_thread_is_woken() -> None:
    """A thread that waits in `poll` learns of a signal without looking again and again."""
    woken: list[bool] = []
    with SignalFlags(["USR1"]) as flags:
        thread = threading.Thread(target=lambda: woken.append(flags.wait(PATIENCE)))
        thread.start()
        me(signal.SIGUSR1)
        thread.join(PATIENCE)
        assert woken == [True]
        assert select.select([flags], [], [], 0)[0] == [flags]  # for event loops, until `clear`


# -- what was there before


def test_an_earlier_handler_is_called_after_the_flag_is_set() -> None:
    seen: list[tuple[int, bool, bool]] = []
    flags = SignalFlags(["USR1"])

    def earlier(number: int, frame: FrameType | None) -> None:
        seen.append((number, flags.raised, frame is not None))

    signal.signal(signal.SIGUSR1, earlier)
    with flags:
        me(signal.SIGUSR1)
        assert seen == [(signal.SIGUSR1, True, True)]
    assert signal.getsignal(signal.SIGUSR1) is earlier


def test_the_default_action_is_not_taken_and_comes_back() -> None:
    """SIGTERM would end the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with SignalFlags(["TERM"]) as flags:
        me(signal.SIGTERM)
        assert flags.raised
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_terminal_ignores_stays_ignored() -> None:
    """`nohup` and `&` in a script; but an inherited `trap '' USR1` is overruled."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with SignalFlags(["HUP", "INT", "USR1"]) as flags:
        assert signal.getsignal(signal.SIGHUP) is signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
            me(number)
        assert flags.counts == {"SIGUSR1": 1}
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_the_second_interrupt_interrupts() -> None:
    """The first Ctrl-C asks for a stop; a person who presses it again gets out."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with SignalFlags(["INT", "USR1"]) as flags:
        me(signal.SIGUSR1)
        me(signal.SIGINT)
        assert flags.counts == {"SIGUSR1": 1, "SIGINT": 1}
        with pytest.raises(KeyboardInterrupt):
            me(signal.SIGINT)


def other(number: int, frame: FrameType | None) -> None:
    """A handler that somebody installs later."""


def test_a_replaced_handler_is_a_conflict_and_stays() -> None:
    """Who put what over ours is told; `uninstall` does not undo their work."""
    with SignalFlags(["USR1", "USR2", "TERM"]) as flags:
        assert flags.conflicts() == []
        signal.signal(signal.SIGUSR1, other)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        name = f"{__name__}.other"
        assert flags.conflicts() == [Conflict("SIGUSR1", name), Conflict("SIGUSR2", "signal.SIG_DFL")]
    assert signal.getsignal(signal.SIGUSR1) is other
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_two_flags_are_chained() -> None:
    """A guard inside a program that has one: both learn of the signal."""
    with SignalFlags(["USR1"]) as outer, SignalFlags(["USR1"]) as inner:
        me(signal.SIGUSR1)
        assert (outer.raised, inner.raised) == (True, True)


def test_installing_twice_does_no_harm() -> None:
    with SignalFlags(["USR1"]) as flags:
        flags.install()
        me(signal.SIGUSR1)
        assert flags.counts == {"SIGUSR1": 1}


@pytest.mark.parametrize(("name", "fix"), [("USR3", "SIGUSR"), ("KILL", "SIGTERM"), (999, None)])
def test_a_signal_that_cannot_be_handled(name: str | int, fix: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        SignalFlags([name])
    assert fix is None or fix in str(error.value.fix)


# -- threads and children


def test_in_another_thread_the_error_says_what_to_do() -> None:
    """Installed by the main thread before, it is read anywhere."""
    errors: list[str] = []
    flags = SignalFlags(["USR1"])

    def work() -> None:
        try:
            flags.install()
        except ConfigError as error:
            errors.append(error.block())

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    thread.join(PATIENCE)
    assert "thread 'trainer'" in errors[0]
    assert "main thread" in errors[0]


def test_a_forked_child_gets_the_earlier_handlers() -> None:
    """A forked process handles signals as if we had never been there, and outlives one that only warns."""
    signal.signal(signal.SIGUSR2, other)
    with SignalFlags(["USR1", "USR2", "TERM"]) as flags:

        def body() -> bool:
            back = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)]
            return back == [signal.SIG_IGN, other, signal.SIG_DFL] and not flags.raised

        assert in_child(body)
        assert flags.conflicts() == []
        me(signal.SIGTERM)
        assert flags.raised
        assert in_child(lambda: not flags.raised)


def test_a_forked_child_dies_of_a_signal_as_usual() -> None:
    """Pools and loaders end their workers with SIGTERM, some right after their start."""
    with SignalFlags(["TERM"]) as flags:
        for _ in range(100):
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE))  # a child that lost the signal
                signal.pause()
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not flags.raised
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # nothing stays blocked in the parent


def test_a_handler_that_is_left_in_a_child_does_nothing_there() -> None:
    """Somebody's handler over ours calls ours, in a child as well; the child must not wake its parent."""
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    with SignalFlags(["USR1"]) as flags:
        ours = signal.getsignal(signal.SIGUSR1)
        assert callable(ours)
        signal.signal(signal.SIGUSR1, lambda number, frame: ours(number, frame))

        def body() -> bool:
            me(signal.SIGUSR1)
            return called == [signal.SIGUSR1] and not flags.raised

        assert in_child(body)
        assert not flags.raised
        assert not flags.wait(0)


def test_a_child_cannot_write_into_a_file_of_another() -> None:
    """The pipe's numbers are free in a child; a note there goes nowhere."""
    flags = SignalFlags(["USR1"]).install()

    def body() -> bool:
        read, write = os.pipe()  # takes the numbers of the pipe that was closed
        flags.note(signal.SIGUSR1)
        return not select.select([read], [], [], 0)[0] and write > 0

    assert in_child(body)
    flags.uninstall()


def test_flags_that_are_gone_leave_no_file_open() -> None:
    flags = SignalFlags(["USR1"]).install()
    number = flags.fileno()
    flags.uninstall()
    del flags
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
