"""Shows on rank 0 how a run is doing, and sums it up at its end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch import Tensor

from fairlead_distributed.batch_sizes import batch_size
from fairlead_lightning import compat
from fairlead_lightning.display.displays import Lines, choose_display
from fairlead_lightning.display.summary import Throughput, duration, number, short, summary_lines
from fairlead_runs.batch_size import GlobalBatch

_LOSSES: Final = ("train/loss", "train_loss", "loss")
_SHOWN: Final = 6
_TASKS: Final[Mapping[Any, tuple[str, str]]] = {
    "sanity_check": ("sanity check", "num_sanity_val_batches"),
    "validate": ("validation", "num_val_batches"),
    "test": ("test", "num_test_batches"),
    "predict": ("prediction", "num_predict_batches"),
}


@compat.only_its_own_batch_hooks
class Progress(ProgressBar):
    """Lightning's progress bar: bars on a terminal, a plain line every few seconds elsewhere.

    A step costs a count and a look at the clock; values are read from the device only when they are shown.
    """

    def __init__(
        self, interval: float, console: Console | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.interval = interval
        self._ci = bool((os.environ if environ is None else environ).get("CI"))
        self._display: Lines | None = choose_display(interval, console, self._ci)
        self._enabled = True
        self._speed = Throughput(0, 0.0)
        self._replicas = 1
        self._total: int | None = None
        self._ended: float | None = None
        self._last_batch = -1
        self._due = 0.0
        self._evaluated = 0
        self._evaluation_due = 0.0
        self._before: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A terminal cannot be pickled; ranks that are spawned open their own."""
        return {**self.__dict__, "_display": None}

    @property
    def display(self) -> Lines:
        """Where progress is shown."""
        if self._display is None:
            self._display = choose_display(self.interval, None, self._ci)
        return self._display

    @property
    def is_enabled(self) -> bool:
        """Whether this rank shows anything; Lightning asks before it prints through `print`."""
        return self._enabled and self._is_first()

    def enable(self) -> None:
        """Shows progress again, after `disable`."""
        self._enabled = True

    def disable(self) -> None:
        """Shows nothing, for example while Lightning looks for a learning rate."""
        self._enabled = False
        self.display.close()

    def _is_first(self) -> bool:
        return int(getattr(rank_zero_only, "rank", 0)) == 0

    def say(self, text: str) -> None:
        """Prints a line, above the bars if there are any; on rank 0 only."""
        if self._is_first():
            self.display.say(text)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """What `LightningModule.print` calls; takes the arguments of `print`."""
        if kwargs.get("file") is not None or kwargs.get("end", "\n") != "\n":
            print(*args, **kwargs)
        else:
            self.say(str(kwargs.get("sep", " ") or " ").join(map(str, args)))

    def summary(self, trainer: L.Trainer, run_dir: Path | None = None) -> None:
        """Says what a finished fit did: steps, speed, the best value, where the checkpoint is; on rank 0 only."""
        self.display.close()
        if not self._is_first():
            return
        now = self._ended if self._ended is not None else time.monotonic()
        folder = run_dir or Path(trainer.default_root_dir)
        lines = summary_lines(trainer.global_step, trainer.current_epoch, self._speed, self._replicas, now, folder)
        self.say("\n".join(lines))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training begins, or resumes."""
        if not self.is_enabled:
            return
        now = time.monotonic()
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._replicas = int(sampler.get("num_replicas", 1))
        done, self._total = position(trainer, pl_module)
        self._speed, self._ended = Throughput(trainer.global_step, now), None
        self._due = 0.0
        self._last_batch = -1
        if self._total is not None:
            self._last_batch = (self._total - done) * trainer.accumulate_grad_batches

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts; shows something when it is time, and at the last step."""
        if not self._enabled or not trainer.is_global_zero:
            return
        speed = self._speed
        samples = batch_size(batch)
        speed.add(samples)
        if speed.batches == 1:
            self.say(self._sizes(trainer, pl_module, samples))
        now = time.monotonic()
        if now < self._due and speed.batches != self._last_batch:
            return
        self._due = now + self.display.interval
        done, _ = position(trainer, pl_module)
        rates = speed.mark(done, now)
        parts = [f"epoch {trainer.current_epoch}", *self._metrics(trainer, outputs)]
        if rates is not None:
            parts.append(f"samples/s {number(rates[0] * self._replicas)}")
            left = self._left(trainer, done, rates[1], now)
            if left is not None:
                parts.append(f"left {duration(left)}")
        self.display.update("train", done, self._total, "  ".join(parts))

    def _sizes(self, trainer: L.Trainer, pl_module: L.LightningModule, samples: int) -> str:
        """What is trained, with how much at a time: parameters, and the batch of a device and of a step."""
        counts = (self._replicas, trainer.num_nodes, trainer.accumulate_grad_batches)
        drives = getattr(trainer.strategy, "devices_per_rank", 1)
        batch = GlobalBatch(samples, *counts, shared_by=trainer.world_size // self._replicas, drives=drives)
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        in_all = f" = {batch.samples} in all" if batch.samples > samples else ""
        return f"model       {short(parameters)} parameters, batch {batch}{in_all}"

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock of training."""
        if self.is_enabled:
            self._speed.pause(time.monotonic())
            self._before = dict(trainer.callback_metrics)
            self._begin_evaluation()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Shows what was measured."""
        if not self.is_enabled:
            return
        self.display.remove("validation")
        self.display.remove("sanity check")
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            new = {k: v for k, v in trainer.callback_metrics.items() if v is not self._before.get(k)}
            shown = _values(new)
            if shown:
                self.say(f"step {trainer.global_step}  {shown}")
        if trainer.state.fn != "fit":
            self.display.close()  # Lightning prints its table next
        self._before = {}
        self._speed.resume(time.monotonic())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives the terminal back before other callbacks print their results."""
        self._ended = time.monotonic()
        self.display.close()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Gives the terminal back before others print: the error, or Lightning its table."""
        self.display.close()

    teardown = on_test_end = on_predict_end = on_exception

    def _left(self, trainer: L.Trainer, done: int, steps_per_s: float, now: float) -> float | None:
        left = math.inf
        if self._total is not None and steps_per_s > 0:
            left = self._speed.left_s(done, self._total, steps_per_s, now)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning's callback connector
            remaining = callback.time_remaining() if isinstance(callback, Timer) else None
            left = left if remaining is None else min(left, remaining)
        return left if left < math.inf else None

    def _metrics(self, trainer: L.Trainer, outputs: Any) -> list[str]:
        """The loss, and what was logged with `prog_bar=True`; reads from the device."""
        logged = trainer.callback_metrics
        bar = {k: v for k, v in trainer.progress_bar_metrics.items() if isinstance(v, (int, float))}
        name = next((name for name in _LOSSES if name in logged), None)
        parts = []
        if name is not None:
            parts.append(f"loss {number(float(logged[name]))}")
        elif not bar and isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            # Lightning has divided it for the accumulation of gradients.
            parts.append(f"loss {number(float(outputs['loss']) * trainer.accumulate_grad_batches)}")
        others = [f"{k} {number(v)}" for k, v in bar.items() if k not in {name, f"{name}_step", f"{name}_epoch"}]
        return parts + others[:_SHOWN]

    def _begin_evaluation(self) -> None:
        self._evaluated = 0
        self._evaluation_due = time.monotonic() + self.display.interval

    def on_test_start(self, *_: Any, **__: Any) -> None:
        """Testing or predicting begins."""
        self._begin_evaluation()

    on_predict_start = on_test_start

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Counts; shows something when it is time."""
        if not self.is_enabled:
            return
        self._evaluated += 1
        now = time.monotonic()
        if now < self._evaluation_due:
            return
        self._evaluation_due = now + self.display.interval
        task, batches = _TASKS[trainer.state.stage]
        total = sum(getattr(trainer, batches))
        self.display.update(task, self._evaluated, int(total) if total < math.inf else None, "")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def position(trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[int, int | None]:
    """Steps done and in all; with several optimizers by hand, batches, since each counts its own steps."""
    if pl_module.automatic_optimization or trainer.max_steps != -1:
        total = trainer.estimated_stepping_batches
        done = trainer.global_step
    else:
        epochs = trainer.max_epochs if trainer.max_epochs is not None else -1
        total = trainer.num_training_batches * epochs if epochs >= 0 else math.inf
        done = trainer.fit_loop.total_batch_idx + 1
    return done, int(total) if 0 <= total < math.inf else None


def _values(metrics: Mapping[str, Any]) -> str:
    """`val/loss 2.1  val/acc 0.53`, at most six of them."""
    numbers = {k: float(v) for k, v in metrics.items() if not isinstance(v, Tensor) or v.numel() == 1}
    shown = [f"{name} {number(value)}" for name, value in list(numbers.items())[:_SHOWN]]
    if len(numbers) > _SHOWN:
        shown.append(f"and {len(numbers) - _SHOWN} more in metrics.csv")
    return "  ".join(shown)
