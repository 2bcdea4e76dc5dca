"""The workers of a loader outlive the signals that ask a run to stop: a scheduler signals them too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader


def protect_workers(loader: object, outlive: Any) -> None:
    """Has each worker of a DataLoader outlive the signals; without it the run would die with them.

    `outlive` is what a guard has as `in_worker`.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    init: Any = loader.worker_init_fn
    ours = isinstance(init, partial) and init.func is _in_worker  # of an earlier start
    loader.worker_init_fn = partial(_in_worker, outlive, init.args[1] if ours else init)
    # Not by the loader itself: persistent workers in a cycle end only when garbage is collected, seconds later each.
    vars(loader)["_get_iterator"] = partial(_start_workers, ref(loader), outlive)


def _start_workers(of: ref[DataLoader[Any]], outlive: Any) -> Any:
    """In place of a loader's `_get_iterator`: there is no public place around the start of its workers."""
    loader = of()
    assert loader is not None
    with outlive.held():
        return type(loader)._get_iterator(loader)


def _in_worker(outlive: Any, users: Callable[[int], None] | None, worker: int) -> None:
    outlive(worker)
    if users is not None:
        users(worker)
