"""The models a user writes: a job, its run, its trainer, and where it is to run.

Field names are Lightning's wherever Lightning has the thing.  A config validates and nothing else;
`fairlead.resolve` decides, and the installed packages build.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fairlead.bases import (
    AXES,
    AcceleratorConfigBase,
    BackendConfig,
    CheckpointIOConfigBase,
    ConfigModel,
    EnvironmentConfigBase,
    LayerSyncConfigBase,
    LoggerConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
)
from fairlead.durations import ClockTime, Duration
from fairlead.errors import did_you_mean
from fairlead.open_union import OpenUnion

if TYPE_CHECKING:
    from fairlead.plugins import PluginManager

__all__ = [
    "CheckpointConfig",
    "ClassSpec",
    "Duration",
    "JobConfig",
    "ResourcesConfig",
    "RunConfig",
    "SubmitConfig",
    "TrainerConfig",
]

Auto = Literal["auto"]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Limit = NonNegativeInt | Fraction | None


class ClassSpec(ConfigModel):
    """A callable of the user's and its arguments: `{class: "my.module:Name", args: {...}}`, or just the name.

    Arguments may hold further `{class:, args:}` mappings; they are built first.
    """

    class_: str = Field(alias="class", min_length=1)
    """`module:object`, looked up as the documentation's page on user code says."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the call."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"class": value} if isinstance(value, str) else value


class RunConfig(ConfigModel):
    """Which run this is, and where its records are."""

    name: str | None = Field(default=None, min_length=1)
    """A template such as `gpt-lr{model.args.lr}`; None: the stem of the job file."""
    dir: str = Field(default="runs", min_length=1)
    """The folder that holds the run directories, relative to the working directory."""
    seed: int | None = Field(default=0, ge=0, lt=2**32)
    """Seeds Python, NumPy and torch on every rank; None leaves them unseeded, and no resume is exact."""
    resume: str = "auto"
    """`auto`: the newest complete checkpoint of this run; `never`: a new sibling run; else the path of a checkpoint."""
    ckpt_path: str | None = None
    """A checkpoint to start from when this run has none of its own yet."""
    code: str | None = None
    """The folder of the user's code; None: found from the job file (nearest pyproject.toml or .git)."""

    @field_validator("dir", "ckpt_path", "code", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


class CheckpointConfig(ConfigModel):
    """When checkpoints are written and which are kept. At least the end of training is always saved."""

    every_n_steps: PositiveInt | None = None
    """Save after every N optimizer steps."""
    every_n_epochs: PositiveInt | None = 1
    """Save at the end of every Nth epoch, after its validation."""
    every_n_minutes: PositiveFloat | None = None
    """Save when so many minutes have passed since the last save."""
    on_validation: bool = True
    """Save after every validation, so that each measured state can be had again."""
    monitor: str | None = None
    """The logged metric that decides which checkpoints are best; None: `val/loss` or `val_loss` where logged."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: NonNegativeInt = 1
    """How many of the best checkpoints by `monitor` are kept besides."""
    keep_every_n_steps: PositiveInt | None = None
    """Checkpoints at multiples of N steps are kept for ever."""
    keep_every_n_minutes: PositiveFloat | None = None
    """The first checkpoint of each N minutes is kept for ever."""
    save_weights_only: bool = False
    """Leave out optimizer and loop state: smaller, but a run cannot go on from it."""


class TrainerConfig(ConfigModel):
    """How to train: Lightning's Trainer settings under Lightning's names, and one field per axis.

    Example:
        >>> TrainerConfig(devices=2, max_steps=100).max_steps
        100
    """

    # One field per axis.
    accelerator: Annotated[AcceleratorConfigBase | str, OpenUnion("accelerator", literals=("auto",))] = "auto"
    """The kind of device; `auto` takes the best that is there."""
    strategy: Annotated[StrategyConfigBase | str, OpenUnion("strategy", literals=("auto",))] = "auto"
    """How the model is split; `auto` is single_device for one rank, ddp for more."""
    precision: Annotated[PrecisionConfigBase | str, OpenUnion("precision", literals=("auto",))] = "auto"
    """Number formats; `auto` is 32-true."""
    environment: Annotated[EnvironmentConfigBase | str, OpenUnion("environment", literals=("auto",))] = "auto"
    """Who started the ranks; `auto` asks every installed environment for its evidence."""
    checkpoint_io: Annotated[CheckpointIOConfigBase | str, OpenUnion("checkpoint_io", literals=("auto",))] = "auto"
    """How checkpoints are written; `auto` is torch."""
    layer_sync: Annotated[LayerSyncConfigBase | None, OpenUnion("layer_sync", optional=True)] = None
    """Layers whose statistics are shared between ranks."""
    requeue: Annotated[RequeueConfigBase | str, OpenUnion("requeue", literals=("auto",))] = "auto"
    """Who starts the job again; `auto` is the scheduler of the environment."""
    loggers: tuple[Annotated[LoggerConfigBase, OpenUnion("logger")], ...] = Field(default=(), strict=False)
    """Where metrics go besides metrics.csv."""
    plugins: list[Any] = Field(default_factory=list, exclude=True)
    """Config objects of any axis, or mappings named `axis.name`; each is moved to its own field."""

    # Hardware.
    devices: int | list[NonNegativeInt] | Auto = "auto"
    """Ranks on each node: a number, a list of device indices, `auto` or -1 for all."""
    num_nodes: PositiveInt | Auto = "auto"
    """Nodes; `auto` takes the launcher's number."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads of each rank; `auto` is OMP_NUM_THREADS, else the CPUs of the node divided by its ranks."""
    auto_determine_num_nodes: bool = True
    """Whether `num_nodes: auto` asks the environment; False: it is 1."""

    # How long.
    max_epochs: Annotated[int, Field(ge=-1)] | None = None
    """Stop after so many epochs; -1: never. None: 1000 when max_steps and max_time are not set."""
    min_epochs: NonNegativeInt | None = None
    """Train for at least so many epochs."""
    max_steps: int = Field(default=-1, ge=-1)
    """Stop after so many optimizer steps; -1: never."""
    min_steps: NonNegativeInt | None = None
    """Train for at least so many optimizer steps."""
    max_time: Duration | None = None
    """Stop after so much training time in all: `"24:00:00"`."""
    fast_dev_run: bool | NonNegativeInt = False
    """Run this many batches of each loop (True: one) and save nothing, to try the code."""

    # How much of the data.
    limit_train_batches: Limit = None
    """A number of batches, or a fraction of them, per epoch."""
    limit_val_batches: Limit = None
    """The same for each validation."""
    limit_test_batches: Limit = None
    """The same for the test."""
    limit_predict_batches: Limit = None
    """The same for prediction."""
    overfit_batches: NonNegativeInt | Fraction = 0.0
    """Train and validate on so many training batches only."""
    num_sanity_val_steps: Annotated[int, Field(ge=-1)] | None = None
    """Validation batches before training starts; None: 2; -1: all."""

    # When to validate and log.
    val_check_interval: PositiveInt | Annotated[float, Field(gt=0.0, le=1.0)] | ClockTime | None = None
    """Validate after so many batches, such a fraction of an epoch, or so much time (`"00:10:00"`)."""
    check_val_every_n_epoch: PositiveInt | None = 1
    """Validate every N epochs; None counts val_check_interval over all epochs."""
    log_every_n_steps: PositiveInt | None = None
    """Log every N steps; None: 50."""
    reload_dataloaders_every_n_epochs: NonNegativeInt = 0
    """Build the loaders anew every N epochs."""

    # Optimisation.
    accumulate_grad_batches: PositiveInt = 1
    """Batches whose gradients are added up for one optimizer step."""
    gradient_clip_val: NonNegativeFloat | None = None
    """The largest norm or value of the gradients."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """How gradients are clipped; None: by norm."""
    batch_policy: Literal["keep_global", "keep_per_device"] | None = None
    """What stays the same when a run goes on with another number of ranks."""
    sync_batchnorm: bool = False
    """Lightning's shorthand for `layer_sync: torch_sync_batchnorm`."""
    use_distributed_sampler: bool = True
    """Whether each rank gets its own part of the data without the user's doing."""

    # Exactness and speed.
    deterministic: bool | Literal["warn"] | None = None
    """Use deterministic kernels; `warn`: where there are some."""
    benchmark: bool | None = None
    """torch.backends.cudnn.benchmark."""
    inference_mode: bool = True
    """Evaluate under torch.inference_mode instead of no_grad."""
    detect_anomaly: bool = False
    """Find the operation that made a NaN; slow."""
    barebones: bool = False
    """Switch off everything that costs time, to measure the rest."""

    # What is added.
    callbacks: list[ClassSpec] = Field(default_factory=list)
    """Lightning callbacks: `{class: "my.callbacks:Ema", args: {decay: 0.999}}`."""
    profiler: Literal["simple", "advanced", "pytorch", "xla"] | ClassSpec | None = None
    """Lightning's profiler by name, or a class."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When checkpoints are written and which are kept."""
    enable_checkpointing: bool = True
    """Whether checkpoints are written at all."""
    enable_progress_bar: bool = True
    """Whether progress is shown: a bar on a terminal, plain lines elsewhere."""
    progress_interval: PositiveFloat = 10.0
    """Seconds between plain progress lines."""
    enable_model_summary: bool = True
    """Whether the layers and their sizes are printed before training."""
    enable_autolog_hparams: bool = True
    """Whether hyperparameters are logged at the start."""
    model_registry: str | None = None
    """The name of the model to upload checkpoints to (litmodels)."""
    lightning_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of lightning.pytorch.Trainer that have no field here."""

    @model_validator(mode="before")
    @classmethod
    def _spread_plugins(cls, value: Any) -> Any:
        """Moves `plugins=[...]` onto the fields of their axes."""
        if not isinstance(value, Mapping) or not isinstance(value.get("plugins"), (list, tuple)):
            return value
        data = {key: item for key, item in value.items() if key != "plugins"}
        set_by: dict[str, str] = {axis: f"`{axis}`" for axis in data}
        for index, item in enumerate(value["plugins"]):
            axis, config = _axis_of(item, index)
            if axis == "logger":
                present = data.get("loggers", ())
                # Anything but a list is left as it is: its own field then says what is wrong with it.
                data["loggers"] = [*present, config] if isinstance(present, (list, tuple)) else present
                continue
            if axis in set_by and data.get(axis) not in (None, "auto"):
                raise _set_twice(axis, set_by[axis], f"`plugins[{index}]`")
            data[axis] = config
            set_by[axis] = f"`plugins[{index}]`"
        return data

    @field_validator("devices")
    @classmethod
    def _sensible_devices(cls, value: int | list[int] | str) -> int | list[int] | str:
        if isinstance(value, int) and value != -1 and value < 1:
            raise ValueError(f"{value} devices: write a number from 1, a list of indices, or -1 or auto for all")
        if isinstance(value, list):
            if not value:
                raise ValueError("an empty list of devices: write indices, as [0, 2]")
            if len(set(value)) != len(value):
                raise ValueError(f"{value} names a device twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sync_batchnorm and self.layer_sync is not None:
            raise _set_twice("layer_sync", "`sync_batchnorm`", "`layer_sync`")
        fields = type(self).model_fields
        for key in self.lightning_kwargs:
            if key in fields or key in {"logger", "default_root_dir"}:
                own = {"logger": "loggers", "default_root_dir": "run.dir"}.get(key, f"trainer.{key}")
                raise ValueError(f"lightning_kwargs: {key!r} is set by `{own}`; set it there")
        if self.min_steps is not None and -1 < self.max_steps < self.min_steps:
            raise ValueError(f"min_steps ({self.min_steps}) is above max_steps ({self.max_steps})")
        return self


def _axis_of(item: Any, index: int) -> tuple[str, Any]:
    """The axis of one item of `plugins`, and what to put on its field."""
    if isinstance(item, BackendConfig):
        return item.axis, item
    named = item.get("name") if isinstance(item, Mapping) else item
    axis, dot, name = named.partition(".") if isinstance(named, str) else ("", "", "")
    if axis in AXES and dot:
        return axis, {**item, "name": name} if isinstance(item, Mapping) else name
    near = did_you_mean(axis, AXES) if dot else None
    raise PydanticCustomError(
        "wrong-type",
        "{what}",
        {
            "what": f"plugins[{index}] is {item!r}",
            "why": f"an item is a config object, or named `axis.name`; axes: {', '.join(AXES)}",
            "fix": f"did you mean {near}.{name}?" if near else "write for example {name: environment.slurm}",
        },
    )


def _set_twice(axis: str, first: str, second: str) -> PydanticCustomError:
    return PydanticCustomError(
        "axis-set-twice",
        "{what}",
        {"what": f"the {axis} is set twice: in {first} and in {second}", "fix": "keep one of the two"},
    )


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
