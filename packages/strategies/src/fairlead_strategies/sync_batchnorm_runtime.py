"""Builds Lightning's TorchSyncBatchNorm; on a CPU, one whose layers compute with gloo.

Torch's SyncBatchNorm raises on CPU tensors, and DDP refuses it there.  Here the batch statistics
are summed over the ranks with a differentiable all-reduce, which is the same mathematics: with
n = sum n_r over ranks r, mean = sum x / n and var = sum (x - mean)^2 / n (Ioffe and Szegedy 2015).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchSyncBatchNorm
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_strategies.sync_batchnorm import TorchSyncBatchNormLayerSyncConfig


class _Sum(torch.autograd.Function):
    """The sum over ranks; each rank's input contributes to every rank's loss, so backward sums as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def _over_ranks(tensor: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]  # torch's `apply` is untyped
    return total


class CPUSyncBatchNorm(_BatchNorm):
    """A synchronised BatchNorm for CPUs; shapes as `torch.nn.BatchNorm1d` and its relatives.

    Not a `torch.nn.SyncBatchNorm`, because DDP refuses those on a CPU before the first step.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises with the statistics of all ranks while training, with the running ones otherwise."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        axes = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        x = input.to(torch.promote_types(input.dtype, torch.float32))  # as torch: 16 bits cannot even count the values
        count = x.new_tensor([x.numel() / x.size(1)])
        summed = _over_ranks(torch.cat([x.sum(axes), count]))
        total = summed[-1].detach()
        mean = summed[:-1] / total
        centred = x - mean.view(shape)
        var = _over_ranks((centred * centred).sum(axes)) / total
        if self.running_mean is not None:
            self._update(mean.detach(), var.detach(), total)
        normalised: Tensor = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            bias, weight = (one.to(x.dtype).view(shape) for one in (self.bias, self.weight))
            normalised = torch.addcmul(bias, normalised, weight)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        """The running statistics; the variance is the unbiased one, as in torch."""
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # torch: a cumulative average
                factor = 1.0 / float(self.num_batches_tracked)
        factor = 0.0 if factor is None else factor
        unbiased = var * total / (total - 1).clamp(min=1)
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(now.to(running.dtype), factor)


class CPUSyncBatchNormLayerSync(TorchSyncBatchNorm):
    """Lightning's layer sync for CPUs; layers are converted in place, so that references to them stay good."""

    def __init__(self) -> None:
        self._kinds: dict[_BatchNorm, type[_BatchNorm]] = {}

    def apply(self, model: Module) -> Module:
        """The same model, every BatchNorm layer synchronised; parameters and statistics are unchanged."""
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, CPUSyncBatchNorm):
                self._kinds[module] = type(module)
                module.__class__ = CPUSyncBatchNorm
        return model

    def revert(self, model: Module) -> Module:
        """The same model, its layers what they were."""
        while self._kinds:
            module, kind = self._kinds.popitem()
            module.__class__ = kind
        return model


def build(config: TorchSyncBatchNormLayerSyncConfig, context: BuildContext) -> TorchSyncBatchNorm:
    """The Trainer's layer sync for the resolved device; Fabric has no such hook."""
    if context.engine == "fabric":
        raise ConfigError(
            f"Fabric does not apply layer_sync {config.name!r}",
            where="trainer.layer_sync",
            fix="convert the model yourself: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        )
    on_cpu = context.resolution.device_type == "cpu"
    return CPUSyncBatchNormLayerSync() if on_cpu else TorchSyncBatchNorm()
