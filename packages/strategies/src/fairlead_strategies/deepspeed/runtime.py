"""Builds Lightning's DeepSpeed strategies, which also train on a CPU and accumulate as the trainer says.

Three things of Lightning 2.6 with DeepSpeed 0.19 are silently wrong on every device, and right here: under
`accumulate_grad_batches` the loss is divided twice, by Lightning and by DeepSpeed; the batches left over at the end of
an epoch are not stepped with, and shift every later step; and where a module steps itself less often than it calls
backward, stages 1 and 2 keep the gradients of the last batch only.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from lightning.fabric.accelerators import CPUAccelerator as FabricCPUAccelerator
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.cpp_extension import get_default_build_root

from fairlead.errors import ConfigError
from fairlead.findings import raise_errors
from fairlead.interfaces import BuildContext
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.deepspeed.full_state import gradients, optimizer_state, parameters
from fairlead_strategies.deepspeed.other_ranks import from_other_ranks
from fairlead_strategies.deepspeed.settings import conflicts, settings_of, uses_nvme

RENAMED: Final = r"`torch\.distributed\.\w+` is deprecated"
"""How torch 2.13 warns of the collectives that DeepSpeed calls, in every process, repeatedly."""
_BUILD_MINUTES: Final = 10
"""None of DeepSpeed's extensions takes as long to compile."""


class DeepSpeedStrategy(LightningDeepSpeedStrategy):
    """The Trainer's DeepSpeed strategy: on GPUs Lightning's, and the same on a CPU over gloo."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: Lightning counts the batches, and DeepSpeed is notified below when it may step.

        DeepSpeed's own count does not know where an epoch ends.
        """
        return False

    @property
    def root_device(self) -> torch.device:
        """The device of this rank; DeepSpeed wants an index, also of a CPU."""
        return torch.device("cpu", self.local_rank) if self._on_cpu else super().root_device

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    def setup_environment(self) -> None:
        """Joins the process group; on a CPU past Lightning's refusal."""
        warnings.filterwarnings("ignore", message=RENAMED, category=FutureWarning)
        if self._on_cpu:
            super(LightningDeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        """Joins the process group through DeepSpeed; a CPU has no device indices that could be wrong."""
        if not self._on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        with without_inference_kernels():
            self._init_deepspeed_distributed()

    def full_parameters(self) -> dict[str, Tensor]:
        """The weights under the names of the unsplit model, in float32 on the CPU; all ranks must call it."""
        return parameters(self.deepspeed_engine)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients, averaged over all ranks and not clipped, in float32 on the CPU; all ranks must call it.

        DeepSpeed has them from the backward of the last batch of a step on, until the step: in the hook
        `on_before_optimizer_step`. Parameters without a gradient are left out.

        Raises:
            RunFailedError: At any other time; and where the module steps itself, in stages 1 and 2, which then
                reduce gradients within the step.
        """
        return gradients(self.deepspeed_engine)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Tensor]] | None:
        """What its one optimizer holds for each parameter, in the same way; None where it lies on an NVMe."""
        return optimizer_state(self.deepspeed_engine)

    def clipping_norm(self) -> float | None:
        """The norm of all gradients that DeepSpeed has clipped the last step by; None: it is unknown."""
        norm = self.deepspeed_engine.get_global_grad_norm()
        return float(norm) if norm is not None else None

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the folder that DeepSpeed wrote, each rank its part, on any number of ranks.

        Raises:
            CheckpointError: Another ZeRO stage wrote it; or another number of ranks, and something in it cannot be
                shared anew.
        """
        folder = Path(checkpoint_path)
        optimizer = self.deepspeed_engine.optimizer
        if self.zero_stage_3 and not hasattr(optimizer, "_restore_from_bit16_weights"):
            # Outside of a fit it has no master weights, and DeepSpeed would restore them all the same.
            optimizer._restore_from_bit16_weights = lambda: None
        with from_other_ranks(self.deepspeed_engine, folder / "checkpoint", self.global_rank, self.world_size):
            return super().load_checkpoint(folder, weights_only)

    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        """Converts batch normalisation, which Lightning's strategy leaves out."""
        module = self.lightning_module
        if self._layer_sync is not None and module is not None and module.trainer.training:
            model = self._layer_sync.apply(model)
        return super()._setup_model(model)

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> tuple[Any, Optimizer]:
        engine, optimizer = super()._setup_model_and_optimizer(*args, **kwargs)
        if engine.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(True)
        return engine, optimizer

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a batch whose gradients are only added up: no step follows it."""
        engine = self.deepspeed_engine
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward with the loss as Lightning gives it, which has divided it by the number of batches already."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def _format_config(self) -> None:
        super()._format_config()
        assert isinstance(self.config, dict)
        module, zero = self.lightning_module, self.config.get("zero_optimization", {})
        if module is not None and not module.automatic_optimization and zero.get("stage") in (1, 2):
            # The module decides when to step: then a step, and not a count of batches, ends the adding up.
            self.config.setdefault("managed_gradient_accumulation", False)
            if zero["stage"] == 1:
                zero["overlap_comm"] = False  # DeepSpeed refuses both together; gradients are reduced in the step

    def _auto_select_batch_size(self) -> int:
        """For DeepSpeed's log only; Lightning's own fails on a loader without a batch sampler that says it."""
        assert self.lightning_module is not None
        source = self.lightning_module.trainer.fit_loop._data_source
        sampler = getattr(source.dataloader(), "batch_sampler", None) if source.is_defined() else None
        size = getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else 1


class FabricDeepSpeed(FabricDeepSpeedStrategy):
    """Fabric's DeepSpeed strategy: on GPUs Lightning's, and the same on a CPU over gloo."""

    @property
    def root_device(self) -> torch.device:
        """The device of this rank; DeepSpeed wants an index, also of a CPU."""
        return torch.device("cpu", self.local_rank) if self._on_cpu else super().root_device

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, FabricCPUAccelerator)

    def setup_environment(self) -> None:
        """Joins the process group; on a CPU past Lightning's refusal."""
        if self._on_cpu:
            super(FabricDeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def _setup_distributed(self) -> None:
        if not self._on_cpu:
            super()._setup_distributed()
            return
        reset_seed()
        self._set_world_ranks()
        with without_inference_kernels():
            self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads what DeepSpeed wrote, on any number of ranks; see the Trainer's strategy."""
        with from_other_ranks(self.model, Path(path, "checkpoint"), self.global_rank, self.world_size):
            return super().load_checkpoint(Path(path), *args, **kwargs)

    def full_parameters(self) -> dict[str, Tensor]:
        """The weights under the names of the unsplit model, in float32 on the CPU; all ranks must call it."""
        return parameters(self.model)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients between `fabric.backward` and the optimizer's step; see the Trainer's strategy."""
        return gradients(self.model)


@contextlib.contextmanager
def without_inference_kernels() -> Iterator[None]:
    """Opens DeepSpeed's process group without its all-reduce through shared memory.

    Only inference calls it, and it would be compiled first: 45 seconds, and a compiler on every machine.
    """
    known = deepspeed.ops.__compatible_ops__
    before = known.get("deepspeed_shm_comm", False)
    known["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        known["deepspeed_shm_comm"] = before


def build(config: DeepSpeedStrategyConfig, context: BuildContext) -> DeepSpeedStrategy | FabricDeepSpeed:
    """The strategy, which hands DeepSpeed its full configuration.

    Raises:
        ConfigError: `config` names no JSON file, it contradicts the trainer, or this machine lacks what it needs.
    """
    resolution = context.resolution
    settings = settings_of(config, resolution.device_type)
    raise_errors(conflicts(settings, resolution))
    settings.pop("gradient_accumulation_steps", None)  # it is what the trainer says, and Lightning sets it
    if resolution.device_type == "cpu" and not isinstance(get_accelerator(), CPU_Accelerator):
        set_accelerator(CPU_Accelerator())  # else DeepSpeed takes the GPUs that it sees
    _require_async_io(settings)
    _warn_of_old_locks(context.environ)
    kwargs: dict[str, Any] = {
        "config": settings,
        "process_group_backend": resolution.backend,
        "timeout": config.timeout,
        "load_full_weights": config.load_full_weights,
        "exclude_frozen_parameters": config.exclude_frozen_parameters,
        "loss_scale": config.loss_scale,
        "initial_scale_power": config.initial_scale_power,
        "loss_scale_window": config.loss_scale_window,
        "hysteresis": config.hysteresis,
        "min_loss_scale": config.min_loss_scale,
    }
    return DeepSpeedStrategy(**kwargs) if context.engine == "trainer" else FabricDeepSpeed(**kwargs)


def _require_async_io(settings: dict[str, Any]) -> None:
    if not uses_nvme(settings):
        return
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible(verbose=False):
        raise ConfigError(
            "DeepSpeed's reading and writing of NVMe (async_io) cannot be compiled on this machine",
            where="trainer.strategy",
            why="a test program that uses libaio does not compile",
            fix="apt install libaio-dev (yum install libaio-devel), or offload to the device cpu",
        )


def _warn_of_old_locks(environ: Mapping[str, str]) -> None:
    """A start that was killed while it compiled leaves its lock, and torch has every later one wait for it forever."""
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        with contextlib.suppress(OSError):  # released meanwhile
            minutes = (time.time() - lock.stat().st_mtime) / 60
            if minutes > _BUILD_MINUTES:
                warnings.warn(
                    f"{lock} is {minutes:.0f} minutes old, and DeepSpeed waits until it is removed; if nothing "
                    f"is being compiled there (a build that was killed leaves its lock): rm {lock}",
                    stacklevel=2,
                )
