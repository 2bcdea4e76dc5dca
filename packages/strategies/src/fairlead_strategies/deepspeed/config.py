"""The config of `strategy: deepspeed`.

Names are those of DeepSpeed's JSON, or Lightning's where its strategy has an argument for it; where Lightning and
DeepSpeed have different defaults, it is Lightning's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from fairlead_strategies.shared import ProcessGroupConfig

Stage = Literal[0, 1, 2, 3]


def _default_stage(data: dict[str, Any]) -> Stage | None:
    return 1 if data.get("config") is None else None


BESIDE_CONFIG: Final = frozenset(
    {
        "name", "process_group_backend", "timeout", "config", "load_full_weights", "exclude_frozen_parameters",
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
    }
)  # fmt: skip
"""Fields that mean something beside `config`; Lightning discards all others then."""


class DeepSpeedStrategyConfig(ProcessGroupConfig):
    """DeepSpeed's ZeRO: optimizer state, gradients and parameters split over the ranks.

    The fields are the settings that most runs choose, sizes in numbers of elements; `config` takes all others.
    `deepspeed` alone is stage 1, where Lightning's own default is 2.

    Example:
        >>> DeepSpeedStrategyConfig().stage
        1
        >>> DeepSpeedStrategyConfig(config="deepspeed_config.json").stage is None  # the file says it
        True
    """

    name: Literal["deepspeed"] = "deepspeed"
    config: dict[str, Any] | str | None = None
    """DeepSpeed's own configuration, or the path of a JSON file with it, instead of the fields below: for its other
    settings. Giving one of the fields as well is an error, because it would have no effect. What both it and the
    trainer say must agree."""
    stage: Stage | None = Field(default_factory=_default_stage)
    """What ZeRO splits: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. 1 unless `config` is
    given."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they are made: less fragmentation."""
    overlap_comm: bool = True
    """Reduce gradients during backward: faster, more memory."""
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
    stage3_prefetch_bucket_size: int = Field(50_000_000, ge=0)
    """Elements that stage 3 fetches ahead of their use."""
    stage3_param_persistence_threshold: int = Field(100_000, ge=0)
    """Stage 3 does not split parameters with fewer elements: every rank holds all of them."""
    stage3_max_live_parameters: int = Field(1_000_000_000, ge=0)
    """The most elements of gathered parameters on a rank at a time."""
    stage3_max_reuse_distance: int = Field(1_000_000_000, ge=0)
    """Keep a parameter gathered if it is reused within so many elements."""
    offload_optimizer: bool = False
    """Keep optimizer state, and compute its step, on `offload_optimizer_device`. Needs a stage."""
    offload_parameters: bool = False
    """Keep parameters on `offload_params_device` while they are not computed with. Needs stage 3."""
    offload_optimizer_device: Literal["cpu", "nvme"] = "cpu"
    """Where the optimizer state goes; `nvme` needs stage 3."""
    offload_params_device: Literal["cpu", "nvme"] = "cpu"
    """Where the parameters go."""
    nvme_path: str = "/local_nvme"
    """Folder on a fast local disk, for the device `nvme`."""
    pin_memory: bool = False
    """Lock offloaded memory into RAM: faster copies, more RAM."""
    cpu_checkpointing: bool = False
    """Keep checkpointed activations in CPU memory; with `partition_activations`."""
    partition_activations: bool = False
    """Split checkpointed activations over model-parallel ranks."""
    zero_allow_untested_optimizer: bool = True
    """Accept optimizers that DeepSpeed does not list as tested with ZeRO."""
    zero_force_ds_cpu_optimizer: bool | Literal["auto"] = "auto"
    """With `offload_optimizer`: accept only DeepSpeed's own optimizer for CPUs, which is compiled when first used.
    `auto` insists on it on GPUs, as DeepSpeed does, and not on a CPU, where torch's runs there as well."""
    load_full_weights: bool = False
    """With stage 3: load a checkpoint that is one file of full weights."""
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
        elif self.offload_optimizer and self.offload_optimizer_device == "nvme" and self.stage != 3:
            raise ValueError(f"`offload_optimizer_device: nvme` needs `stage: 3`, not {self.stage}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_has_no_effect(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return fields if self.config is None else {k: v for k, v in fields.items() if k in BESIDE_CONFIG}
