"""What was logged: Lightning saves none of it, and adds it up over ranks in its own way."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torchmetrics import Metric

_LAST = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def logged_state(trainer: L.Trainer) -> dict[str, Any]:
    """The running means of the epoch and the last metrics, as plain data and tensors."""
    epoch: Any = trainer.fit_loop.epoch_loop
    return {
        **{name: dict(getattr(trainer, name)) for name in _LAST},
        # A process group cannot be written down; what is reduced over one begins anew.
        "results": {key: _result_state(one) for key, one in epoch._results.items() if one.meta.sync.group is None},
        # The steps under which a validation logs its batches.
        "validated": dict(epoch.val_loop._seen_batches_per_dataloader),
    }


def restore_logged(trainer: L.Trainer, state: Mapping[str, Any], batches: int) -> None:
    """Puts back what `logged_state` gave, where so many batches of an epoch are done."""
    results: Any = trainer.fit_loop.epoch_loop._results
    for name in _LAST:
        last = getattr(trainer, name)
        last.clear()
        last.update(_on_device(trainer, state[name]))
    for key, one in state["results"].items():
        _put_back(trainer, results, key, _on_device(trainer, one))
    connector: Any = trainer._logger_connector
    for _ in range(min(batches, 2)):  # an epoch's first batch is where Lightning forgets what was logged before
        connector.on_batch_start(None)
    _count_validated_on(trainer, state["validated"])


def _count_validated_on(trainer: L.Trainer, counts: Mapping[int, int]) -> None:
    """The loop forgets its counts when it asks for its loaders; after a restart that is in the first validation."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    loop._seen_batches_per_dataloader.update(counts)
    if trainer.val_dataloaders is not None:
        return

    ask = loop.setup_data

    def setup_data() -> None:
        loop.setup_data = ask
        seen = dict(loop._seen_batches_per_dataloader)
        ask()
        # Loaders that are requested anew would have reset them without a restart, too.
        if not vars(trainer)["reload_dataloaders_every_n_epochs"]:
            loop._seen_batches_per_dataloader.update(seen)

    loop.setup_data = setup_data


_ARGUMENTS = (
    "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute"
)  # fmt: skip

_ACCUMULATED = ("value", "cumulated_batch_size")

_KEPT = ("_forward_cache", "_computed", "has_reset")


def _result_state(result: Any) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    # The state of a logged Metric is that of the module's attribute.
    names = [name for name in (*_ACCUMULATED * result.is_tensor, *_KEPT) if name in vars(result)]
    return {
        "hook": meta.fx.partition(".")[0],
        "loader": meta.dataloader_idx,
        "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
        "reduce_fx": (meta.reduce_fx.__module__ == "builtins", meta.reduce_fx.__name__),
        "sync_dist": sync.should,
        "rank_zero_only": sync.rank_zero_only,
        "values": {name: vars(result)[name] for name in names},
    }


def _put_back(trainer: L.Trainer, results: Any, key: str, state: Mapping[str, Any]) -> Any:
    """Has Lightning make a result by logging something under its name, and gives it the values of the state."""
    builtin, reduction = state["reduce_fx"]
    attribute = state["arguments"]["metric_attribute"]
    at, results.dataloader_idx = results.dataloader_idx, state["loader"]
    results.log(
        state["hook"],
        value=attrgetter(attribute)(trainer.lightning_module) if attribute else torch.zeros(()),
        reduce_fx=getattr(builtins if builtin else torch, reduction),
        sync_dist_fn=trainer.strategy.reduce,
        rank_zero_only=state["rank_zero_only"],
        batch_size=1,
        **state["arguments"],
    )
    results.dataloader_idx = at
    result = results[key].to(trainer.strategy.root_device)
    result.meta.sync.should = state["sync_dist"]  # not before: logging would have been a collective
    vars(result).update(state["values"])
    return result


def _on_device(trainer: L.Trainer, state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_device(trainer, value) for key, value in state.items()}
    return state.to(trainer.strategy.root_device) if isinstance(state, torch.Tensor) else state


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
    """The numbers logged for the epoch (or an evaluation's loader), but for rank 0's own and those `done` already."""
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
        _put_back(trainer, results, key, logged.result).reset()
    one = results[key]
    one._computed = torch.tensor(value, dtype=logged.dtype, device=one.value.device)
    one.has_reset = False
    return one._computed  # type: ignore[no-any-return]


def hold_logged(trainer: L.Trainer) -> Callable[[], None]:
    """What is logged from here on does not count in the values of the epoch; returns what ends it.

    Everything else about it stays as it was; a value that a step reduces over the ranks needs all of them.
    """
    results: Any = trainer._results
    update = results.update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        values = vars(results[key])
        held = {name: values[name] for name in _ACCUMULATED if name in values}
        update(key, value, batch_size)
        if results[key].is_tensor:
            values.update(held)

    results.update_metrics = update_metrics
    return lambda: vars(results).pop("update_metrics", None)


def hold_metrics(module: torch.nn.Module) -> Callable[[], None]:
    """Remembers the states of all torchmetrics in a module; returns what puts them back.

    What was added to a list meanwhile stays in it, empty: torchmetrics gathers such lists element by element or as they
    are shaped, and all ranks must have as many.  A single number in a list cannot be empty.
    """
    held = [
        (one, {**vars(one), **{name: _copied(state) for name, state in one.metric_state.items()}})
        for one in module.modules()
        if isinstance(one, Metric)
    ]

    def put_back() -> None:
        for one, before in held:
            now = one.metric_state
            vars(one).update({**before, **{name: _with_empty(before[name], now[name]) for name in now}})

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


def before_epoch_results(trainer: L.Trainer, call: Callable[[int], None]) -> Callable[[], None]:
    """Calls `call(number of the loader)` behind each loader of an evaluation, and at its end; returns its undo."""
    connector: Any = trainer._logger_connector
    end = connector.epoch_end_reached

    def epoch_end_reached() -> None:
        results = trainer._results
        if results is not None and trainer.evaluating:
            call(results.dataloader_idx or 0)
        end()

    connector.epoch_end_reached = epoch_end_reached
    return lambda: vars(connector).pop("epoch_end_reached", None)
