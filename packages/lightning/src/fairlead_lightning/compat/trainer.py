"""The Trainer's own processes, signals and callbacks, and what they cost a step."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import lightning.pytorch as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch._dynamo import OptimizedModule


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


_Callback = TypeVar("_Callback", bound=L.Callback)


def only_its_own_batch_hooks(callback: type[_Callback]) -> type[_Callback]:
    """A class decorator: the hooks of every batch that the callback does not define are not there at all.

    Lightning opens a profiler's block for each hook of each callback, some microseconds; what is no call is left out.
    """
    for name in vars(L.Callback):
        of_each = name.endswith(("_batch_start", "_batch_end")) or name.startswith(("on_before_", "on_after_backward"))
        if of_each and getattr(callback, name) is getattr(L.Callback, name):
            setattr(callback, name, None)
    return callback


def uncompiled(thing: Any) -> Any:
    """What `torch.compile` was given, where that is a LightningModule, as after `module.compile()` with its options.

    Its `forward` is compiled. Lightning would compile `training_step` too, where torch cannot follow `self.log`.
    """
    if not isinstance(thing, OptimizedModule) or not isinstance(thing._orig_mod, L.LightningModule):
        return thing
    module: Any = thing._orig_mod
    context: Any = thing.dynamo_ctx
    module._compiled_call_impl = context(module._call_impl)
    return module


_NOTHING: Final = nullcontext()


class _NoProfiler(PassThroughProfiler):
    """The profiler where none is set: Lightning's makes a generator for each of some forty hooks of a step."""

    def profile(self, action_name: str) -> Any:
        """One block for all."""
        return _NOTHING


class _Result(_ResultMetric):
    """A logged value that is moved to a device only if it is on another one.

    Lightning's looks through all attributes of the metric for tensors to move, at each `self.log`.
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing to do where all of its tensors are on the device already."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.device) and self.is_tensor:
            tensors = (self.value, self._forward_cache, self._computed, vars(self).get("cumulated_batch_size"))
            if all(one.device == args[0] for one in tensors if one is not None):
                return self
        return super().to(*args, **kwargs)


class _Results(_ResultCollection):
    """Makes what is logged into it a `_Result`."""

    def __setitem__(self, key: str, value: Any) -> None:
        if type(value) is _ResultMetric:
            value.__class__ = _Result
        super().__setitem__(key, value)


def less_overhead(trainer: L.Trainer) -> Callable[[], None]:
    """Spares a fit what Lightning does for nothing; returns what ends it (spawned ranks get a copy: it is pickled)."""
    epoch: Any = trainer.fit_loop.epoch_loop
    collections: list[Any] = [epoch._results, epoch.val_loop._results]
    for results in collections:
        if type(results) is _ResultCollection:
            results.__class__ = _Results
    own = vars(trainer)  # Lightning declares no `profiler`
    profiler = own["profiler"]
    if type(profiler) is PassThroughProfiler:
        own["profiler"] = _NoProfiler()
    return partial(_undo, collections, trainer, profiler)


def _undo(collections: list[Any], trainer: L.Trainer, profiler: object) -> None:
    for results in collections:
        if type(results) is _Results:
            results.__class__ = _ResultCollection  # type: ignore[assignment]
    own = vars(trainer)
    if type(own["profiler"]) is _NoProfiler:
        own["profiler"] = profiler
