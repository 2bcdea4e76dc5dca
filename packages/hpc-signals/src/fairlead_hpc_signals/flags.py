"""Signals that only set a flag: what they ask for is done later, at a step boundary.

A handler interrupts the program anywhere: in a collective, a write, another handler. So ours notes the signal and wakes
whoever waits, without buffered I/O (a nested handler would die of `reentrant call`), locks or logging. Python calls it
in the main thread, which may sit in C code for ever: a thread notes what that has not heard of in a moment.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from fairlead.config_bases import signal_name
from fairlead.errors import ConfigError

DEFAULT_SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
"""What schedulers send before they kill, what people set in `--signal=USR1@120`, and Ctrl-C."""

_MOST = 1000  # notes that are stored; a sender that never stops must not fill the memory
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_MOMENT: Final = 0.2  # seconds in which a main thread that is in Python calls a handler
_wakeups: Final[set[int]] = set()  # files that were given to `signal.set_wakeup_fd` here


def signal_number(name: str | int) -> signal.Signals:
    """The signal of a name, with or without `SIG`, or of a number; `ConfigError` where no program can handle it."""
    try:
        return signal.Signals[signal_name(signal.Signals(name).name if isinstance(name, int) else name)]
    except ValueError as error:
        raise ConfigError(str(error), fix="use SIGUSR1, SIGUSR2 or SIGTERM") from None


@dataclass(frozen=True, slots=True)
class Flag:
    """One signal that came, by name, and when its handler ran, in seconds since the epoch."""

    signal: str
    time: float


@dataclass(frozen=True, slots=True)
class Conflict:
    """A signal whose handler somebody replaced after ours was installed, and what is there: `signal.SIG_DFL`, ..."""

    signal: str
    handler: str


class SignalFlags:
    """Handlers that note which signals came, and nothing else.

    What was there before: a handler of somebody's is called after the flag is set; the default action of a signal (to
    end the process) is not taken. SIGINT and SIGHUP stay ignored where they were (`nohup`, a job in the background);
    other signals are taken over all the same, because a job script's `trap '' USR1` is inherited and hardly meant for
    the training. The first Ctrl-C sets the flag; the next one does what it did before, so that a person gets out.

    A forked child (a loader's worker) gets the earlier handlers back and has no flags; a signal that comes to it
    before that waits until then. SIGUSR1 and SIGUSR2 are ignored there, unless they were handled before.

    Args:
        signals: Names or numbers.

    Example:
        >>> with SignalFlags(["USR1"]) as flags:
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     flags.raised, flags.counts
        (True, {'SIGUSR1': 1})
    """

    def __init__(self, signals: Iterable[str | int] = DEFAULT_SIGNALS) -> None:
        self.signals = tuple(dict.fromkeys(signal_number(name) for name in signals))
        self._pid = os.getpid()
        self._notes: list[tuple[int, float]] = []
        self._earlier: dict[signal.Signals, Any] = {}
        self._hooked = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._close = weakref.finalize(self, _close_both, self._read_fd, self._write_fd)
        self._close.atexit = False  # a late signal would write into a closed file
        self._early: _Wakeup | None = None

    # -- what came

    @property
    def raised(self) -> bool:
        """Whether a signal came; cheap, from any thread."""
        return bool(self._notes)

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All that came, in order; at most 1000 are stored."""
        return tuple(Flag(signal.Signals(number).name, when) for number, when in list(self._notes))

    @property
    def counts(self) -> dict[str, int]:
        """How often each came, in the order of their first."""
        counts: dict[str, int] = {}
        for flag in self.flags:
            counts[flag.signal] = counts.get(flag.signal, 0) + 1
        return counts

    def note(self, number: int) -> None:
        """Sets the flag as if the signal had come by another way; from any thread, and from a signal handler."""
        if len(self._notes) < _MOST:
            self._notes.append((number, time.time()))
        try:
            os.write(self._write_fd, b"!")
        except OSError:
            return  # the pipe is full, so whoever waits is awake; or it is closed

    def clear(self) -> None:
        """Forgets what came, for a program that continues after it."""
        self._notes.clear()
        while select.select([self._read_fd], [], [], 0)[0] and os.read(self._read_fd, 4096):
            pass

    def fileno(self) -> int:
        """A file that is readable once a signal has come, until `clear`: for `select` and event loops."""
        return self._read_fd

    def wait(self, timeout: float | None = None) -> bool:
        """Waits in this thread for a signal, at most so many seconds; whether one has come.

        In the main thread a signal ends the wait as well; in another thread only the main one's handler does.
        """
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000)) or self.raised

    # -- handlers

    def install(self, only: Iterable[str] | None = None) -> SignalFlags:
        """Installs the handlers; early, before data is prepared and checkpoints are loaded. Once is enough.

        Args:
            only: Names of those to begin with: a signal that merely warns may be noted long before there is something
                to stop, while SIGTERM is still to end the process.

        Raises:
            ConfigError: This is not the main thread: Python lets only that one install handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signal handlers can be installed in the main thread only",
                where=f"thread {threading.current_thread().name!r}",
                fix="make and install SignalFlags in the main thread, before the training thread starts, and hand the "
                "object over: every thread can read it",
            )
        chosen = None if only is None else set(only)
        for number in self.signals:
            if number in self._earlier or (chosen is not None and number.name not in chosen):
                continue
            earlier = signal.getsignal(number)
            if earlier is signal.SIG_IGN and number in _FROM_TERMINAL:
                continue
            self._earlier[number] = earlier  # first: the signal may come at once
            signal.signal(number, self._handle)
        if self._early is None and self._earlier:
            self._early = _Wakeup(weakref.WeakMethod(self._take))
        if not self._hooked:
            self._hooked = True
            _disown_in_children(weakref.ref(self))
        return self

    def uninstall(self) -> None:
        """Puts back what was there; a handler that somebody has put over ours since then stays. The flags stay."""
        if self._early is not None and threading.current_thread() is threading.main_thread():
            self._early.close()
            self._early = None
        for number in list(self._earlier):
            if signal.getsignal(number) == self._handle:
                # None: set by C code, out of reach for Python; the default is the best that is left.
                earlier = self._earlier[number]
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
                del self._earlier[number]

    def conflicts(self) -> list[Conflict]:
        """The signals whose handler was replaced since `install`, as far as Python knows of it.

        It may call ours all the same (a handler that chains): that cannot be seen from outside.
        """
        now = {number: signal.getsignal(number) for number in self._earlier}
        return [Conflict(number.name, _shown(there)) for number, there in now.items() if there != self._handle]

    def __enter__(self) -> SignalFlags:
        return self.install()

    def __exit__(self, *exc: object) -> None:
        self.uninstall()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(signal.Signals(number))
        if os.getpid() != self._pid:
            # A child that was forked behind Python's back: as if we had never been there.
            ours = signal.getsignal(number) == self._handle
            self.disown()
            if ours:
                signal.raise_signal(number)
                return
        else:
            if self._early is None or not self._early.take():
                self.note(number)
            if earlier is signal.default_int_handler and [n for n, _ in self._notes].count(number) < 2:
                return
        if callable(earlier):
            earlier(number, frame)

    def _take(self, numbers: bytes) -> None:
        """Notes the signals that came, as their numbers; others may be handled in this process as well."""
        for number in numbers:
            if number in self._earlier and signal.getsignal(number) == self._handle:
                self.note(number)

    def disown(self) -> None:
        """Leaves a forked child as if these flags had never been made; called there by itself.

        But for signals that only warn: they come to all processes of a job, and by default each would die of it.
        """
        warned = [number for number in self._earlier if number in _WARNINGS]
        self.uninstall()
        for number in warned:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
        self._notes = []
        self._close()  # the child's copies; the parent's stay open
        self._read_fd = self._write_fd = -1  # the numbers are free for other files now


class _Wakeup:
    """Hears of signals before Python's handlers do, in C: what their main thread has not taken in a moment is noted.

    `note` gets the numbers; it keeps its owner alive no longer than others do.
    """

    def __init__(self, note: weakref.WeakMethod[Callable[[bytes], None]]) -> None:
        self._note = note
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._pid = os.getpid()
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if self._before != -1 and self._before not in _wakeups:
            # An event loop has its own: it is not ours to take, and its program has a main thread that is awake.
            signal.set_wakeup_fd(self._before)
            self._closed = True
            _close_both(self._read, self._write)
            return
        _wakeups.add(self._write)
        threading.Thread(target=self._run, name="fairlead-signals", daemon=True).start()

    def take(self) -> bool:
        """In a handler: notes what has come; False where somebody else has the signals written to a file of theirs."""
        if self._closed:
            return False
        theirs = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if theirs != self._write:
            signal.set_wakeup_fd(theirs)
            return False
        self._drain()
        return True

    def close(self) -> None:
        """Nothing is heard any more; in a forked child its parent still hears."""
        if self._closed:
            return
        self._closed = True
        _wakeups.discard(self._write)
        there = signal.set_wakeup_fd(self._before if self._before in _wakeups else -1)
        if there not in (self._write, -1):
            signal.set_wakeup_fd(there)
        if os.getpid() == self._pid:
            os.write(self._write, b"\0")  # the thread closes the files
        else:
            _close_both(self._read, self._write)

    def _drain(self) -> None:
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return
        if (note := self._note()) is not None:
            note(numbers)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while not self._closed:
            poll.poll()
            time.sleep(_MOMENT)
            self._drain()
        _close_both(self._read, self._write)


def _close_both(one: int, other: int) -> None:
    os.close(one)
    os.close(other)


def _shown(handler: object) -> str:
    if isinstance(handler, signal.Handlers):
        return f"signal.{handler.name}"
    if handler is None:
        return "a handler of C code"
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    return f"{getattr(handler, '__module__', '?')}.{name}"


def _disown_in_children(there: weakref.ref[SignalFlags]) -> None:
    """Has forked children disown what they inherit; a hook cannot be taken back, so this keeps nothing alive.

    A signal that came to the child before would be lost: Python forgets there what it has not handled yet. (Seen: a
    pool that ends a worker right after its start waits for ever.) So the signals wait while this thread forks.
    """
    masks = threading.local()

    def before() -> None:
        flags = there()
        masks.earlier = None if flags is None else signal.pthread_sigmask(signal.SIG_BLOCK, flags.signals)

    def after() -> None:
        if masks.earlier is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.earlier)

    def after_in_child() -> None:
        if (flags := there()) is not None:
            flags.disown()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)
