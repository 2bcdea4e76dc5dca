"""Which intervals are longer than the training, so that what they are for never happens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

import lightning.pytorch as L

from fairlead.findings import Finding

_INTERVAL: Final = re.compile(r"_?(every_n_(?:train_)?(steps|epochs|batches))")


def endless(limit: int | None) -> float:
    """A limit of Lightning's as a number: -1 and None are none."""
    return math.inf if limit is None or limit < 0 else limit


def never_due(trainer: L.Trainer) -> Iterator[Finding]:
    """The intervals of callbacks, validations and schedules that this training is too short for.

    A callback's interval is an attribute called `every_n_steps`, `every_n_epochs` or the like.
    """
    batches = trainer.num_training_batches
    steps_of_epoch = math.inf if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)
    if not trainer.lightning_module.automatic_optimization:
        steps_of_epoch = math.inf  # the loop's own to decide
    steps = min(endless(trainer.max_steps), endless(trainer.max_epochs) * max(1, steps_of_epoch))
    epochs = min(endless(trainer.max_epochs), _epochs(steps, steps_of_epoch))
    lasts = {"steps": steps, "epochs": epochs, "batches": epochs * batches}
    for owner, name, unit, interval in _intervals(trainer):
        if interval > lasts[unit]:
            yield Finding(
                "warning",
                "interval-never-comes",
                f"{owner}({name}={interval}) never comes",
                where=owner,
                why=f"the training lasts {lasts[unit]:.0f} {unit}",
                fix=f"set {name} to {lasts[unit]:.0f} or less, or train for longer",
            )


def _epochs(steps: float, steps_of_epoch: float) -> float:
    return math.inf if math.isinf(steps) else math.ceil(steps / steps_of_epoch)


def _intervals(trainer: L.Trainer) -> Iterator[tuple[str, str, str, int]]:
    """Each interval: whose, its name, its unit, and its length."""
    for callback in vars(trainer)["callbacks"]:
        if type(callback).__module__.startswith("fairlead"):
            continue
        for name, value in vars(callback).items():
            found = _INTERVAL.fullmatch(name)
            if found is not None and isinstance(value, int) and value > 0:
                yield type(callback).__name__, found[1], found[2], value
    every, validates = trainer.check_val_every_n_epoch, trainer.enable_validation
    if validates and isinstance(every, int):
        yield "the validation", "check_val_every_n_epoch", "epochs", every
    elif validates and isinstance(trainer.val_check_batch, int):
        yield "the validation", "val_check_interval", "batches", trainer.val_check_batch
    for schedule in trainer.lr_scheduler_configs:
        unit = {"epoch": "epochs", "step": "steps"}.get(schedule.interval)
        if unit is not None:
            yield type(schedule.scheduler).__name__, "frequency", unit, int(schedule.frequency)
