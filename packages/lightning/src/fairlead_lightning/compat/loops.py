"""The places of a fit where everything is done that belongs to what came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as L


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Called from `on_train_start` of a fit that was restored from between two epochs: begins the next one.

    With `max_steps` Lightning takes the epoch that is over for one to be finished: it runs an empty
    epoch, counts it, and steps the schedules once more.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if len({epochs.ready, epochs.started, epochs.processed, epochs.completed}) == 1:
        as_if_never_restored(trainer)


def as_if_never_restored(trainer: L.Trainer) -> None:
    """Lightning's own ways of finding its place, and the iterators that it has made for them, are over.

    Called before the first epoch of a fit that resumes between two, iterators are made behind its hooks, as always;
    those that were made before would draw from the generators as they were before they were restored.
    """
    epoch = trainer.fit_loop.epoch_loop
    epoch.restarting = False  # the validation's too
    epoch.on_iteration_done()
    trainer.fit_loop.on_iteration_done()  # its setter would make `restarting` True again


class Boundaries(Protocol):
    """What is called at them; each rank comes to the same ones in the same order."""

    def before_epoch(self) -> None:
        """Nothing of the next epoch has begun; its hooks come after this.  Also where a fit goes on inside one."""

    def going_on(self) -> bool | None:
        """A fit goes on inside an epoch: whether the end of its last batch is due (a validation, plateau schedules).

        None where the checkpoint does not say: Lightning finds its place itself.
        """

    def after_batch(self, validation_due: bool) -> None:
        """A batch is trained on and logged; the validation after it has not begun."""

    def after_validation(self) -> None:
        """Everything that belongs to a batch is done."""


def watch_boundaries(trainer: L.Trainer, watcher: Boundaries) -> Callable[[], None]:
    """Calls the watcher at the boundaries of this trainer's fits; hooks come too early or too late for them.

    Returns:
        Ends it.
    """
    fit: Any = trainer.fit_loop
    epoch: Any = trainer.fit_loop.epoch_loop
    start, begin, end = fit.on_advance_start, epoch.on_run_start, epoch.on_advance_end

    def on_advance_start() -> None:
        watcher.before_epoch()
        start()

    def on_run_start(data_fetcher: Any) -> None:
        begin(data_fetcher)
        due = watcher.going_on() if epoch.restarting else None
        if due is not None:
            as_if_never_restored(trainer)  # everything is as it was at the boundary, its plateau schedules too
        if due:
            finish(data_fetcher)

    def on_advance_end(data_fetcher: Any) -> None:
        watcher.after_batch(bool(epoch._should_check_val_fx(data_fetcher)))
        finish(data_fetcher)

    def finish(data_fetcher: Any) -> None:
        end(data_fetcher)
        watcher.after_validation()

    fit.on_advance_start = on_advance_start
    epoch.on_run_start = on_run_start
    epoch.on_advance_end = on_advance_end

    def undo() -> None:
        for loop, name in ((fit, "on_advance_start"), (epoch, "on_run_start"), (epoch, "on_advance_end")):
            vars(loop).pop(name, None)

    return undo


def training_place(trainer: L.Trainer) -> tuple[int, int]:
    """(epochs that are over, batches of this rank in the one that has begun)."""
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    batches: int = loop.epoch_loop.batch_progress.current.ready
    return epochs.processed, batches if epochs.ready > epochs.processed else 0


def set_batches_done(trainer: L.Trainer, batches: int) -> None:
    """Sets how many batches of the epoch are done, for another number of ranks than those that did them."""
    loop: Any = trainer.fit_loop.epoch_loop
    current = loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = batches
