"""The workers of a DataLoader outlive a scheduler's signals: it signals them too, and the fit would die with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from fairlead_lightning.resume.stateful_loader import StatefulLoader


def protect_workers(loader: object, outlive: Any) -> None:
    """Has each worker call `outlive`, and then what the user asked for; nothing where there are no workers.

    Args:
        loader: The loader, as Lightning will draw from it.
        outlive: A `fairlead_hpc_signals.OutliveStops`.
    """
    inner = loader.loader if isinstance(loader, StatefulLoader) else loader
    if not isinstance(inner, DataLoader) or not inner.num_workers:
        return
    init = inner.worker_init_fn
    inner.worker_init_fn = _InWorker(outlive, init.users if isinstance(init, _InWorker) else init)  # of an earlier fit
    vars(inner)["_get_iterator"] = partial(_start_workers, inner, outlive)


def _start_workers(loader: DataLoader[Any], outlive: Any) -> Any:
    """In place of a loader's `_get_iterator`: there is no public place around the start of its workers."""
    with outlive.held():
        return type(loader)._get_iterator(loader)


class _InWorker:
    """What a loader calls in each worker."""

    def __init__(self, outlive: Any, users: Callable[[int], None] | None) -> None:
        self.outlive = outlive
        self.users = users

    def __call__(self, worker: int) -> None:
        self.outlive(worker)
        if self.users is not None:
            self.users(worker)
