"""The boundaries of a fit: where all work of the step, epoch or validation before is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def batches_of_epoch(trainer: L.Trainer) -> int | None:
    """This rank's batches in an epoch, once its loaders are made; None: not known before they end."""
    fit: Any = trainer.fit_loop
    if has_none_left(fit._data_fetcher):
        return 0
    known = all(sized_len(one) is not None for one in fit._combined_loader.flattened)
    return int(fit.max_batches) if known and fit.max_batches != math.inf else None


def limit_epoch(trainer: L.Trainer, batches: int) -> None:
    """Ends each epoch after so many batches, its last validation too."""
    fit: Any = trainer.fit_loop
    fit.max_batches = batches
    interval, every = trainer.val_check_interval, vars(trainer)["val_check_batch"]
    if isinstance(interval, float) and every not in (None, math.inf):
        vars(trainer)["val_check_batch"] = max(1, int(batches * interval))


def is_last_batch(trainer: L.Trainer) -> bool:
    """Whether the batch that has begun is this rank's last one of the epoch; a stream is read one batch ahead."""
    loop: Any = trainer.fit_loop.epoch_loop
    return bool(loop._num_ready_batches_reached())


def end_epoch_here(trainer: L.Trainer) -> None:
    """Makes the batch that has begun the epoch's last one."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = True


def has_none_left(data_fetcher: Any) -> bool:
    """Whether a stream, which is read ahead, has ended."""
    return isinstance(data_fetcher, _PrefetchDataFetcher) and bool(data_fetcher.done) and not data_fetcher.batches


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Called from `on_train_start` of a fit that was restored from between two epochs: begins the next one.

    With `max_steps` Lightning would run an empty epoch, count it, and step the schedules once more.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if len({epochs.ready, epochs.started, epochs.processed, epochs.completed}) == 1:
        as_if_never_restored(trainer)


def as_if_never_restored(trainer: L.Trainer) -> None:
    """Discards Lightning's own ways of finding its position, with the iterators that it made for them.

    Those iterators would draw from the generators as they were before they were restored.
    """
    epoch = trainer.fit_loop.epoch_loop
    epoch.restarting = False  # the validation's too
    epoch.on_iteration_done()
    trainer.fit_loop.on_iteration_done()  # its setter would make `restarting` True


def watch_boundaries(trainer: L.Trainer, exact: Any, fit_callback: Any) -> Callable[[], None]:
    """Calls an `ExactResume` and the callback of a fit where hooks come too early or late, on all ranks alike.

    Returns what ends it.
    """
    fit: Any = trainer.fit_loop
    epoch: Any = trainer.fit_loop.epoch_loop
    start, begin, end, setup = fit.on_advance_start, epoch.on_run_start, epoch.on_advance_end, fit.setup_data
    run_fit = fit.run

    validation: Any = epoch.val_loop
    ask = validation.setup_data

    def run() -> None:
        """Loaders that `estimated_stepping_batches` made before anything was restored begin with a first batch."""
        if exact.goes_on or fit.restarting:
            fit._combined_loader = None
        run_fit()

    def setup_validation() -> None:
        if is_trial() or (validation._combined_loader is not None and not validation._should_reload_val_dl):
            ask()
            return
        asking = exact.requesting_validation(trainer)
        if asking is not None:
            with asking:
                ask()

    def setup_data() -> None:
        known = fit._combined_loader
        if known is None or fit._should_reload_train_dl:
            with exact.requesting_training(trainer, rebuilt=known is not None) as position:
                # `trainer.training` does not tell: Lightning's batch-size finder asks for a validation's in it.
                exact.for_training = True
                try:
                    setup()
                finally:
                    exact.for_training = False
            if position is not None:
                fit._last_train_dl_reload_epoch = position[0]
            if fit._combined_loader is not known:
                fit_callback.loaders_made(trainer)

    def is_trial() -> bool:
        """Lightning's finders (learning rate, batch size) train without callbacks, and take all of it back."""
        return fit_callback not in vars(trainer)["callbacks"]

    def on_advance_start() -> None:
        if not is_trial():
            fit_callback.before_epoch(trainer)
        start()

    def on_run_start(data_fetcher: Any) -> None:
        begin(data_fetcher)
        due = exact.going_on(trainer) if epoch.restarting else None
        if due is not None:
            as_if_never_restored(trainer)  # everything is as it was at the boundary, its plateau schedules too
        if due:
            finish(data_fetcher)
        if fit_callback.is_over(has_none_left(data_fetcher)):
            end_epoch_here(trainer)

    def on_advance_end(data_fetcher: Any) -> None:
        if is_trial():
            end(data_fetcher)
            return
        fit_callback.after_batch(trainer, bool(epoch._should_check_val_fx(data_fetcher)))
        finish(data_fetcher)

    def finish(data_fetcher: Any) -> None:
        end(data_fetcher)
        fit_callback.after_validation(trainer)

    fit.run = run
    fit.on_advance_start = on_advance_start
    fit.setup_data = setup_data
    validation.setup_data = setup_validation
    epoch.on_run_start = on_run_start
    epoch.on_advance_end = on_advance_end

    def undo() -> None:
        for loop, names in (
            (fit, ("run", "on_advance_start", "setup_data")),
            (epoch, ("on_run_start", "on_advance_end")),
            (validation, ("setup_data",)),
        ):
            for name in names:
                vars(loop).pop(name, None)

    return undo


@contextmanager
def as_at(trainer: L.Trainer, position: tuple[int, int] | None) -> Iterator[None]:
    """Inside it `trainer.current_epoch` and `trainer.global_step` are those of `position`, if given."""
    if position is None:
        yield
        return
    loop: Any = trainer.fit_loop
    by_hand, automatic = loop.epoch_loop.manual_optimization, loop.epoch_loop.automatic_optimization
    epochs = loop.epoch_progress.current
    steps = by_hand.optim_step_progress.total, automatic.optim_progress.optimizer.step.total
    now = epochs.completed, [one.completed for one in steps]
    epochs.completed = position[0]
    for one in steps:
        one.completed = position[1]
    try:
        yield
    finally:
        epochs.completed = now[0]
        for one, completed in zip(steps, now[1], strict=True):
            one.completed = completed


def training_position(trainer: L.Trainer) -> tuple[int, int]:
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


def set_validation_requested(trainer: L.Trainer, epoch: int) -> None:
    """Has the validation's loaders be those of an epoch: Lightning may ask for others some epochs later."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop._last_val_dl_reload_epoch = epoch


def why_over(trainer: L.Trainer) -> str | None:
    """What has ended a training, in a few words; None: nothing that is known."""
    loop: Any = trainer.fit_loop
    if trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps:
        return f"max_steps {trainer.max_steps}"
    if trainer.max_epochs not in (None, -1) and loop.epoch_progress.current.processed >= trainer.max_epochs:
        return f"max_epochs {trainer.max_epochs}"
    if trainer.should_stop:
        early = (c for c in trainer.early_stopping_callbacks if c.stopping_reason_message)
        reason = next((c.stopping_reason_message for c in early), None)
        timers = [c.time_remaining() for c in vars(trainer)["callbacks"] if isinstance(c, Timer)]
        late = any(left is not None and left <= 0 for left in timers)
        return reason or ("max_time" if late else "trainer.should_stop")
    return "limit_train_batches 0" if vars(trainer)["limit_train_batches"] == 0 else None


def count_steps(trainer: L.Trainer, first: Callable[[], None]) -> Callable[[], None]:
    """Has `trainer.global_step` count each step of a module that optimizes by hand; returns what ends it.

    Lightning counts those of its own wrappers inside `training_step`, and no others: not those of
    `optimizers(use_pl_optimizer=False)`, of an optimizer of the module's own, nor any in a hook. `first` is called
    before the first of them. An optimizer that has none of the module's parameters does not count, as one of an inner
    loop.
    """
    progress: Any = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    owned: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
    running: list[Optimizer] = []  # one that wraps another steps it
    announced = False

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in running:  # its last step has raised
            del running[running.index(optimizer) :]
        running.append(optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        nonlocal announced
        if optimizer in running:
            del running[running.index(optimizer) :]
        module = trainer.lightning_module
        inside = progress.total.ready > progress.total.completed  # Lightning's own is about to count it
        if running or inside or not trainer.training or module.automatic_optimization:
            return
        if optimizer not in owned:
            its = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            owned[optimizer] = any(id(parameter) in its for parameter in module.parameters())
        if not owned[optimizer]:
            return
        if not announced:
            announced = True
            first()
        progress.increment_ready()
        progress.increment_completed()

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
