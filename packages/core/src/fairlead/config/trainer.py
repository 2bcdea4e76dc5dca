"""How to train."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, Self

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

from fairlead.config.marks import LIGHTNING, MayChange, NotExact
from fairlead.config_bases import (
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
from fairlead.open_union import OpenUnion, config_mistake


class CheckpointConfig(ConfigModel):
    """When checkpoints are written and which are kept. The end of training is always saved."""

    every_n_steps: PositiveInt | None = None
    """Save after every N optimizer steps."""
    every_n_epochs: PositiveInt | None = 1
    """Save at the end of every Nth epoch, after its validation."""
    every_n_minutes: PositiveFloat | None = None
    """Save when so many minutes have passed since the last save; several ranks look at the clock after every
    tenth step."""
    on_validation: bool = True
    """Save after every validation, so that each measured state can be restored."""
    monitor: str | None = None
    """The logged metric that decides which checkpoints are best; None: `val/loss` or `val_loss` where logged."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_best: NonNegativeInt = 1
    """How many of the best checkpoints by `monitor` are kept besides."""
    keep_every_n_steps: PositiveInt | None = None
    """Checkpoints at multiples of N steps are kept forever."""
    save_weights_only: Annotated[
        bool,
        NotExact(
            bool,
            why="the state of the optimizer and the position in the epoch are not saved",
            fix="save_weights_only: false",
        ),
    ] = False
    """Leave out optimizer and loop state: smaller, but a run cannot resume from it."""


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


_NOTHING_SAVED: Final = "no checkpoint is written: there is nothing to resume from"
_DEVICES: Final = re.compile(r"\s*(-1|[0-9]{1,9}(\s*,\s*[0-9]{1,9})*\s*,?)\s*")
Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Limit = NonNegativeInt | Fraction | None


class TrainerConfig(ConfigModel):
    """How to train: Lightning's Trainer settings under Lightning's names, and one field per axis.

    Example:
        >>> TrainerConfig(devices=2, max_steps=100).max_steps
        100
    """

    # One field per axis.
    accelerator: Annotated[AcceleratorConfigBase | str, OpenUnion("accelerator", literals=("auto",))] = "auto"
    """The kind of device; `auto`: the one that the strategy requires, else the best available."""
    strategy: Annotated[StrategyConfigBase | str, OpenUnion("strategy", literals=("auto",))] = "auto"
    """How the model is split; `auto` is single_device for one rank, ddp for more, and xla on XLA devices."""
    precision: Annotated[PrecisionConfigBase | str, OpenUnion("precision", literals=("auto",))] = "auto"
    """Number formats; `auto` is 32-true."""
    environment: Annotated[
        EnvironmentConfigBase | str,
        OpenUnion("environment", literals=("auto",)),
        MayChange("a run may move to another cluster"),
    ] = "auto"
    """Who started the ranks; `auto` asks every installed environment for its evidence."""
    checkpoint_io: Annotated[
        CheckpointIOConfigBase | str, OpenUnion("checkpoint_io", literals=("auto",)), MayChange("how files are written")
    ] = "auto"
    """How checkpoints are written; `auto` takes the one that the strategy requires, else torch."""
    layer_sync: Annotated[LayerSyncConfigBase | None, OpenUnion("layer_sync", optional=True)] = None
    """Layers whose statistics are shared between ranks."""
    requeue: Annotated[
        RequeueConfigBase | str,
        OpenUnion("requeue", literals=("auto",)),
        MayChange("what happens after a stop, not what is computed"),
    ] = "auto"
    """What requeues the job after a stop; `auto`: the scheduler of the environment."""
    loggers: Annotated[
        tuple[Annotated[LoggerConfigBase, OpenUnion("logger")], ...],
        MayChange("where metrics are shown, not what they are"),
    ] = Field(default=(), strict=False)
    """Where metrics go besides metrics.csv."""
    plugins: list[Any] = Field(default_factory=list, exclude=True)
    """Config objects of any axis, or mappings named `axis.name`; each is moved to its own field."""

    # Hardware.
    devices: Annotated[
        int | list[NonNegativeInt] | Auto,
        MayChange("a run may move to another number of devices; batch_policy says what becomes of the global batch"),
    ] = "auto"
    """Ranks on each node: a number, a list of device indices, `auto` or -1 for all; as text, too: `"2"`, `"0,1"`."""
    num_nodes: Annotated[PositiveInt | Auto, MayChange("as devices")] = "auto"
    """Nodes; `auto` takes the launcher's number."""
    threads: Annotated[PositiveInt | Auto, MayChange("as devices")] = "auto"
    """CPU threads of each rank; `auto` is OMP_NUM_THREADS, else the CPUs of the node divided by its ranks."""
    auto_determine_num_nodes: Annotated[bool, MayChange("only how num_nodes is found")] = True
    """Whether `num_nodes: auto` asks the environment; False: it is 1."""

    # How long.
    max_epochs: Annotated[
        Annotated[int, Field(ge=-1)] | None, MayChange("a run may be trained for longer", limit=True), LIGHTNING
    ] = None
    """Stop after so many epochs; -1: never. None: 1000 when max_steps and max_time are not set."""
    min_epochs: Annotated[NonNegativeInt | None, MayChange("as max_epochs", limit=True), LIGHTNING] = None
    """Train for at least so many epochs."""
    max_steps: Annotated[int, MayChange("as max_epochs", limit=True), LIGHTNING] = Field(default=-1, ge=-1)
    """Stop after so many optimizer steps; -1: never."""
    min_steps: Annotated[NonNegativeInt | None, MayChange("as max_epochs", limit=True), LIGHTNING] = None
    """Train for at least so many optimizer steps."""
    max_time: Annotated[
        Duration | None,
        MayChange("the time limit is the cluster's", limit=True),
        NotExact(
            lambda value: value is not None,
            why="training ends by the clock, so no two runs end at the same step",
            fix="max_steps or max_epochs",
        ),
        LIGHTNING,
    ] = None
    """Stop after so much training time in all: `"24:00:00"`."""
    fast_dev_run: Annotated[
        bool | NonNegativeInt, NotExact(bool, why=_NOTHING_SAVED, fix="fast_dev_run: false"), LIGHTNING
    ] = False
    """Run this many batches of each loop (True: one) and save nothing, to try the code."""

    # How much of the data.
    limit_train_batches: Annotated[Limit, LIGHTNING] = None
    """A number of batches, or a fraction of them, per epoch."""
    limit_val_batches: Annotated[Limit, LIGHTNING] = None
    """The same for each validation."""
    limit_test_batches: Annotated[Limit, MayChange("not a part of training"), LIGHTNING] = None
    """The same for the test."""
    limit_predict_batches: Annotated[Limit, MayChange("not a part of training"), LIGHTNING] = None
    """The same for prediction."""
    overfit_batches: Annotated[
        NonNegativeInt | Fraction,
        NotExact(
            bool,
            why="Lightning replaces the samplers of the loaders, and no test has resumed that",
            fix="limit_train_batches and limit_val_batches",
            certain=False,
        ),
        LIGHTNING,
    ] = 0.0
    """Train and validate on so many training batches only."""
    num_sanity_val_steps: Annotated[
        Annotated[int, Field(ge=-1)] | None, MayChange("a trial before training; its results are discarded"), LIGHTNING
    ] = None
    """Validation batches before training starts; None: 2; -1: all."""

    # When to validate and log.
    val_check_interval: Annotated[
        PositiveInt | Annotated[float, Field(gt=0.0, le=1.0)] | ClockTime | None,
        NotExact(
            lambda value: isinstance(value, timedelta),
            why="validation comes by the clock, so no two runs validate at the same steps",
            fix="give a number of batches, or a fraction of an epoch",
        ),
        LIGHTNING,
    ] = None
    """Validate after so many batches, such a fraction of an epoch, or so much time (`"00:10:00"`)."""
    check_val_every_n_epoch: Annotated[PositiveInt | None, LIGHTNING] = 1
    """Validate every N epochs; None counts val_check_interval over all epochs."""
    log_every_n_steps: Annotated[NonNegativeInt | None, MayChange("as loggers"), LIGHTNING] = None
    """Log every N steps, 0: none of them; None: 50."""
    reload_dataloaders_every_n_epochs: Annotated[NonNegativeInt, LIGHTNING] = 0
    """Build new loaders every N epochs."""

    # Optimisation.
    accumulate_grad_batches: Annotated[PositiveInt, LIGHTNING] = 1
    """Batches whose gradients are added up for one optimizer step."""
    gradient_clip_val: Annotated[NonNegativeFloat | None, LIGHTNING] = None
    """The largest norm or value of the gradients."""
    gradient_clip_algorithm: Annotated[Literal["norm", "value"] | None, LIGHTNING] = None
    """How gradients are clipped; None: by norm."""
    max_non_finite: Annotated[PositiveInt | None, MayChange("when a training that has failed ends")] = 10
    """Fail the run after so many batches in a row with a NaN or infinite loss, or with such weights; None: continue."""
    check_divergence_every_n_steps: Annotated[PositiveInt | None, MayChange("it only watches")] = None
    """Compare the model of all ranks every N steps too, not only after the first, at checkpoints and at the end."""
    on_divergence: Annotated[Literal["error", "warning", "ignore"], MayChange("it only watches")] = "error"
    """What to do where the ranks hold different weights, buffers or optimizer state: end the run, or warn once."""
    local_buffers: Annotated[list[str], MayChange("it only watches")] = Field(default_factory=list, strict=False)
    """Buffers that differ over the ranks on purpose, by name or pattern (`encoder.*.queue`)."""
    check_samples: Annotated[bool, MayChange("it only watches")] = True
    """Warn if ranks, or workers of the loader, train on the same samples, by the first batches of each start."""
    batch_policy: Annotated[
        Literal["keep_global", "keep_per_device"] | None, MayChange("it is set because the world size changed")
    ] = None
    """What stays the same when a run resumes with another number of ranks."""
    batch_size: Literal["per_device", "global"] = "per_device"
    """What the job's batch size counts: the samples of one rank's batch, or of all ranks in one optimizer step."""
    batch_size_from: str = "data.args.batch_size"
    """The path of the job's batch size."""
    base_batch_size: PositiveInt | None = None
    """The global batch for which the job's learning rates were chosen; None: do not scale them."""
    lr_rule: Literal["linear", "sqrt", "none"] | None = None
    """How learning rates follow the global batch from `base_batch_size` on; None: linear, where that is given."""
    sync_batchnorm: bool = False
    """Lightning's shorthand for `layer_sync: torch_sync_batchnorm`."""
    use_distributed_sampler: Annotated[bool, LIGHTNING] = True
    """Whether each rank gets its own part of the data without the user's doing."""

    # Exactness and speed.
    deterministic: Annotated[bool | Literal["warn"] | None, LIGHTNING] = None
    """Use deterministic kernels; `warn`: where there are some."""
    benchmark: Annotated[bool | None, LIGHTNING] = None
    """torch.backends.cudnn.benchmark."""
    inference_mode: Annotated[bool, MayChange("how validation saves memory"), LIGHTNING] = True
    """Evaluate under torch.inference_mode instead of no_grad."""
    detect_anomaly: Annotated[bool, MayChange("a debugging aid"), LIGHTNING] = False
    """Find the operation that made a NaN; slow."""
    barebones: Annotated[bool, NotExact(bool, why=_NOTHING_SAVED, fix="barebones: false"), LIGHTNING] = False
    """Switch off everything that costs time, to measure the rest."""

    # What is added.
    callbacks: list[ClassSpec] = Field(default_factory=list)
    """Lightning callbacks: `{class: "my.callbacks:Ema", args: {decay: 0.999}}`."""
    profiler: Annotated[
        Literal["simple", "advanced", "pytorch", "xla"] | ClassSpec | None, MayChange("it only watches")
    ] = None
    """Lightning's profiler by name, or a class."""
    checkpoint: Annotated[CheckpointConfig, MayChange("how often is saved and what is kept")] = Field(
        default_factory=CheckpointConfig
    )
    """When checkpoints are written and which are kept."""
    enable_checkpointing: Annotated[
        bool,
        MayChange("as checkpoint"),
        NotExact(operator.not_, why=_NOTHING_SAVED, fix="enable_checkpointing: true"),
        LIGHTNING,
    ] = True
    """Whether checkpoints are written at all."""
    enable_progress_bar: Annotated[bool, MayChange("display"), LIGHTNING] = True
    """Whether progress is shown: a bar on a terminal, plain lines elsewhere."""
    progress_interval: Annotated[PositiveFloat, MayChange("display")] = 10.0
    """Seconds between plain progress lines."""
    enable_model_summary: Annotated[bool, MayChange("display"), LIGHTNING] = True
    """Whether the layers and their sizes are printed before training."""
    enable_autolog_hparams: Annotated[bool, MayChange("as loggers"), LIGHTNING] = True
    """Whether hyperparameters are logged at the start."""
    model_registry: Annotated[str | None, MayChange("where models are uploaded to"), LIGHTNING] = None
    """The name of the model to upload checkpoints to (litmodels)."""
    lightning_kwargs: Annotated[
        dict[str, Any], NotExact(bool, why="what they do to a resume is not known", fix="leave them out", certain=False)
    ] = Field(default_factory=dict)
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

    @field_validator("devices", mode="before")
    @classmethod
    def _devices_as_text(cls, value: Any) -> Any:
        if not isinstance(value, str) or not _DEVICES.fullmatch(value):
            return value
        return [int(index) for index in value.split(",") if index.strip()] if "," in value else int(value)

    @field_validator("devices")
    @classmethod
    def _sensible_devices(cls, value: int | list[int] | str) -> int | list[int] | str:
        if isinstance(value, int) and value != -1 and value < 1:
            fix = "write a number from 1, a list of indices as [0, 2], or -1 or auto for all"
            raise config_mistake("wrong-value", f"{value} devices", fix=fix)
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
        for key in self.lightning_kwargs:
            if key in type(self).model_fields or key in {"logger", "default_root_dir"}:
                own = {"logger": "loggers", "default_root_dir": "run.dir"}.get(key, f"trainer.{key}")
                raise ValueError(f"lightning_kwargs: {key!r} is set by `{own}`; set it there")
        if self.lr_rule in ("linear", "sqrt") and self.base_batch_size is None:
            raise ValueError(f"lr_rule: {self.lr_rule} needs base_batch_size: the global batch of the learning rates")
        if self.batch_size == "global" and self.batch_policy == "keep_per_device":
            raise ValueError("batch_size: global keeps the global batch, and batch_policy: keep_per_device another")
        if self.min_steps is not None and -1 < self.max_steps < self.min_steps:
            raise ValueError(f"min_steps ({self.min_steps}) is above max_steps ({self.max_steps})")
        return self


def _axis_of(item: Any, index: int) -> tuple[str, Any]:
    """The axis of one item of `plugins`, and what to put on its field."""
    if isinstance(item, BackendConfig):
        return item.axis, item
    named = item.get("name") if isinstance(item, Mapping) else item
    axis, dot, name = named.partition(".") if isinstance(named, str) else ("", "", "")
    if axis in AXES and axis != "submitter" and dot:
        return axis, {**item, "name": name} if isinstance(item, Mapping) else name
    near = did_you_mean(axis, AXES) if dot else None
    raise config_mistake(
        "wrong-type",
        f"plugins[{index}] is {item!r}",
        why=f"an item is a config object, or named `axis.name`; axes: {', '.join(AXES)}",
        fix=f"did you mean {near}.{name}?" if near else "write for example {name: environment.slurm}",
    )


def _set_twice(axis: str, first: str, second: str) -> PydanticCustomError:
    return config_mistake("axis-set-twice", f"the {axis} is set twice: in {first} and in {second}", fix="keep one")
