"""The objects of a job, made anew for each training of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as L
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import Precision

from fairlead.config import JobConfig
from fairlead.interfaces import BuildContext
from fairlead.user_code import CodeRoot
from fairlead_distributed.threads import use_threads
from fairlead_lightning.build import trainer_arguments
from fairlead_lightning.checkpoint.rebuilt import build_user_object
from fairlead_lightning.module_reduce import lend_all_reduce


class JobBuild:
    """Builds from a job whose layout is one process; a Lightning Trainer without a run directory."""

    def __init__(self, job: JobConfig, root: CodeRoot, context: BuildContext) -> None:
        self._job = job
        self._root = root
        self._context = context
        self._data: L.LightningDataModule | None = None
        use_threads(context.resolution, context.environ)

    def model(self) -> L.LightningModule:
        """The job's model."""
        return cast("L.LightningModule", build_user_object(self._job.model, self._root, "model", L.LightningModule))

    def data(self) -> L.LightningDataModule | None:
        """The job's datamodule, set up once: reading the data again would change nothing."""
        if self._data is None and self._job.data is not None:
            made = build_user_object(self._job.data, self._root, "data", L.LightningDataModule)
            self._data = cast("L.LightningDataModule", made)
        elif self._data is not None:
            vars(self._data).update(prepare_data=_nothing, setup=_nothing)
        return self._data

    def trainer(self, precision: str, accumulate: int, steps: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
        """Lightning's own Trainer with the job's settings, on one device."""
        arguments: dict[str, Any] = trainer_arguments(self._context, self._root)
        # Nothing is saved, and the precision is this training's.
        arguments["plugins"] = [one for one in arguments["plugins"] if not isinstance(one, CheckpointIO | Precision)]
        arguments["callbacks"] = [_AllReduce(), *arguments["callbacks"], *callbacks]
        arguments |= {"precision": precision, "accumulate_grad_batches": accumulate, "max_steps": steps}
        arguments |= {"max_epochs": 1, "enable_checkpointing": False, "enable_progress_bar": False}
        return L.Trainer(**arguments)


class _AllReduce(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        lend_all_reduce(pl_module)


def _nothing(*_: Any, **__: Any) -> None:
    return None
