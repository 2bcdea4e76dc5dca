"""The base models that every config, ours and a plugin author's, derives from."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from fairlead.durations import Duration

__all__ = [
    "AXES",
    "AcceleratorConfigBase",
    "BackendConfig",
    "CheckpointIOConfigBase",
    "ConfigModel",
    "EnvironmentConfigBase",
    "LayerSyncConfigBase",
    "LoggerConfigBase",
    "PrecisionConfigBase",
    "RequeueConfigBase",
    "StrategyConfigBase",
    "SubmitterConfigBase",
]


class ConfigModel(BaseModel):
    """What all models of a config share: no unknown fields, no silent conversion, immutable.

    Without `polymorphic_serialization` pydantic would drop the fields of a subclass from a field declared as its base.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, polymorphic_serialization=True, use_attribute_docstrings=True
    )

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As pydantic's, but an integer stays one as a key: `{0: 8, 4: 4}` of a callback's arguments is no text."""
        dumped = super().model_dump(**options)
        if options.get("mode") != "json":
            return dumped
        restored: dict[str, Any] = _with_integer_keys(dumped, super().model_dump(**{**options, "mode": "python"}))
        return restored


def _with_integer_keys(dumped: Any, original: Any) -> Any:
    """Data dumped for JSON, whose keys are text, with the integers among the keys of what it was dumped from."""
    if isinstance(dumped, dict) and isinstance(original, dict):
        pairs = zip(dumped.items(), original.items(), strict=True)
        return {was if type(was) is int else key: _with_integer_keys(a, b) for (key, a), (was, b) in pairs}
    if isinstance(dumped, list) and isinstance(original, list | tuple):
        return [_with_integer_keys(a, b) for a, b in zip(dumped, original, strict=True)]
    return dumped


class BackendConfig(ConfigModel):
    """The config of one plugin. A subclass adds `name: Literal["<tag>"] = "<tag>"` and its fields."""

    axis: ClassVar[str]
    name: str


class AcceleratorConfigBase(BackendConfig):
    """The kind of device that a rank computes on."""

    axis = "accelerator"


class StrategyConfigBase(BackendConfig):
    """How a model and its data are split over ranks.

    Example:
        >>> from typing import Literal
        >>> class RingStrategyConfig(StrategyConfigBase):
        ...     name: Literal["ring"] = "ring"
        ...     bucket_cap_mb: int = 25
        >>> RingStrategyConfig().model_dump()
        {'name': 'ring', 'bucket_cap_mb': 25}
    """

    axis = "strategy"


class PrecisionConfigBase(BackendConfig):
    """The number formats of parameters, computation and gradients."""

    axis = "precision"


_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def _named(prefix: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names: dict[str, Any] = {}
        for name, setting in value.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of a variable; write letters, digits and _, as socket_ifname"
                )
            plain = name.upper().removeprefix(f"{prefix}_").lower()
            if plain in names:
                raise ValueError(f"{plain!r} is set twice: {prefix}_{plain.upper()} is one variable")
            names[plain] = setting
        return names

    return BeforeValidator(read)


def _one_line(values: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    for name, value in values.items():
        if isinstance(value, str) and ("\0" in value or "\n" in value):
            raise ValueError(f"the value of {name!r} has a line break, which no variable can hold")
    return values


_Values = Annotated[dict[str, str | int | bool], AfterValidator(_one_line)]
NCCLSettings = Annotated[_Values, _named("NCCL")]
"""NCCL's variables without their prefix: `{debug: INFO, socket_ifname: ib0}`."""
GlooSettings = Annotated[_Values, _named("GLOO")]
"""Gloo's variables without their prefix: `{socket_ifname: eth0}`."""


class EnvironmentConfigBase(BackendConfig):
    """Where the ranks come from: the launcher of this process, and the other ranks."""

    axis = "environment"
    preflight_timeout: Duration = Field(default=timedelta(minutes=5), gt=timedelta(0))
    """How long the ranks may take to find each other at the start, before those that are missing are named. Each
    collective of the run has the strategy's own `timeout`."""
    nccl: NCCLSettings = Field(default_factory=dict)
    """Settings of NCCL: `{debug: INFO, socket_ifname: ib0}` sets NCCL_DEBUG and NCCL_SOCKET_IFNAME in every rank before
    the process group starts, unless the environment has them. Values are text, numbers, true and false (1 and 0)."""
    gloo: GlooSettings = Field(default_factory=dict)
    """Settings of gloo in the same way: `{socket_ifname: eth0}` sets GLOO_SOCKET_IFNAME."""
    auto_requeue: bool | None = None
    """Shorthand of the axis `requeue`: False turns requeueing off, True asks for this scheduler's own requeuer."""
    requeue_signal: str | None = None
    """Shorthand of `requeue.signals`: the one signal, such as SIGUSR1, that announces a preemption."""

    @field_validator("requeue_signal")
    @classmethod
    def _known_signal(cls, value: str | None) -> str | None:
        return None if value is None else signal_name(value)


class CheckpointIOConfigBase(BackendConfig):
    """How the bytes of a checkpoint reach storage."""

    axis = "checkpoint_io"

    @property
    def saves_shards(self) -> bool:
        """Whether its runtime is a `fairlead_runs.checkpoint_io.ShardedSaves`: strategies hand it what each rank holds.

        A subclass says so with `saves_shards: ClassVar[bool] = True`, or with a property where its fields decide.
        """
        return False


class LayerSyncConfigBase(BackendConfig):
    """Layers whose statistics are shared between ranks."""

    axis = "layer_sync"


class RequeueConfigBase(BackendConfig):
    """What requeues the job after a stop."""

    axis = "requeue"
    signals: tuple[str, ...] | None = Field(default=None, min_length=1, strict=False)
    """Names of the signals that announce a stop, such as `[SIGUSR1]` or `[usr1]`. Default null: SIGUSR1 and SIGUSR2,
    the usual warnings of schedulers. SIGTERM and Ctrl-C always announce one."""
    max_requeues: int | None = Field(default=None, ge=0)
    """How often the job may be requeued; the stop after that is final. Default null: without a limit. A newly submitted
    job counts from zero."""
    max_without_progress: int | None = Field(default=5, ge=1)
    """After so many starts in a row without a training step the next stop is final, so that the job is not requeued
    forever. Null: without a limit."""
    when_unknown: Literal["requeue", "stop"] = "requeue"
    """What to do if the scheduler gives no reason for the signal, as after `scancel -s USR1` by hand, or in a container
    without its commands."""
    limit_window_s: float = Field(default=600.0, ge=0, strict=False)
    """Seconds before its end in which a job that is signalled is taken to be near its time limit. Set more than
    the lead of the warning signal (`--signal=USR1@1800` needs 1800 and a minute)."""
    short_s: float = Field(default=30.0, ge=0, strict=False)
    """With fewer seconds left, only the checkpoint and the requeue are done; loggers are not closed."""
    grace_s: float | None = Field(default=None, gt=0, strict=False)
    """Seconds from the signal to the kill, as KillWait of SLURM or `terminationGracePeriodSeconds` of a pod: the full
    stop is made to fit into them. Default null: the scheduler's value, else 30 after SIGTERM in a job of SLURM or LSF;
    elsewhere without a limit."""

    @field_validator("signals")
    @classmethod
    def _known_signals(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if names is None else tuple(dict.fromkeys(signal_name(name) for name in names))


class LoggerConfigBase(BackendConfig):
    """Where metrics go, besides `metrics.csv`, which is always written."""

    axis = "logger"


class SubmitterConfigBase(BackendConfig):
    """How a job is handed to a scheduler; in a job file its tag is called `to`: `submit: {to: slurm}`."""

    axis = "submitter"
    time: Duration | None = Field(default=None, gt=timedelta(0))
    """The time limit: `"24:00:00"`. Default null: the scheduler's own."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines that run before the ranks, on every start: `["source env.sh"]`."""
    env: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Environment variables of the ranks: `{HF_HOME: /scratch/hf}`."""
    network: Literal["efa", "infiniband", "ethernet"] | None = None
    """Sets the variables that NCCL and libfabric need on this kind of network, see `--dry-run`; `env` wins."""
    snapshot: bool | list[str] = True
    """Whether the code as it is now is copied, and the copy runs, also after each requeue. A list names, by patterns
    such as `configs/*.yaml`, the files that git does not track and that are taken along; true takes all that it does
    not ignore. False: the job runs whatever is in the folder when it starts."""
    template: str | None = None
    """A Jinja2 template to use instead of Fairlead's own, relative to the working directory."""
    extra: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Further options of the scheduler, as they are called there: `{exclusive: true, comment: mine}`."""


AXES: dict[str, type[BackendConfig]] = {base.axis: base for base in BackendConfig.__subclasses__()}
"""Every axis with the base class of its configs, in the order in which they stand above."""


def signal_name(value: str) -> str:
    """The full name of a signal, `SIGUSR1` of `usr1`; `ValueError` where there is none or it cannot be caught."""
    import signal

    name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
    known = {s.name for s in signal.Signals}
    if name not in known:
        raise ValueError(f"{value!r} is not a signal of this system; for example SIGUSR1, SIGUSR2, SIGTERM, SIGURG")
    if name in {"SIGKILL", "SIGSTOP"}:
        raise ValueError(f"{name} cannot be caught by a process")
    return name
