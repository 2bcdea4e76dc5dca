"""Optimizer steps that Lightning does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as L
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


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
    told = False

    def before(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in running:  # its last step has raised
            del running[running.index(optimizer) :]
        running.append(optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        nonlocal told
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
        if not told:
            told = True
            first()
        progress.increment_ready()
        progress.increment_completed()

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
