"""The config of `strategy: deepspeed`.

Names are those of DeepSpeed's JSON, or Lightning's where its strategy has an argument for it; where Lightning and
DeepSpeed have different defaults, it is Lightning's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from fairlead.config_bases import ConfigModel
from fairlead_strategies.shared import ProcessGroupConfig

Stage = Literal[0, 1, 2, 3]


def _default_stage(data: dict[str, Any]) -> Stage | None:
    return 1 if data.get("config") is None else None


class ZeroConfig(ProcessGroupConfig):
    """DeepSpeed's `zero_optimization`, under DeepSpeed's names, or `config`. Sizes are numbers of elements."""

    config: dict[str, Any] | str | None = None
    """DeepSpeed's own configuration, or the path of a JSON file with it, instead of the fields below. Giving
    one of those as well is an error, because it would have no effect. What both it and the trainer say must agree."""
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
    use_multi_rank_bucket_allreduce: bool = True
    """Put the buckets of several ranks into one all-reduce."""
    compute_grad_norm: bool = True
    """Compute the norm of all gradients in every step; without it nothing can be clipped. Stages 1 and 2."""
    load_from_fp32_weights: bool = True
    """Take the float32 weights of a checkpoint, not the 16-bit ones, which are rounded."""
    ignore_unused_parameters: bool = True
    """Stage 2: continue if a step did not use a parameter, instead of raising an error."""
    round_robin_gradients: bool = False
    """Stages 1 and 2 with `offload_optimizer`: ranks copy their gradients to the CPU in turns."""
    parameter_alignment: bool = False
    """Stages 1 and 2: let each parameter start at an address divisible by 16 bytes; costs memory."""
    stage3_prefetch_bucket_size: int = Field(50_000_000, ge=0)
    """Elements that stage 3 fetches ahead of their use."""
    stage3_param_persistence_threshold: int = Field(100_000, ge=0)
    """Stage 3 does not split parameters with fewer elements: every rank holds all of them."""
    stage3_model_persistence_threshold: int = Field(9_223_372_036_854_775_807, ge=0)
    """The most elements that may stay unsplit by the setting above."""
    stage3_max_live_parameters: int = Field(1_000_000_000, ge=0)
    """The most elements of gathered parameters on a rank at a time."""
    stage3_max_reuse_distance: int = Field(1_000_000_000, ge=0)
    """Keep a parameter gathered if it is reused within so many elements."""
    stage3_gather_16bit_weights_on_model_save: bool = False
    """Gather the 16-bit weights where `save_16bit_model` is called."""
    stage3_module_granularity_threshold: int = Field(0, ge=0)
    """Fetch modules with fewer parameters per submodule at once."""
    stage3_use_all_reduce_for_fetch_params: bool = False
    """Fetch parameters by all-reduce."""
    stage3_allgather_sequential: bool = False
    """Gather parameters one by one, without copies into a bucket: less memory."""
    zero_hpz_partition_size: int = Field(1, ge=0)
    """ZeRO++: ranks (of a node) among which a second copy of the parameters is split."""
    zero_quantized_weights: bool = False
    """ZeRO++: gather parameters in 8 bits."""
    zero_quantized_nontrainable_weights: bool = False
    """ZeRO++: also keep frozen parameters in 8 bits."""
    zero_quantized_gradients: bool = False
    """ZeRO++: send gradients in 4 bits."""
    memory_efficient_linear: bool = True
    """Stage 3: DeepSpeed's linear layer, which keeps no gathered weights for backward."""
    pipeline_loading_checkpoint: bool = False
    """Stage 3: overlap reading a checkpoint with copying it."""
    override_module_apply: bool = True
    """Stage 3: gather parameters within `Module.apply`."""
    log_trace_cache_warnings: bool = False
    """Stage 3: tell when the order of modules changed between steps."""
    enable_sanity_checks: bool = False
    """Stage 3: DeepSpeed's checks of itself."""
    save_muon_momentum_buffer_in_memory: bool = False
    """Keep the momentum of the optimizer Muon out of NVMe."""


class OffloadConfig(ZeroConfig):
    """Where optimizer state and parameters are while nothing is computed with them, and how a local disk is used."""

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
    offload_optimizer_ratio: float = Field(1.0, ge=0, le=1)
    """Stage 3: the part of the optimizer state that is offloaded."""
    optimizer_buffer_count: int = Field(4, gt=0)
    """Buffers for optimizer state on NVMe; at least the number of states of a parameter, four with Adam."""
    optimizer_pipeline_read: bool = False
    """Read the next part of the optimizer state while this one is updated. NVMe."""
    optimizer_pipeline_write: bool = False
    """Write the previous part of the optimizer state while this one is updated. NVMe."""
    optimizer_fast_init: bool = False
    """Set the optimizer state on NVMe up faster."""
    super_offload: bool = False
    """Stage 3: offloading for machines whose CPU and GPU share a fast link, such as GH200."""
    cpuadam_cores_perc: float = Field(0.8, ge=0, le=1)
    """The part of the cores that `super_offload` computes the optimizer's step with."""
    params_buffer_count: int = Field(5, gt=0)
    """Buffers for parameters on NVMe."""
    params_buffer_size: int = Field(100_000_000, gt=0)
    """Elements of each; the largest parameter must fit."""
    max_in_cpu: int = Field(1_000_000_000, ge=0)
    """Elements of the parameters that stay in the memory of the CPU beside NVMe."""
    aio_block_size: int = Field(1_048_576, gt=0)
    """Bytes that are read or written at once."""
    aio_queue_depth: int = Field(8, gt=0)
    """Requests in flight."""
    aio_intra_op_parallelism: int = Field(1, gt=0)
    """Threads that share one request."""
    aio_single_submit: bool = False
    """Hand requests to the kernel one by one."""
    aio_overlap_events: bool = True
    """Hand over requests and collect finished ones at the same time."""


class ActivationConfig(OffloadConfig):
    """DeepSpeed's `activation_checkpointing`: it applies where the model calls `deepspeed.checkpointing.checkpoint`."""

    cpu_checkpointing: bool = False
    """Keep checkpointed activations in CPU memory; with `partition_activations`."""
    partition_activations: bool = False
    """Split checkpointed activations over model-parallel ranks."""
    contiguous_memory_optimization: bool = False
    """Copy partitioned activations into one block of memory."""
    synchronize_checkpoint_boundary: bool = False
    """Synchronise the device at every activation checkpoint."""


class DeepSpeedOptimizer(ConfigModel):
    """An optimizer that DeepSpeed makes, instead of the one of `configure_optimizers`."""

    type: str = Field(min_length=1)
    """DeepSpeed's name: `AdamW`, `Lamb`, `OneBitAdam`, `Muon`, ..., or a class of torch.optim."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, such as `{lr: 1e-3}`."""


class DeepSpeedScheduler(ConfigModel):
    """A learning-rate schedule that DeepSpeed makes for the optimizer of its config."""

    type: Literal["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    """DeepSpeed's name."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""


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
    `auto` insists on it on GPUs, as DeepSpeed does, and not on a CPU, where torch's runs there as well."""
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
