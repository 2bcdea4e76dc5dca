"""Inside of the ranks of a proof: kills them, and notes what the user's code keeps in memory, and what decided."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from fairlead.errors import RunFailedError
from fairlead_distributed.run.memory import Owner, remembered
from fairlead_distributed.user_objects import is_engines
from fairlead_launch.prove.plan import END, RESTORED, note
from fairlead_lightning import compat
from fairlead_lightning.commands.prove_plan import DECIDED, EPOCHS, DecidingPlan, Epochs, finite
from fairlead_lightning.resume.users import internal
from fairlead_runs.commit import newest_complete


@compat.only_its_own_batch_hooks
class Probe(L.Callback):
    """Takes notes where the checkpoint is made and resumed from, and at the end; kills this rank in between."""

    def __init__(self, instructions: Mapping[str, Any], roots: tuple[Path, ...]) -> None:
        self._plan = DecidingPlan(**instructions["plan"])
        self._notes = Path(instructions["notes"])
        self._kill: bool = instructions["kill"]
        self._monitor: bool = instructions["monitor"]
        self._roots = roots
        self._noted = False
        self._validated: list[int] = []
        self._decided: dict[str, dict[str, str]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The callbacks, the schedules and the length of an epoch are known.

        Raises:
            RunFailedError: Something decides by a metric, and these steps do not reach that.
        """
        self._decided["begin"] = _decisions(trainer)
        if self._plan.decides and (self._decided["begin"] or self._monitor):
            epochs = _epochs(trainer)
            if not self._plan.reaches_decisions(epochs):
                if trainer.is_global_zero:
                    (self._notes / EPOCHS).write_text(epochs.to_json())
                raise RunFailedError("these steps do not reach the decisions of the callbacks")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes when, but for the check before the training."""
        if not trainer.sanity_checking:
            self._validated.append(trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """A batch is next: the last one is done, and saved where it was to be."""
        step = trainer.global_step
        if step == self._plan.checkpoint and not self._noted:
            self._noted = True
            self._note(trainer, RESTORED)
            self._decided["checkpoint"] = _decisions(trainer)
        if not self._kill or step < self._plan.kill:
            return
        session = getattr(trainer, "session", None)
        # A checkpoint that is written in the background may be on its way still: then it is the next step.
        newest = newest_complete(session.path / "checkpoints").checkpoint if session is not None else None
        if newest is not None and newest.step >= self._plan.checkpoint:
            (self._notes / f"killed-{trainer.global_rank:05d}").write_text(str(step))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps are done."""
        self._note(trainer, END)
        self._decided["end"] = _decisions(trainer)
        if trainer.is_global_zero:
            found = {
                "step": trainer.global_step,
                "validates": bool(trainer.enable_validation),
                "validated": self._validated,
                "decided": self._decided,
                "batches": finite(trainer.num_training_batches),
            }
            (self._notes / DECIDED).write_text(json.dumps(found))

    def _note(self, trainer: L.Trainer, when: str) -> None:
        found = remembered(owners_of_fit(trainer), self._roots)
        note(self._notes, when, trainer.global_rank).write_text(json.dumps(found, indent=0))


def owners_of_fit(trainer: L.Trainer) -> list[Owner]:
    """The user's model, callbacks and data module, with what they keep outside of parameters and buffers."""
    model = trainer.lightning_module
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    data: Any = getattr(trainer, "datamodule", None)
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    held: list[tuple[str, Any, str]] = [
        *((path, module, f"model {type(model).__name__}") for path, module in modules),
        *(("", callback, f"callback {type(callback).__name__}") for callback in callbacks),
        *([("", data, f"data {type(data).__name__}")] if data is not None else []),
    ]
    return [Owner(one, name, prefix, internal(one), shown=not is_engines(type(one))) for prefix, one, name in held]


def _decisions(trainer: L.Trainer) -> dict[str, str]:
    """Of each callback and schedule that decides by a metric, what changes when it decides."""
    found: dict[str, str] = {}
    for callback in vars(trainer)["callbacks"]:
        metric = getattr(callback, "monitor", None)
        if isinstance(metric, str) and metric:
            found[_unused(type(callback).__name__, found)] = repr(_decides_by(callback))
    for schedule in trainer.lr_scheduler_configs:
        if schedule.reduce_on_plateau:
            name = _unused(type(schedule.scheduler).__name__, found)
            found[name] = repr(schedule.scheduler.last_epoch)  # how often it was stepped
    return found


def _decides_by(callback: L.Callback) -> Any:
    if isinstance(callback, EarlyStopping):  # in memory: a subclass may save less
        return callback.best_score, callback.wait_count
    if isinstance(callback, ModelCheckpoint):  # its state also changes when it saves without its metric
        return callback.best_model_score, callback.best_k_models
    return callback.state_dict(), {k: v for k, v in vars(callback).items() if isinstance(v, (int, float, torch.Tensor))}


def _unused(name: str, names: Container[str]) -> str:
    return name if name not in names else next(new for n in itertools.count(2) if (new := f"{name} {n}") not in names)


def _epochs(trainer: L.Trainer) -> Epochs:
    every = trainer.val_check_batch
    automatic = trainer.lightning_module.automatic_optimization
    schedules = [one for one in trainer.lr_scheduler_configs if one.reduce_on_plateau and one.interval == "epoch"]
    return Epochs(
        batches=finite(trainer.num_training_batches),
        accumulate=trainer.accumulate_grad_batches if automatic else None,
        validates=bool(trainer.enable_validation),
        every_batches=0 if every is None else finite(every),
        every_epochs=trainer.check_val_every_n_epoch,
        by_epoch=bool(schedules) or not trainer.enable_validation,
    )
