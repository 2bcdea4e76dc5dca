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
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric

__all__ = [
    "Logged",
    "before_loader_results",
    "hold_logged",
    "hold_metrics",
    "logged_for_epoch",
    "logged_state",
    "restore_logged",
    "set_logged",
]


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
