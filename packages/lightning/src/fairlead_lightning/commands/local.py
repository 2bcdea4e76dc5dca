"""What happens before torch is imported: check the job, and start the ranks of this machine if there are several."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, cast

from fairlead.cli.session import Session
from fairlead.detect import choose_environment
from fairlead.errors import FairleadError
from fairlead.interfaces import BuildContext
from fairlead.plugin_classes import StrategyPlugin
from fairlead_launch.environment import LAUNCHED, inherited_plan
from fairlead_launch.forkserver import thaw_for_nanobind
from fairlead_launch.reports import leave_to_rank_0, send_report, shown_after_rank_0
from fairlead_lightning.commands.early import EarlyImports
from fairlead_lightning.commands.prepare import prepare, with_weights
from fairlead_lightning.display.quiet import TORCH_DEFAULTS
from fairlead_runs.guard import build_guard

_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def hold_signals() -> Iterator[Callable[[], list[int]]]:
    """Keeps the signals that ask for a stop until what it yields is called; else they are raised again at the end.

    While a job is read and checked, SIGUSR1 would end the process.  (Blocking would not do: another thread would get
    it.) What it yields puts the earlier handlers back and returns the signals that came.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def release() -> list[int]:
        for number in list(earlier):
            handler = earlier.pop(number)
            if signal.getsignal(number) is note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        released = came[:]
        came.clear()
        return released

    earlier: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for stop in _STOPS:
            if signal.getsignal(stop) is not signal.SIG_IGN:
                earlier[stop] = signal.signal(stop, note)
    try:
        yield release
    finally:
        for number in release():
            signal.raise_signal(number)


def run_here_or_on_ranks(arguments: argparse.Namespace, session: Session) -> int:
    """Runs the command in this process, or starts one process a rank and watches them."""
    if getattr(arguments, "prove_resume", None) is not None:
        from fairlead_lightning.commands.prove import prove_resume  # a command of its own

        return prove_resume(arguments, session)
    with hold_signals() as release, EarlyImports(arguments, session) as early:
        return _run(arguments, session, release, early)


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Imports stay: to look for garbage among them, then and in each step, is a sixth of the time of a start."""
    gc.disable()
    atexit.register(thaw_for_nanobind)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _ignore(signals: Iterable[int]) -> None:
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def _run(arguments: argparse.Namespace, session: Session, release: Callable[[], list[int]], early: EarlyImports) -> int:
    try:
        evaluates = arguments.command != "fit"
        checked = prepare(arguments, session, uses_run=not evaluates, loaded=early.begin)
        weights = None
        if evaluates and inherited_plan(session.environ) is None:
            checked, weights = with_weights(checked, session)
    except FairleadError as error:
        # Ranks that a launcher started check for themselves; what they find wrong is the same for all, and shown once.
        if send_report(session.environ, f"error: {error.block()}", error.exit_code):
            return error.exit_code
        topology = choose_environment("auto", session.environ, session.plugins, starting=True).topology
        if topology is not None and topology.launched and topology.global_rank is not None and not session.debug:
            leave_to_rank_0(error, int(topology.global_rank.value))
        for number in release():
            signal.raise_signal(number)
        if shown_after_rank_0(error):
            return error.exit_code
        raise
    resolution = checked.resolution
    assert resolution is not None
    topology = resolution.topology
    first = not topology.launched or resolution.value("global_rank") == 0
    if first and not session.environ.get(LAUNCHED):
        if weights is not None:
            session.print(weights.line)
        for finding in checked.findings:
            session.warn(str(finding))
    if any(finding.code == "run-finished" for finding in checked.findings):
        return 0
    starts_ranks = not topology.launched and resolution.world_size > 1
    starts_ranks &= not cast("StrategyPlugin", session.plugins.of(resolution.strategy)).starts_processes
    if not starts_ranks or getattr(resolution.strategy, "start_method", "popen") != "popen":
        early.close()
        guard = build_guard(BuildContext(resolution, session.environ, session.plugins))
        came = release()
        guard.flags.install()  # before torch is imported, which takes seconds
        for number in came:
            signal.raise_signal(number)
        if first and not evaluates:
            guard.watch_opening()
        for name, value in TORCH_DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            with _quick_imports():
                from fairlead_lightning.commands.run import run_rank

            code = run_rank(arguments, session, checked, guard)
            if code == 0:
                # What comes while the process ends has nothing to stop, and is not to make a failure of a finished run.
                atexit.register(_ignore, guard.flags.signals)
            return code
        finally:
            if guard.outcome is None:
                guard.flags.uninstall()
    from fairlead_lightning.commands.ranks import run_ranks

    return run_ranks(arguments, session, checked, release(), early.server)
