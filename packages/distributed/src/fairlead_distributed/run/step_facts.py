"""What torch knows of a step's time: how long DDP waits for gradients, and what the device was busy with."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fairlead_distributed.run.session import RunSession
from fairlead_runs.step_findings import step_findings
from fairlead_runs.step_times import STEP_PARTS, RankTimes, StepTimes

_SAMPLED: Final = 50
"""Of how many steps one is timed on the device."""
_FIRST_REPORT_S: Final = 20.0
"""Seconds in steps after which a slow training is explained, once."""


def measure_steps(
    session: RunSession,
    modules: Callable[[], Iterable[object]],
    loader: Callable[[], Any],
    say: Callable[[str], None],
) -> None:
    """Has this rank's step times hold what torch knows of them, and says once what slows the steps, if anything does.

    Args:
        session: Has been joined.
        modules: Gives the models that are trained, wrapped as they are.
        loader: Gives the training's loader, if there is one yet.
        say: Prints on rank 0.
    """
    times = session.times
    if times is None:
        return
    device = DeviceTimes(times) if torch.cuda.is_available() else None
    reported = False

    def facts() -> Mapping[str, float]:
        return {
            **(device.facts() if device is not None else {}),
            **_memory(),
            **_communication(modules()),
            **_loading(loader()),
        }

    def written(own: RankTimes) -> None:
        nonlocal reported
        if own.rank or reported or own.mean_s is None or own.mean_s * own.steps < _FIRST_REPORT_S:
            return
        reported = True
        for finding in step_findings([own]):
            say(str(finding))

    times.facts, times.on_write = facts, written


def _communication(modules: Iterable[object]) -> dict[str, float]:
    """Seconds of a step in which DDP waits for gradients beyond the backward pass, as its own timers have them.

    They see each of the first ten steps, and one of a hundred later on.
    """
    wait = sent = 0.0
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            log: Any = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            wait += (log.get("avg_backward_comm_time", 0) - log.get("avg_backward_compute_comm_overlap_time", 0)) / 1e9
            sent += log.get("total_parameter_size_bytes", 0)
    return {"comm_s": max(0.0, wait), "comm_bytes": sent} if sent else {}


def _memory() -> dict[str, float]:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"host_memory": float(most)}
    if torch.cuda.is_available():
        found["device_memory"] = float(torch.cuda.max_memory_allocated())
    return found


def _loading(loader: Any) -> dict[str, float]:
    workers = getattr(loader, "num_workers", None)
    pinned = getattr(loader, "pin_memory", None)
    found = {"workers": float(workers)} if isinstance(workers, int) else {}
    return {**found, "pinned": float(pinned)} if isinstance(pinned, bool) else found


class DeviceTimes:
    """Seconds of each part as a CUDA device sees them, in one of so many steps.

    The host goes ahead of the device: its own time says where it waited, not what for. An event is recorded where a
    part begins, and the time between two of them is read when the device has passed both, so that nothing waits.
    """

    def __init__(self, times: StepTimes, event: Callable[[], Any] | None = None, every: int = _SAMPLED) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._every = every
        self._until = every
        self._marks: list[tuple[str, Any]] | None = None
        self._passed: list[list[tuple[str, Any]]] = []
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._steps = 0
        times.on_part = self._begins

    def _begins(self, part: str) -> None:
        marks = self._marks
        if marks is None:
            if part == "data":
                self._until -= 1
                if self._until <= 0:
                    self._until = self._every
                    self._marks = [(part, self._record())]
            return
        if part == "data":
            self._marks = None
            self._passed.append([*marks, ("", self._record())])
        elif part in STEP_PARTS:
            marks.append((part, self._record()))
        else:  # a validation or a save is in this step
            self._marks = None

    def _record(self) -> Any:
        event = self._event()
        event.record()
        return event

    def facts(self) -> dict[str, float]:
        """Seconds by part of the steps that the device has passed."""
        while self._passed and self._passed[0][-1][1].query():
            marks = self._passed.pop(0)
            for (part, begin), (_, end) in pairwise(marks):
                self._seconds[part] += begin.elapsed_time(end) / 1000
            self._steps += 1
        if not self._steps:
            return {}
        return {"device_steps": float(self._steps)} | {f"device.{part}": s for part, s in self._seconds.items() if s}
