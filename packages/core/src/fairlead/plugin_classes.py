"""What a plugin is: one class per axis, all of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Final

from fairlead.config_bases import (
    AcceleratorConfigBase,
    BackendConfig,
    CheckpointIOConfigBase,
    EnvironmentConfigBase,
    LayerSyncConfigBase,
    LoggerConfigBase,
    PrecisionConfigBase,
    RequeueConfigBase,
    StrategyConfigBase,
    SubmitterConfigBase,
)

__all__ = [
    "API_VERSION",
    "AXIS_PLUGINS",
    "AcceleratorPlugin",
    "AnyPlugin",
    "CheckPlugin",
    "CheckpointIOPlugin",
    "CommandPlugin",
    "EnvironmentPlugin",
    "LayerSyncPlugin",
    "LoggerPlugin",
    "Plugin",
    "PrecisionPlugin",
    "RequeuePlugin",
    "StrategyPlugin",
    "SubmitterPlugin",
]


API_VERSION: Final = 1
"""The version of the plugin contract. A plugin that needs another says so in `Plugin.api`."""


class Plugin:
    """The base of all plugins: class attributes say what it contributes.

    An instance with keyword arguments is a *preset*: a second name for the plugin with some
    fields of its config set. `ddp_spawn = DDP(start_method="spawn")` is one, with its own entry point.
    A second name that sets nothing is written with the tag alone: `gpu = CUDA(name="cuda")`.

    Args:
        preset: Values of config fields that this name stands for.
    """

    axis: ClassVar[str]
    base: ClassVar[type[BackendConfig]]

    config: ClassVar[type[BackendConfig]]
    """The pydantic model of the settings. Its `name` is a `Literal` with the tag as its default."""
    runtime: ClassVar[str | None] = None
    """`module:callable`, imported only to build; called with `(config, context: BuildContext)`."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Further names of the config class in `fairlead.configs`."""
    engines: ClassVar[tuple[str, ...]] = ()
    """What the runtime needs; looked up in metadata, never imported. Either the name of an engine that Fairlead's own
    plugins use (`torch`, `deepspeed`; `fairlead.engines` has their versions), or a requirement (`horovod>=0.28`)."""
    extra: ClassVar[str | None] = None
    """The extra of `fairlead` that brings the engines; None: the engines are installed by their names."""
    codes: ClassVar[Mapping[str, str]] = {}
    """The codes of the findings that this plugin makes, each with its explanation."""
    api: ClassVar[int] = API_VERSION
    """The version of the plugin contract that this class was written for."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Fields of the config with which the conformance suite tries it: those without which it means nothing."""
    example_environ: ClassVar[Mapping[str, str] | None] = None
    """The environment variables with which the suite tries it: of an environment those of one rank, or of a job."""

    def __init__(self, **preset: Any) -> None:
        self.preset: Mapping[str, Any] = preset

    def __repr__(self) -> str:
        preset = ", ".join(f"{key}={value!r}" for key, value in self.preset.items())
        return f"{type(self).__module__}.{type(self).__qualname__}({preset})"

    @property
    def tag(self) -> str:
        """The `name` of this plugin's config: the tag that presets stand for."""
        return str(self.config.model_fields["name"].default)


class AcceleratorPlugin(Plugin):
    """A kind of device. Hook: `fairlead_devices`."""

    axis = "accelerator"
    base = AcceleratorConfigBase
    priority: ClassVar[int] = 0
    """`accelerator: auto` takes the available plugin with the highest priority; the CPU has 0."""
    device_type: ClassVar[str | None] = None
    """The device type of torch, as in `torch.device("cuda")`; None: the tag is one."""
    devices: ClassVar[str] = ""
    """A regular expression of the names of its devices in `resources.device`, complete and in small letters."""
    backend: ClassVar[str] = "gloo"
    """The backend of torch.distributed that fits the device."""
    strategies: ClassVar[tuple[str, str]] = ("single_device", "ddp")
    """What `strategy: auto` is for one rank, and for several."""


class StrategyPlugin(Plugin):
    """A way to split a model. Its runtime returns a Lightning strategy for `context.engine`."""

    axis = "strategy"
    base = StrategyConfigBase
    starts_processes: ClassVar[bool] = False
    """Whether its engine starts and connects several ranks by itself, as torch-xla does: then `fit` starts none, and
    the environment is not built."""
    sharded_state: ClassVar[bool] = False
    """Whether a rank holds only its part of the weights, gradients or optimizer state, so that a checkpoint in one
    file has to be gathered first."""
    precision: ClassVar[str | None] = None
    """The tag of the one precision that its engine accepts, such as `deepspeed`. `precision: bf16-mixed` and the like
    are then built as that precision with this mode in its field `precision`. None: it takes the general ones."""
    accelerator: ClassVar[str | None] = None
    """The tag of the one accelerator that its engine drives: `accelerator: auto` is then this one. None: any."""
    checkpoint_io: ClassVar[str | None] = None
    """The tag of the one checkpoint backend that its engine accepts: `checkpoint_io: auto` is then this one. None:
    `torch`."""
    one_rank: ClassVar[bool] = False
    """Whether it trains one rank only: `devices: auto` is then 1, and several ranks are an error."""
    one_process: ClassVar[bool] = False
    """Whether one process drives all devices of a machine, as SPMD does: a run on one machine is then one rank, and
    the batch of that rank is split over the devices. Over several machines the ranks are counted as elsewhere."""


class PrecisionPlugin(Plugin):
    """A numeric precision. Its runtime returns a Lightning precision plugin."""

    axis = "precision"
    base = PrecisionConfigBase


class EnvironmentPlugin(Plugin):
    """A launcher or scheduler. Hooks: `fairlead_detect`, `fairlead_topology`, `fairlead_job`."""

    axis = "environment"
    base = EnvironmentConfigBase
    runtime = "fairlead_environments.runtime:build"
    """The default answers Lightning from what `fairlead_topology` gave; it needs fairlead-environments."""
    requeue: ClassVar[str] = "none"
    """The tag of the requeuer that belongs to this scheduler."""
    reads_world_size: ClassVar[bool] = False
    """Whether the scheduler sets WORLD_SIZE to something else than the number of ranks, and `fairlead_topology` reads
    it; elsewhere a WORLD_SIZE that is not the number of ranks is a finding (`world-size-contradicted`)."""


class CheckpointIOPlugin(Plugin):
    """How a checkpoint is written and read. Its runtime returns a Lightning `CheckpointIO`."""

    axis = "checkpoint_io"
    base = CheckpointIOConfigBase
    formats: ClassVar[tuple[str, ...]] = ()
    """`module:name` of each `fairlead_checkpoint_io.CheckpointFormat` by which `fairlead checkpoint` reads it."""
    copies: ClassVar[str | None] = None
    """`module:callable` that makes the `fairlead_runs.checkpoint_io.CheckpointCopies` of a config, for loops that write
    their checkpoints without a `CheckpointIO`; None: it copies nothing elsewhere."""


class LayerSyncPlugin(Plugin):
    """Shared layer statistics. Its runtime returns a Lightning `LayerSync`."""

    axis = "layer_sync"
    base = LayerSyncConfigBase


class RequeuePlugin(Plugin):
    """Who restarts the job. Its runtime returns a `fairlead.interfaces.Requeuer`.

    `requeue: auto` takes the first of: a plugin whose `evidence` is `before_the_launcher`; the requeuer of the
    environment; any plugin with evidence, as for torchrun or a plain `python train.py` in a batch script.
    """

    axis = "requeue"
    base = RequeueConfigBase
    guard: ClassVar[str] = "fairlead_hpc_signals.stopping:build"
    """`module:callable` that makes the `fairlead_runs.guard.StopGuard` of a run, called with the config, the build
    context and the flags of an earlier guard, or None."""
    before_the_launcher: ClassVar[bool] = False
    """Whether evidence for this plugin counts more than the requeuer that the environment names."""

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """The variables that show that this requeuer has a job to restart; None when nothing does."""
        return None


class LoggerPlugin(Plugin):
    """Where metrics go. Its runtime returns a Lightning `Logger`, or None where metrics.csv is all there is."""

    axis = "logger"
    base = LoggerConfigBase


class SubmitterPlugin(Plugin):
    """A scheduler that takes jobs. Its runtime returns a `fairlead_launch.submission.Submitter`."""

    axis = "submitter"
    base = SubmitterConfigBase


@dataclass(eq=False)
class CommandPlugin:
    """A command of the CLI; an extension point of the same kind, not an axis.

    Args:
        name: The word after `fairlead`.
        help: One line for `fairlead --help`.
        arguments: `module:callable` that adds the arguments to an `argparse.ArgumentParser`.
        runtime: `module:callable`, called with `(arguments: argparse.Namespace, session: Session)`;
            returns the exit code.
        engines: What the command needs, as in `Plugin.engines`; what is missing ends it with the pip line.
        extra: The extra of `fairlead` that brings them.
        group: What the command is about: `installation`, `job`, `runs` or `checkpoints`.
        example: Words with which the conformance suite runs it in an empty folder; it ends with 0, or refuses them
            with an error of ours.
        out_of_memory: `module:callable`, called with `(loaded: LoadedJob, resolution: Resolution)` where a fit has run
            out of memory; gives the lines that are shown with its error: what would help, and by how much.
    """

    axis: ClassVar[str] = "command"
    api: ClassVar[int] = API_VERSION

    name: str
    help: str
    _: KW_ONLY
    arguments: str
    runtime: str
    engines: tuple[str, ...] = ()
    extra: str | None = None
    group: str = "job"
    example: tuple[str, ...] | None = None
    out_of_memory: str | None = None


@dataclass(eq=False)
class CheckPlugin:
    """A check of every job, whatever it selects; an extension point, not an axis.

    Args:
        check: `module:callable`, imported when a job is checked, and called with `(loaded: LoadedJob, resolution:
            Resolution, environ: Mapping[str, str], cwd: Path)`; returns a `fairlead.findings.CheckResult`.
        reads_run: Whether it looks into the run directory: it is then left out where that is not used (validate, test,
            predict), and in ranks that start together, of which one may have opened it already.
        codes: The codes of the findings that it makes, each with its explanation.

    Example:
        >>> quota = CheckPlugin("my_site.quota:check_quota", codes={"quota": "The project has no GPU hours left."})
    """

    axis: ClassVar[str] = "check"
    api: ClassVar[int] = API_VERSION
    engines: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None

    check: str
    _: KW_ONLY
    reads_run: bool = False
    codes: Mapping[str, str] = field(default_factory=dict)


AnyPlugin = Plugin | CommandPlugin | CheckPlugin

AXIS_PLUGINS: dict[str, type[AnyPlugin]] = {
    **{kind.axis: kind for kind in Plugin.__subclasses__()},
    CommandPlugin.axis: CommandPlugin,
    CheckPlugin.axis: CheckPlugin,
}
"""The class that an entry point of each axis must name an instance of."""
