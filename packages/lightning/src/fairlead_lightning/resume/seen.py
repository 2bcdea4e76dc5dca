"""What a start has seen that keeps a resume from being exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fairlead.config import TrainerConfig
from fairlead.config.marks import NotExact, marked
from fairlead.findings import Inexact
from fairlead_distributed.run.exactness import kernel_reasons, unseeded
from fairlead_lightning import compat
from fairlead_runs.logger_positions import Positioned


def state_reasons(trainer: L.Trainer) -> list[Inexact]:
    """What of the model, its hooks and the callbacks keeps a state that no checkpoint has."""
    reasons = []
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        reasons.append(
            Inexact(
                "training_step(self, dataloader_iter)",
                why="the step takes its batches itself, and they are not counted",
                fix="take batch and batch_idx",
            )
        )
    if any(map(compat.resets_weights, vars(trainer)["callbacks"])):
        reasons.append(
            Inexact(
                "ModelPruning(use_lottery_ticket_hypothesis=True)",
                why="the weights that it goes back to are in no checkpoint",
                fix="use_lottery_ticket_hypothesis=False",
            )
        )
    return reasons


def script_reasons(trainer: L.Trainer, *, seeded: bool, in_order: bool) -> Iterator[Inexact]:
    """What a script's own Trainer has decided: nothing but the object says it."""
    if not seeded:
        yield unseeded("lightning.pytorch.seed_everything(1, workers=True)")
    device = trainer.strategy.root_device.type
    if device == "cuda":
        yield from kernel_reasons(lambda name, value: f"Trainer({name}={value!r})")
    elif device != "cpu":
        yield Inexact(
            f"the device {device}",
            why="no test has shown that it computes the same bits twice",
            fix="a CPU or CUDA",
            certain=False,
        )
    strategy = trainer.strategy
    if not in_order:
        yield Inexact(
            f"DistributedDataParallel with {trainer.world_size} ranks",
            why="a resumed run adds the gradients of its first step in another order",
            fix="DDPStrategy(find_unused_parameters=True), or fairlead.Trainer with exact_reduction: on",
        )
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        yield Inexact(
            f"the strategy {type(strategy).__name__}",
            why="it was not tried in a script",
            fix="fairlead.Trainer",
            certain=False,
        )
    settings: Any = trainer  # Lightning sets these without a declaration
    # Lightning keeps no duration as `val_check_interval`, and makes a Timer of `max_time`.
    by_the_clock = not isinstance(getattr(trainer, "val_check_interval", None), (int, float))
    found = {
        "val_check_interval": by_the_clock,
        "max_time": any(isinstance(callback, Timer) for callback in settings.callbacks),
        "overfit_batches": settings.overfit_batches,
    }
    marks = marked(TrainerConfig, NotExact)
    for mark, name in ((marks[name], name) for name, is_so in found.items() if is_so):
        yield Inexact(f"Trainer({name}=...)", why=mark.why, fix=mark.fix, certain=mark.certain)


def uncut_loggers(loggers: Sequence[Logger]) -> list[str]:
    """Loggers that hold a step twice when it is done again: nothing can cut them back."""
    return sorted({type(logger).__name__ for logger in loggers if not isinstance(logger, Positioned)})
