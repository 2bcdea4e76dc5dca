"""A whole job: what to train, on which data, how, and where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat, PositiveInt

from fairlead.bases import ConfigModel
from fairlead.config.run import RunConfig
from fairlead.config.spec import ClassSpec
from fairlead.config.trainer import TrainerConfig
from fairlead.durations import Duration

if TYPE_CHECKING:
    from fairlead.plugins import PluginManager

__all__ = ["JobConfig", "ResourcesConfig", "SubmitConfig"]


class ResourcesConfig(ConfigModel):
    """The hardware the job is meant for: for `check --for`, planning and submission."""

    nodes: PositiveInt = 1
    """Nodes."""
    devices_per_node: PositiveInt = 1
    """Devices, and so ranks, on each node."""
    device: str | None = None
    """The kind of device: `cpu`, or a GPU such as `h100`, `a100`, `v100`, `mi250`."""
    memory_gib: PositiveFloat | None = None
    """Memory of one device, GiB."""
    cpus_per_device: PositiveInt | None = None
    """CPU cores for each rank."""
    host_memory_gib: PositiveFloat | None = None
    """Main memory of a node, GiB."""


class SubmitConfig(ConfigModel):
    """How the job is handed to a scheduler."""

    to: str | None = None
    """The scheduler: `slurm`, `lsf` or `kubeflow`."""
    time: Duration | None = None
    """The time limit: `"24:00:00"`."""
    account: str | None = None
    """The account that is charged."""
    partition: str | None = None
    """The partition or queue."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines before the job: `module load cuda`."""
    extra: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Further options of the scheduler: `{qos: high}`."""


class JobConfig(ConfigModel):
    """A whole job: what to train, on which data, how, and where.

    Example:
        >>> job = JobConfig(model={"class": "my.model:Net", "args": {"width": 8}})
        >>> job.model.class_
        'my.model:Net'
    """

    run: RunConfig = Field(default_factory=RunConfig)
    """Which run this is, and where its records are."""
    model: ClassSpec
    """The LightningModule: any callable that returns one."""
    data: ClassSpec | None = None
    """The LightningDataModule; None: the model brings its own loaders."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """How to train."""
    resources: ResourcesConfig | None = None
    """The hardware that the job is meant for."""
    submit: SubmitConfig | None = None
    """How the job is handed to a scheduler."""

    @classmethod
    def from_checkpoint(
        cls, path: str | os.PathLike[str], *, overrides: Sequence[str] = (), plugins: PluginManager | None = None
    ) -> JobConfig:
        """The job that made a checkpoint, as its run directory or exported folder holds it; needs no torch.

        Args:
            path: A run directory, a checkpoint in it, or a folder of `fairlead checkpoint export`.
            overrides: Changes, written as for `--set`: `trainer.max_steps=400`.
            plugins: The plugin manager; None: the plugins installed here.

        Returns:
            The job; `run.dir` and `run.name` are those of the run that the checkpoint is of.

        Raises:
            CheckpointError: There is no such checkpoint, or it carries no job, as a single `.ckpt` file.
            ConfigError: The job does not validate here, or had a secret that is not written down.

        Example:
            >>> job = JobConfig.from_checkpoint("runs/gpt/checkpoints/step-00000200")  # doctest: +SKIP
            >>> job.model.class_                                                       # doctest: +SKIP
            'examples.gpt.model:GPT'
        """
        from fairlead.plugins import default_plugins
        from fairlead_runs.carried import carried_job  # which needs this module

        plugins = plugins if plugins is not None else default_plugins()
        found = carried_job(Path(path), plugins=plugins, cwd=Path.cwd(), overrides=overrides).loaded.job
        assert found is not None
        return found
