"""A job's model and data as objects, for the commands and for what a checkpoint carries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L

from fairlead.config import ClassSpec, JobConfig
from fairlead.errors import UserCodeError
from fairlead.resolution import Resolution
from fairlead.user_code import CodeRoot, activate, instantiate
from fairlead_distributed.run.loading import load_weights
from fairlead_lightning import compat
from fairlead_runs.batch_size import for_each_rank
from fairlead_runs.checkpoint_job import refuse_stand_ins


@dataclass
class Rebuilt:
    """What a checkpoint carries, rebuilt; the model has weights only where they came from an exported folder."""

    model: L.LightningModule
    data: L.LightningDataModule | None
    checkpoint: Path | None
    loads: bool = True
    """Whether an evaluation is to load weights: those of an exported folder are there already."""


def rebuild(
    job: JobConfig, resolution: Resolution, root: CodeRoot, *, checkpoint: Path | None, weights: Path | None
) -> Rebuilt:
    """Builds a job's model and data, and loads a file of safetensors into the model where `weights` names one."""
    activate(root)
    refuse_stand_ins(
        job, fix="build the objects as your script does, and name the checkpoint: trainer.fit(model, ckpt_path=...)"
    )
    job = for_each_rank(job, resolution)
    model = cast("L.LightningModule", build_user_object(job.model, root, "model", L.LightningModule))
    data = build_user_object(job.data, root, "data", L.LightningDataModule) if job.data is not None else None
    if weights is not None:
        load_weights(model, weights)
    return Rebuilt(model, data, checkpoint, loads=weights is None)


def build_user_object(spec: ClassSpec, root: CodeRoot, where: str, expected: type) -> Any:
    """The user's object; a `UserCodeError` where it is not of the class that Lightning needs."""
    thing = compat.uncompiled(instantiate({"class": spec.class_, "args": spec.args}, root, path=(where,)))
    if not isinstance(thing, expected):
        raise UserCodeError(
            f"{spec.class_} made a {type(thing).__name__}, not a lightning.pytorch.{expected.__name__}",
            where=where,
            fix="derive it from that class (from lightning.pytorch, not from pytorch_lightning)",
        )
    return thing
