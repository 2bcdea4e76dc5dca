"""Signals, and the ranks that Lightning's launcher starts."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher


def without_signal_handlers(trainer: L.Trainer) -> Callable[[], None]:
    """Keeps Lightning from handling signals: its SIGTERM handler starts a collective wherever the rank is.

    Its broadcast before every batch goes with it, and what it does for SLURM by itself.  Returns what ends it.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop

    def register_signal_handlers() -> None:
        connector.received_sigterm = False

    connector.register_signal_handlers = register_signal_handlers
    loop._broadcast_sigterm_tensor = lambda: None

    def undo() -> None:
        vars(connector).pop("register_signal_handlers", None)
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


def let_children_end(trainer: L.Trainer) -> None:
    """Has Lightning's launcher no longer watch the ranks it started: at their exit codes it would kill this process."""
    launcher: Any = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        launcher.procs.clear()


def is_spawned(trainer: L.Trainer) -> bool:
    """Whether this process is a rank that Lightning has spawned: it calls no `on_exception` there."""
    launcher = trainer.strategy.launcher
    spawns = launcher is not None and not isinstance(launcher, _SubprocessScriptLauncher)
    return spawns and multiprocessing.parent_process() is not None


def signal_children(trainer: L.Trainer, name: str) -> None:
    """Sends a signal to the ranks that this process has spawned."""
    launcher: Any = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(signal.Signals[name])
