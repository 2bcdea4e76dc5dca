"""DeepSpeed's ZeRO stages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from fairlead import BuildContext, Capability, Finding, Resolution, hookimpl
from fairlead.errors import ConfigError
from fairlead.findings import Inexact
from fairlead_strategies.shared import LIGHTNING, ProcessGroupConfig, UnprovenStrategy

BESIDE_CONFIG: Final = frozenset(
    {
        "name", "process_group_backend", "timeout", "config", "load_full_weights", "exclude_frozen_parameters",
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
    }
)  # fmt: skip
"""Fields that mean something beside `config`; Lightning discards all others then."""

LOSS_SCALE: Final = frozenset({"init_scale", "growth_interval", "growth_factor", "backoff_factor"})
"""Settings of torch's gradient scaler, as a precision has them."""

Stage = Literal[0, 1, 2, 3]


def _default_stage(data: dict[str, Any]) -> Stage | None:
    return 1 if data.get("config") is None else None


class DeepSpeedStrategyConfig(ProcessGroupConfig):
    """DeepSpeed's ZeRO: optimizer state, gradients and parameters split over the ranks.

    `deepspeed` alone is stage 1, where Lightning's own default is 2.

    Example:
        >>> DeepSpeedStrategyConfig().stage
        1
        >>> DeepSpeedStrategyConfig(config="deepspeed_config.json").stage is None  # the file says it
        True
    """

    name: Literal["deepspeed"] = "deepspeed"
    config: dict[str, Any] | str | None = None
    """DeepSpeed's own configuration, or the path of a JSON file with it, in place of the fields below. Giving
    one of those as well is an error, because it would have no effect."""
    stage: Stage | None = Field(default_factory=_default_stage)
    """What ZeRO splits: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. 1 unless `config` is
    given."""
    offload_optimizer: bool = False
    """Keep optimizer state, and compute its step, on `offload_optimizer_device`. Needs a stage."""
    offload_parameters: bool = False
    """Keep parameters on `offload_params_device` while they are not computed with. Needs stage 3."""
    offload_optimizer_device: Literal["cpu", "nvme"] = "cpu"
    """Where the optimizer state goes."""
    offload_params_device: Literal["cpu", "nvme"] = "cpu"
    """Where the parameters go."""
    nvme_path: str = "/local_nvme"
    """Folder on a fast local disk, for the device `nvme`."""
    pin_memory: bool = False
    """Lock offloaded memory into RAM: faster copies, more RAM."""
    cpu_checkpointing: bool = False
    """Keep checkpointed activations in CPU memory; with `partition_activations`."""
    partition_activations: bool = False
    """Split checkpointed activations over model-parallel ranks; the model must use DeepSpeed's checkpointing."""
    contiguous_memory_optimization: bool = False
    """Copy partitioned activations into one block of memory."""
    synchronize_checkpoint_boundary: bool = False
    """Synchronise the device at every activation checkpoint."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they are made: less fragmentation."""
    overlap_comm: bool = True
    """Reduce gradients while backward goes on: faster, more memory."""
    allgather_partitions: bool = True
    """Collect updated parameters by all-gather rather than by broadcasts."""
    reduce_scatter: bool = True
    """Average gradients by reduce-scatter rather than by all-reduce."""
    allgather_bucket_size: int = Field(200_000_000, gt=0)
    """Elements gathered at once."""
    reduce_bucket_size: int = Field(200_000_000, gt=0)
    """Elements reduced at once."""
    sub_group_size: int = Field(1_000_000_000_000, gt=0)
    """Elements per group of parameters that stage 3 updates at once."""
    zero_allow_untested_optimizer: bool = True
    """Accept optimizers that DeepSpeed does not list as tested with ZeRO."""
    logging_batch_size_per_gpu: int | Literal["auto"] = "auto"
    """Batch size per device for DeepSpeed's own throughput log; `auto` asks the data loader."""
    load_full_weights: bool = False
    """With stage 3: load a checkpoint that is one file of whole weights."""
    exclude_frozen_parameters: bool = False
    """Leave frozen parameters out of checkpoints."""
    loss_scale: float = Field(0, ge=0)
    """Loss scale of 16-bit training; 0 adapts it."""
    initial_scale_power: int = Field(16, ge=0)
    """The adaptive loss scale starts at 2 to this power."""
    loss_scale_window: int = Field(1000, gt=0)
    """Steps without overflow after which the adaptive loss scale doubles."""
    hysteresis: int = Field(2, gt=0)
    """Overflows in a row before the adaptive loss scale is halved."""
    min_loss_scale: int = Field(1, gt=0)
    """The smallest adaptive loss scale."""

    @field_validator("config", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _fields_that_count(self) -> DeepSpeedStrategyConfig:
        if self.config is not None:
            given = {n for n in self.model_fields_set - BESIDE_CONFIG if not (n == "stage" and self.stage is None)}
            if given:
                names = ", ".join(f"`{name}`" for name in sorted(given))
                raise ValueError(f"{names} would have no effect beside `config`; write that into it instead")
        elif self.stage is None:
            raise ValueError("`stage` is 0, 1, 2 or 3, unless `config` says it")
        elif self.offload_parameters and self.stage != 3:
            raise ValueError(f"`offload_parameters` needs `stage: 3`, not {self.stage}")
        elif self.offload_optimizer and self.stage == 0:
            raise ValueError("`offload_optimizer` needs a ZeRO stage of 1, 2 or 3")
        return self

    @model_serializer(mode="wrap")
    def _without_what_has_no_effect(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return fields if self.config is None else {k: v for k, v in fields.items() if k in BESIDE_CONFIG}


class DeepSpeed(UnprovenStrategy):
    """ZeRO data parallelism by DeepSpeed, on CUDA GPUs."""

    config = DeepSpeedStrategyConfig
    runtime = "fairlead_strategies.deepspeed:build"
    sharded_state = True
    precision = "deepspeed"
    engines = (*LIGHTNING, "deepspeed>=0.19.8")
    extra = "deepspeed"
    unproven = Inexact(
        "strategy: deepspeed",
        why="no test has resumed it: DeepSpeed keeps and writes its state itself",
        fix="strategy: fsdp2, or ddp",
        certain=False,
    )
    codes: ClassVar[Mapping[str, str]] = {
        "deepspeed-environment": "The variable PL_DEEPSPEED_CONFIG_PATH replaces the strategy's settings.",
        "precision-scaler": "The strategy does not use the gradient scaler's settings.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning's DeepSpeed strategy refuses, or takes no notice of."""
        yield self.no(
            ("accelerator.cpu", "accelerator.mps", "accelerator.xla"),
            "Lightning runs DeepSpeed on CUDA GPUs only",
            "accelerator: cuda, or strategy: ddp",
        )
        yield self.no(
            ("precision.64-true", "precision.bitsandbytes", "precision.transformer-engine"),
            "DeepSpeed does backward and step itself, through its own precision plugin, which has no such mode",
            "precision: 32-true, bf16-mixed, 16-mixed, bf16-true or 16-true",
        )
        yield self.no(("clipping.value",), "DeepSpeed clips gradients by norm only", "gradient_clip_algorithm: norm")
        yield self.no(
            ("layer_sync.torch_sync_batchnorm",),
            "Lightning's DeepSpeed strategy does not apply it, and says nothing",
            "convert the model in its constructor: torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        )
        yield Capability(
            "strategy.deepspeed",
            ("checkpoint_io.async",),
            "partial",
            "DeepSpeed writes a folder of checkpoint files itself, past the checkpoint IO: saving blocks training",
            "checkpoint_io: torch",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A variable that Lightning obeys silently, and settings of the loss scale that DeepSpeed does not read."""
        config = resolution.strategy
        assert isinstance(config, DeepSpeedStrategyConfig)
        path = environ.get("PL_DEEPSPEED_CONFIG_PATH")
        if path is not None and config.config is None:
            yield Finding(
                "error",
                "deepspeed-environment",
                f"PL_DEEPSPEED_CONFIG_PATH={path} would replace every setting of the strategy",
                where="trainer.strategy",
                why="Lightning reads this variable when no `config` is given",
                fix=f"unset PL_DEEPSPEED_CONFIG_PATH, or write `config: {path}`",
            )
        fields: dict[str, Any] = getattr(type(resolution.precision), "model_fields", {})  # None: it is not installed
        if any(getattr(resolution.precision, name) != fields[name].default for name in LOSS_SCALE & fields.keys()):
            yield Finding(
                "error",
                "precision-scaler",
                "DeepSpeed does not use these settings of the loss scale",
                where="trainer.precision",
                why="it scales the loss itself",
                fix="set `loss_scale`, `initial_scale_power` and `loss_scale_window` of the strategy instead",
            )


def build(config: DeepSpeedStrategyConfig, context: BuildContext) -> Any:
    """Lightning's strategy, whose constructor imports DeepSpeed; raises when `config` names no JSON file."""
    from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
    from lightning.pytorch.strategies import DeepSpeedStrategy

    names = set(type(config).model_fields) - {"name"}
    if config.config is not None:
        names &= BESIDE_CONFIG
    kwargs: dict[str, Any] = {name: getattr(config, name) for name in names}
    kwargs["process_group_backend"] = context.resolution.backend
    if isinstance(config.config, str):
        kwargs["config"] = _read(config.config)
    if context.engine == "trainer":
        return DeepSpeedStrategy(**kwargs)
    if kwargs.get("logging_batch_size_per_gpu") == "auto":
        kwargs["logging_batch_size_per_gpu"] = None  # Fabric has no data loader to ask and takes its own default
    return FabricDeepSpeedStrategy(**kwargs)


def _read(path: str) -> dict[str, Any]:
    where = "trainer.strategy.config"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}", where=where, why=error.strerror, fix="give the path of a JSON file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON", where=where, why=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not an object", where=where)
    return found


deepspeed = DeepSpeed()
deepspeed_stage_1 = DeepSpeed(stage=1)
deepspeed_stage_2 = DeepSpeed(stage=2)
deepspeed_stage_3 = DeepSpeed(stage=3)
deepspeed_stage_2_offload = DeepSpeed(stage=2, offload_optimizer=True)
deepspeed_stage_3_offload = DeepSpeed(stage=3, offload_optimizer=True, offload_parameters=True)
deepspeed_stage_3_offload_nvme = DeepSpeed(
    stage=3,
    offload_optimizer=True,
    offload_parameters=True,
    offload_params_device="nvme",
    offload_optimizer_device="nvme",
)
