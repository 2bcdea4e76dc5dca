"""Every use of a private part of Lightning, each with a contract test that fails when Lightning changes it.

Lightning offers no public way to do these things; nothing else in Fairlead touches its private names.
"""

from __future__ import annotations

import builtins
import multiprocessing
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch.utils.data import DataLoader
from torchmetrics import Metric

__all__ = [
    "Boundaries",
    "Logged",
    "before_loader_results",
    "begin_next_epoch",
    "between_epochs",
    "draw_anew",
    "dump_checkpoint",
    "evaluation_loaders",
    "hold_logged",
    "hold_metrics",
    "inside_epoch",
    "is_spawned",
    "let_children_end",
    "logged_for_epoch",
    "logged_state",
    "only_its_own_batch_hooks",
    "prepare_loaders_with",
    "restore_logged",
    "resume_from",
    "set_batches_done",
    "set_logged",
    "set_root_dir",
    "signal_children",
    "train_loaders",
    "training_place",
    "validates_by_clock",
    "wants_sharding",
    "watch_boundaries",
    "without_sanity_check",
    "without_signal_handlers",
]

_Callback = TypeVar("_Callback", bound=L.Callback)


def only_its_own_batch_hooks(callback: type[_Callback]) -> type[_Callback]:
    """A class decorator: the hooks of every batch that the callback does not define are not there at all.

    Lightning opens a profiler's block for each hook of each callback, also for the empty ones of the base class: some
    microseconds each, and there are six a step.  It passes over what cannot be called.
    """
    for name in vars(L.Callback):
        of_each = name.endswith(("_batch_start", "_batch_end")) or name.startswith(("on_before_", "on_after_backward"))
        if of_each and getattr(callback, name) is getattr(L.Callback, name):
            setattr(callback, name, None)
    return callback


def set_root_dir(trainer: L.Trainer, path: Path) -> None:
    """Moves `trainer.default_root_dir`, which has no setter: the run directory is known only when fit begins."""
    private: Any = trainer
    private._default_root_dir = str(path)


def resume_from(trainer: L.Trainer, path: Path) -> None:
    """Makes the fit that is under way restore from a checkpoint, called from a callback's `setup`.

    Lightning passes `ckpt_path` down before any hook runs, and reads it after `setup`, once, in
    `resume_start`; there it is replaced.
    """
    connector: Any = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        connector.resume_start = original
        original(str(path), weights_only=weights_only)

    connector.resume_start = resume_start


def dump_checkpoint(trainer: L.Trainer, weights_only: bool | None) -> dict[str, Any]:
    """What `trainer.save_checkpoint` would hand to the strategy; on all ranks together, since strategies talk in it."""
    connector: Any = trainer._checkpoint_connector
    dumped: dict[str, Any] = connector.dump_checkpoint(weights_only)
    return dumped


def between_epochs(checkpoint: dict[str, Any]) -> None:
    """Makes the epoch in a checkpoint one that is over, and the next one has not begun."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for progress in (epochs["total"], epochs["current"]):
        progress |= dict.fromkeys(progress, progress["completed"])


def inside_epoch(checkpoint: dict[str, Any]) -> None:
    """Makes the epoch in a checkpoint one that has begun: Lightning counts one that a limit cut short as done."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for progress in (epochs["total"], epochs["current"]):
        progress["processed"] = progress["completed"] = progress["ready"] - 1


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Called from `on_train_start` of a fit that was restored from between two epochs: begins the next one.

    With `max_steps` Lightning takes the epoch that is over for one to be finished: it runs an empty
    epoch, counts it, and steps the schedules once more.
    """
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    if len({epochs.ready, epochs.started, epochs.processed, epochs.completed}) == 1:
        loop._restarting = False  # the setter of `restarting` would make it True again
        loop.epoch_loop.restarting = False
        loop.epoch_loop.reset_restart_stage()


def draw_anew(trainer: L.Trainer) -> None:
    """Called before the first epoch of a fit that goes on between two: iterators are made behind its hooks, as always.

    Lightning would use those that it has made before the generators were restored.
    """
    loop: Any = trainer.fit_loop
    loop._resuming_from_checkpoint = False


def without_signal_handlers(trainer: L.Trainer) -> Callable[[], None]:
    """Keeps Lightning from handling signals: its SIGTERM handler starts a collective wherever the rank is.

    Its broadcast before every batch, by which rank 0 tells the others, goes with it, and so does what it does for SLURM
    by itself.

    Returns:
        Ends it.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop

    def register_signal_handlers() -> None:
        connector.received_sigterm = False

    connector.register_signal_handlers = register_signal_handlers
    loop._broadcast_sigterm_tensor = _nothing

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
    spawns = isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)
    return spawns and multiprocessing.parent_process() is not None


def signal_children(trainer: L.Trainer, name: str) -> None:
    """Sends a signal to the ranks that this process has spawned."""
    launcher: Any = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(signal.Signals[name])


def _nothing() -> None:
    pass


# -- the places of a fit where everything is done that belongs to what came before


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
            # Everything is as it was at the boundary: Lightning's own ways of finding its place must not run.
            fit._restarting = False  # it would leave out the plateau schedules at the end of this epoch
            epoch.restarting = False
            epoch.reset_restart_stage()
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


def without_sanity_check(trainer: L.Trainer) -> Callable[[], None]:
    """Leaves out the sanity check; where a fit goes on between two epochs, Lightning does it again.

    Returns:
        Ends it.
    """
    private: Any = trainer
    private._run_sanity_check = _nothing

    def undo() -> None:
        vars(trainer).pop("_run_sanity_check", None)

    return undo


def training_place(trainer: L.Trainer) -> tuple[int, int]:
    """(epochs that are over, batches of this rank in the one that has begun)."""
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    batches: int = loop.epoch_loop.batch_progress.current.ready
    return epochs.processed, batches if epochs.ready > epochs.processed else 0


def validates_by_clock(trainer: L.Trainer) -> bool:
    """Whether validations begin when a time has passed, and not after a number of batches."""
    private: Any = trainer
    return private._val_check_time_interval is not None


def set_batches_done(trainer: L.Trainer, batches: int) -> None:
    """Sets how many batches of the epoch are done, for another number of ranks than those that did them."""
    loop: Any = trainer.fit_loop.epoch_loop
    current = loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = batches


# -- loaders


def prepare_loaders_with(
    trainer: L.Trainer, prepare: Callable[[object, bool, str, Callable[[], object]], object]
) -> Callable[[], None]:
    """Has `prepare(loader, shuffle, stage, lightnings)` make each loader ready; `lightnings()` is Lightning's way.

    `stage` is `train`, `validate`, `sanity_check`, `test` or `predict`.

    Returns:
        Ends it.
    """
    connector: Any = trainer._data_connector
    original = connector._prepare_dataloader

    def prepare_dataloader(dataloader: object, shuffle: bool, mode: Any) -> object:
        return prepare(dataloader, shuffle, mode.value, lambda: original(dataloader, shuffle=shuffle, mode=mode))

    connector._prepare_dataloader = prepare_dataloader

    def undo() -> None:
        vars(connector).pop("_prepare_dataloader", None)

    return undo


def wants_sharding(trainer: L.Trainer, loader: DataLoader[Any]) -> bool:
    """Whether each rank is to get its own part of a loader that does not see to it itself."""
    private: Any = trainer._data_connector
    return bool(private._requires_distributed_sampler(loader))


def train_loaders(trainer: L.Trainer) -> list[Any]:
    """The loaders that the fit draws from, as they were made ready; empty before that."""
    loop: Any = trainer.fit_loop
    return list(loop._combined_loader.flattened) if loop._combined_loader is not None else []


# -- what was logged: Lightning saves none of it


def logged_state(trainer: L.Trainer) -> dict[str, Any]:
    """The running means of the epoch and the last metrics, as plain data and tensors."""
    connector: Any = trainer._logger_connector
    results: Any = trainer.fit_loop.epoch_loop._results
    return {
        "first_batch": connector._first_loop_iter,
        "hook": connector._current_fx,
        "callback_metrics": dict(connector._callback_metrics),
        "logged_metrics": dict(connector._logged_metrics),
        "progress_bar_metrics": dict(connector._progress_bar_metrics),
        # A process group cannot be written down; what is reduced over one begins anew.
        "results": {key: _result_state(one) for key, one in results.items() if one.meta.sync.group is None},
        # The steps under which a validation logs its batches.
        "validated": dict(_validation(trainer)._seen_batches_per_dataloader),
    }


def restore_logged(trainer: L.Trainer, state: Mapping[str, Any]) -> None:
    """Puts back what `logged_state` gave."""
    connector: Any = trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = state["first_batch"], state["hook"]
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        setattr(connector, f"_{name}", _on_device(trainer, dict(state[name])))
    results: Any = trainer.fit_loop.epoch_loop._results
    for key, one in state["results"].items():
        results[key] = _result(trainer, _on_device(trainer, one))
    _count_validated_on(trainer, state["validated"])


def _validation(trainer: L.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.val_loop


def _count_validated_on(trainer: L.Trainer, counts: Mapping[int, int]) -> None:
    """The loop forgets its counts when it asks for its loaders; after a restart that is in the first validation."""
    loop = _validation(trainer)
    loop._seen_batches_per_dataloader.update(counts)
    if loop._combined_loader is not None:
        return

    def setup_data() -> None:
        del loop.setup_data
        kept = dict(loop._seen_batches_per_dataloader)
        loop.setup_data()
        # With loaders that are asked for again they would have begun anew without a restart, too.
        if not vars(trainer)["reload_dataloaders_every_n_epochs"]:
            loop._seen_batches_per_dataloader.update(kept)

    loop.setup_data = setup_data


_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_META_TOO = ("dataloader_idx", "metric_attribute")
_VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")


def _result_state(result: Any) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    # The state of a logged Metric is that of the module's attribute.
    names = [name for name in (_VALUES if result.is_tensor else _VALUES[2:]) if name in vars(result)]
    return {
        "meta": {name: getattr(meta, name) for name in (*_META, *_META_TOO)},
        "reduce_fx": (meta.reduce_fx.__module__ == "builtins", meta.reduce_fx.__name__),
        "sync": {"_should": sync.should, "_op": sync.op, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "values": {name: vars(result)[name] for name in names},
    }


def _result(trainer: L.Trainer, state: Mapping[str, Any]) -> _ResultMetric:
    builtin, name = state["reduce_fx"]
    meta = _Metadata(**state["meta"], reduce_fx=getattr(builtins if builtin else torch, name))
    meta.sync = _Sync(fn=trainer.strategy.reduce, **state["sync"])
    result = _ResultMetric(meta, state["is_tensor"])
    if not result.is_tensor:
        vars(result)["value"] = attrgetter(state["meta"]["metric_attribute"])(trainer.lightning_module)
    vars(result).update(state["values"])
    return result


def _on_device(trainer: L.Trainer, state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_device(trainer, value) for key, value in state.items()}
    return state.to(trainer.strategy.root_device) if isinstance(state, torch.Tensor) else state


# -- what ranks log, made one


@dataclass(frozen=True)
class Logged:
    """What one rank has logged under a key since the epoch began, as plain data.

    `value` is what was accumulated; for a mean, the sum of value times samples, and `weight` is the samples.
    """

    hook: str
    reduction: str
    value: float
    weight: float
    dtype: torch.dtype
    ranks: tuple[int, ...] | None
    result: Mapping[str, Any]


def logged_for_epoch(trainer: L.Trainer, done: Mapping[str, torch.Tensor]) -> dict[str, Logged]:
    """The numbers logged for the epoch (or the evaluation's loader) that is over, by key; not those logged on rank 0.

    Args:
        trainer: The trainer.
        done: What `set_logged` gave in this epoch; these are left out.
    """
    results: Any = trainer._results
    found = {}
    for key, one in results.valid_items():
        sync = one.meta.sync
        if not (one.is_tensor and one.meta.on_epoch):
            continue
        if sync.rank_zero_only:
            one.compute()  # where Lightning does it, it advises to sync what is not to be synced
            continue
        if key in done and one._computed is done[key]:
            continue
        found[key] = Logged(
            hook=one.meta.fx.partition(".")[0],
            reduction=one.meta.reduce_fx.__name__,
            value=one.value.item(),
            weight=float(one.cumulated_batch_size) if one.meta.is_mean_reduction else 1.0,
            dtype=one.value.dtype,
            ranks=tuple(dist.get_process_group_ranks(sync.group)) if sync.should and sync.group is not None else None,
            result={**_result_state(one), "values": {}},
        )
    return found


def set_logged(trainer: L.Trainer, key: str, logged: Logged, value: float) -> torch.Tensor:
    """Makes `value` what was logged under the key in this epoch, also where this rank has logged nothing there."""
    results: Any = trainer._results
    if key not in results:
        results[key] = _result(trainer, logged.result).to(trainer.strategy.root_device)
    one = results[key]
    one._computed = torch.tensor(value, dtype=logged.dtype, device=one.value.device)
    one.has_reset = False
    return one._computed  # type: ignore[no-any-return]


def hold_logged(trainer: L.Trainer) -> Callable[[], None]:
    """What is logged from here on does not count in the values of the epoch.

    Everything else about it stays as it was; a value that a step reduces over the ranks needs all of them.

    Returns:
        Ends it.
    """
    results: Any = trainer._results
    update = results.update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        values = vars(results[key])
        held = {name: values[name] for name in ("value", "cumulated_batch_size") if name in values}
        update(key, value, batch_size)
        if results[key].is_tensor:
            values.update(held)

    results.update_metrics = update_metrics
    return lambda: vars(results).pop("update_metrics", None)


def hold_metrics(module: torch.nn.Module) -> Callable[[], None]:
    """Remembers the states of all torchmetrics in a module.

    Returns:
        Puts them back.  What was added to a list meanwhile stays in it, empty: torchmetrics gathers such lists element
        by element or as they are shaped, and all ranks must have as many.  A single number in a list cannot be empty.
    """
    held = [
        (one, {name: _copied(state) for name, state in one.metric_state.items()}, one._update_count)
        for one in module.modules()
        if isinstance(one, Metric)
    ]

    def put_back() -> None:
        for one, states, count in held:
            for name, before in states.items():
                setattr(one, name, _with_empty(before, getattr(one, name)))
            one._update_count, one._computed = count, None

    return put_back


def _copied(state: Any) -> Any:
    return state.detach().clone() if isinstance(state, torch.Tensor) else list(state)


def _with_empty(before: Any, now: Any) -> Any:
    if isinstance(before, torch.Tensor) or not isinstance(now, list):
        return before
    return [
        *before,
        *(one if isinstance(one, torch.Tensor) and one.ndim == 0 else one[:0] for one in now[len(before) :]),
    ]


def evaluation_loaders(trainer: L.Trainer) -> list[Any]:
    """The loaders that the evaluation goes through one after the other; empty where its steps take several at once.

    Also where they draw batches by themselves (`dataloader_iter`): the number of a batch is not known before.
    """
    loop: Any = trainer._active_loop
    if loop._combined_loader._mode != "sequential" or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        return []
    return list(loop._combined_loader.flattened)


def before_loader_results(trainer: L.Trainer, call: Callable[[int], None]) -> Callable[[], None]:
    """Calls `call(number of the loader)` where an evaluation is through with a loader and computes what was logged.

    Returns:
        Ends it.
    """
    loops: list[Any] = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]

    def preceded(loop: Any) -> Callable[[], None]:
        def store_dataloader_outputs() -> None:
            call(loop._results.dataloader_idx or 0)
            type(loop)._store_dataloader_outputs(loop)

        return store_dataloader_outputs

    for loop in loops:
        loop._store_dataloader_outputs = preceded(loop)

    def undo() -> None:
        for loop in loops:
            vars(loop).pop("_store_dataloader_outputs", None)

    return undo
