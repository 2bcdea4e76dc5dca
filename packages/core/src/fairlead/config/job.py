"""A job: what to train, on which data, how, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from fairlead.config.marks import NotExact
from fairlead.config.trainer import ClassSpec, TrainerConfig
from fairlead.config_bases import ConfigModel, SubmitterConfigBase
from fairlead.open_union import OpenUnion

EXTENDS: Final = "extends"
"""The key under which a job file names the files whose settings it replaces; it is no setting itself."""


class RunConfig(ConfigModel):
    """Which run this is, and where its records are."""

    name: str | None = Field(default=None, min_length=1)
    """A template such as `gpt-lr{model.args.lr}`; None: the stem of the job file."""
    dir: str = Field(default="runs", min_length=1)
    """The folder that holds the run directories, relative to the working directory."""
    seed: Annotated[
        int | None,
        NotExact(
            lambda seed: seed is None,
            why="each start draws other random numbers, for first weights without a checkpoint and splits of the data",
            fix="run.seed: 0, or any number",
        ),
    ] = Field(default=0, ge=0, lt=2**32)
    """Seeds Python, NumPy and torch on every rank; None leaves them unseeded, and no resume is exact."""
    resume: Annotated[
        str,
        NotExact(
            lambda resume: resume.endswith(".ckpt") and not resume.startswith("weights:"),
            why="a single file has no random state and no position in the data for each rank, unless Fairlead wrote it",
            fix="name a folder under checkpoints/, or resume: auto",
            certain=False,
        ),
    ] = "auto"
    """`auto`: the newest complete checkpoint of this run; `never`: a new sibling run; else the path of a checkpoint, or
    `weights:PATH`: a new run that begins with the weights of a checkpoint and nothing else of it."""
    accept: list[str] = Field(default_factory=list)
    """Settings that may have changed since the run began, as `[data.args.path]`; the start records the change and
    resumes."""
    wait: bool | None = None
    """Whether to wait for another start that holds the run: after two minutes without a heartbeat the run is taken
    over. None: wait only in a scheduler's job, where a killed job may be restarted at once."""
    ckpt_path: str | None = None
    """A checkpoint to start from while this run has none."""
    code: str | list[str] | None = None
    """The folder of the user's code, or a list of all: then the working directory and the job file's folder are not
    looked into. None: found from the job file (nearest pyproject.toml or .git)."""

    @property
    def weights(self) -> str | None:
        """The checkpoint whose weights a new run begins with, if any."""
        return self.resume.removeprefix("weights:") if self.resume.startswith("weights:") else None

    @property
    def load(self) -> str | None:
        """The checkpoint to restore completely."""
        return self.resume if self.resume not in ("auto", "never") and self.weights is None else None

    @field_validator("dir", "ckpt_path", "code", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


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


class JobConfig(ConfigModel):
    """A complete job: what to train, on which data, how, and where.

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
    submit: Annotated[SubmitterConfigBase | None, OpenUnion("submitter", tag="to", optional=True)] = None
    """How the job is handed to a scheduler: `{to: slurm, time: "24:00:00"}`."""
