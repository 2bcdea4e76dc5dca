"""The config of `strategy: deepspeed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from fairlead_strategies.deepspeed.fields import ActivationConfig, DeepSpeedOptimizer, DeepSpeedScheduler

BESIDE_CONFIG: Final = frozenset(
    {
        "name", "process_group_backend", "timeout", "config", "load_full_weights", "exclude_frozen_parameters",
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
    }
)  # fmt: skip
"""Fields that mean something beside `config`; Lightning discards all others then."""


class DeepSpeedStrategyConfig(ActivationConfig):
    """DeepSpeed's ZeRO: optimizer state, gradients and parameters split over the ranks.

    `deepspeed` alone is stage 1, where Lightning's own default is 2.

    Example:
        >>> DeepSpeedStrategyConfig().stage
        1
        >>> DeepSpeedStrategyConfig(config="deepspeed_config.json").stage is None  # the file says it
        True
    """

    name: Literal["deepspeed"] = "deepspeed"
    optimizer: DeepSpeedOptimizer | None = None
    """DeepSpeed's own optimizer; None takes the one of `configure_optimizers`."""
    scheduler: DeepSpeedScheduler | None = None
    """DeepSpeed's own schedule, for `optimizer`; None takes the one of `configure_optimizers`."""
    zero_allow_untested_optimizer: bool = True
    """Accept optimizers that DeepSpeed does not list as tested with ZeRO."""
    zero_force_ds_cpu_optimizer: bool | Literal["auto"] = "auto"
    """With `offload_optimizer`: accept only DeepSpeed's own optimizer for CPUs, which is compiled when first used.
    `auto` insists on it on GPUs, as DeepSpeed does, and not on a CPU, where torch's computes in the same place."""
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    """The number format in which gradients are sent; None: their own."""
    prescale_gradients: bool = False
    """Divide gradients before they are added rather than afterwards."""
    gradient_predivide_factor: float = Field(1.0, gt=0)
    """Divide gradients by this before and by the rest after they are added; with `prescale_gradients`."""
    grad_accum_dtype: Literal["fp16", "bf16", "fp32"] | None = None
    """The number format in which gradients of several batches are added up; None: DeepSpeed's choice."""
    wall_clock_breakdown: bool = False
    """Print the time of forward, backward and step."""
    logging_batch_size_per_gpu: int | Literal["auto"] = "auto"
    """Batch size per device for DeepSpeed's own throughput log; `auto` asks the data loader."""
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
        elif not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError(f"`compute_grad_norm: false` works with `stage` 1 and 2, not {self.stage}")
        elif self.scheduler is not None and self.optimizer is None:
            raise ValueError("`scheduler` is for DeepSpeed's own `optimizer`, which is not given")
        return self

    @model_serializer(mode="wrap")
    def _without_what_has_no_effect(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return fields if self.config is None else {k: v for k, v in fields.items() if k in BESIDE_CONFIG}
