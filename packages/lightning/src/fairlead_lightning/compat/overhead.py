"""What Lightning does in every step and for every `self.log`, left out where it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import lightning.pytorch as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

_NOTHING: Final = nullcontext()


class _NoProfiler(PassThroughProfiler):
    """The profiler of who has asked for none: Lightning's makes a generator for each of some forty hooks of a step."""

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
