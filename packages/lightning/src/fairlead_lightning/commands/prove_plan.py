"""The plan of a proof of a job, whose epochs may be cut so that what decides by a metric does so in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fairlead_launch.prove.plan import Plan

EPOCHS: Final = "epochs.json"
"""The note of a start that found its steps too few for the decisions of its callbacks."""
DECIDED: Final = "decided.json"
"""The note on validations, and on what decided by a metric."""
_DECIDING: Final = 8
"""The fewest steps with a decision, a checkpoint, a kill and a decision, one behind the other."""


@dataclass(frozen=True)
class Epochs:
    """When a fit validates and ends its epochs.

    Attributes:
        batches: Training batches of an epoch; None where the loader does not know.
        accumulate: Batches of an optimizer step; None where the model steps by itself.
        validates: Whether there is a validation.
        every_batches: Batches between two validations; None: at the end of an epoch; 0: by the clock.
        every_epochs: Epochs between two validations; None where `every_batches` counts over all epochs.
        by_epoch: Whether something decides at the end of epochs: a schedule, or all, where there is no validation.
    """

    batches: int | None
    accumulate: int | None
    validates: bool
    every_batches: int | None
    every_epochs: int | None
    by_epoch: bool

    def to_json(self) -> str:
        """For the note `EPOCHS`."""
        return json.dumps(asdict(self))

    def moments(self, kind: Literal["validation", "epoch"], steps: int) -> Iterator[int]:
        """The optimizer steps behind which there is a validation, or the end of an epoch."""
        if self.accumulate is None:
            return
        step = inside = total = epoch = 0
        while step < steps:
            inside, total = inside + 1, total + 1
            last = inside == self.batches
            step += inside % self.accumulate == 0 or last
            if last if kind == "epoch" else self._validates(inside, total, epoch):
                yield step
            if last:
                inside, epoch = 0, epoch + 1

    def _validates(self, inside: int, total: int, epoch: int) -> bool:
        if not self.validates or (self.every_epochs is not None and (epoch + 1) % self.every_epochs):
            return False
        every = self.batches if self.every_batches is None else self.every_batches
        return every is not None and every > 0 and (total if self.every_epochs is None else inside) % every == 0


@dataclass(frozen=True)
class DecidingPlan(Plan):
    """A plan of which the epochs are known to be long enough, or are cut.

    Attributes:
        decides: Whether a start that is too short for the decisions of its callbacks says so, and ends.
        epoch: Batches to which epochs are cut; None: as they are.
    """

    decides: bool = True
    epoch: int | None = None

    def deciding(self, epochs: Epochs) -> DecidingPlan:
        """Epochs are cut so that one ends just before the checkpoint, and the next behind the kill.

        Where the model steps its optimizers by itself, epochs have one batch: its steps cannot be counted in advance.
        """
        steps = max(_DECIDING, self.steps)
        checkpoint = steps // 2
        batches = (checkpoint - 1) * epochs.accumulate if epochs.accumulate is not None else 1
        epoch = min(batches, epochs.batches or batches)
        return DecidingPlan(steps, checkpoint, checkpoint + 1, decides=False, epoch=epoch)

    def reaches_decisions(self, epochs: Epochs) -> bool:
        """Whether what decides does so before the checkpoint and again behind the kill, and not in between."""
        kinds: list[Literal["validation", "epoch"]] = ["validation"] if epochs.validates else []
        for kind in [*kinds, "epoch"] if epochs.by_epoch else kinds:
            moments = list(epochs.moments(kind, self.steps))
            between = any(self.checkpoint <= one <= self.kill for one in moments)
            if not moments or between or not moments[0] < self.checkpoint or not moments[-1] > self.kill:
                return False
        return True

    def settings(self, trainer: Any) -> dict[str, Any]:
        """What is set for cut epochs, given the job's own `trainer`: each ends with a validation."""
        if self.epoch is None:
            return {}
        each = trainer.val_check_interval in (None, 1.0) and trainer.check_val_every_n_epoch == 1
        sets = {
            "trainer.limit_train_batches": self.epoch,
            # As Lightning's EarlyStopping decides elsewhere where a validation is not that of each epoch.
            "trainer.val_check_interval": 1.0 if each else self.epoch,
            "trainer.check_val_every_n_epoch": None if trainer.check_val_every_n_epoch is None else 1,
        }
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            sets["trainer.max_epochs"] = max(trainer.max_epochs, 100 * self.steps)
        return sets


def finite(number: float | None) -> int | None:
    """A count of Lightning's: what is not known is infinite there."""
    return int(number) if number is not None and math.isfinite(number) else None
