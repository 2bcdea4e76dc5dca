"""Silent faults of DeepSpeed, and of Lightning's strategy for it, injected into ours.

As in `mutations.py`, each is a context manager for one training of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from torch import Tensor

from fairlead_strategies.deepspeed.runtime import DeepSpeedStrategy


@contextmanager
def divided_twice() -> Iterator[None]:
    """Lightning's own: it divides the loss by the batches of a step, and so does DeepSpeed."""
    with patch.object(DeepSpeedStrategy, "backward", LightningDeepSpeedStrategy.backward):
        yield


@contextmanager
def not_reduced() -> Iterator[None]:
    """Stages 1 and 2: each rank keeps its part of its own gradient, and nothing is sent."""

    def own(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        return self.flatten(bucket)

    with patch.object(DeepSpeedZeroOptimizer, "allreduce_bucket", own):
        yield


@contextmanager
def not_reduced_3() -> Iterator[None]:
    """The same of stage 3."""

    def reduce_scatter(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
        rank, count = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        size = [-(-one.numel() // count) for one in tensors]
        return [one.view(-1)[rank * n : rank * n + n].clone() for one, n in zip(tensors, size, strict=True)]

    with patch.object(stage3, "reduce_scatter_coalesced", reduce_scatter):
        yield


@contextmanager
def summed() -> Iterator[None]:
    """Stages 1 and 2: the gradients of the ranks are added up, not averaged."""
    real = DeepSpeedZeroOptimizer.average_tensor

    def average_tensor(self: Any, tensor: Tensor, dtype: torch.dtype) -> None:
        with patch.object(self, "gradient_average", False):
            real(self, tensor, dtype)

    with patch.object(DeepSpeedZeroOptimizer, "average_tensor", average_tensor):
        yield


@contextmanager
def clipped_before_the_division() -> Iterator[None]:
    """The norm is of gradients that are not divided by the batches of a step yet."""
    real = DeepSpeedZeroOptimizer.scaled_global_norm

    def norm(self: Any, norm_type: int = 2) -> Any:
        return real(self, norm_type) * 3  # the cases that use it have three

    with patch.object(DeepSpeedZeroOptimizer, "scaled_global_norm", norm):
        yield


@contextmanager
def clipped_by_own_shard() -> Iterator[None]:
    """Stage 3: each rank clips by the norm of its own shards."""
    real = DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct

    def norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patch.object(stage3.dist, "all_reduce"):
            return real(self, *args, **kwargs)

    with patch.object(DeepSpeedZeroOptimizer_Stage3, "get_grad_norm_direct", norm):
        yield


@contextmanager
def rest_of_the_epoch_dropped() -> Iterator[None]:
    """DeepSpeed counts the batches by itself: those left over at the end of an epoch are not stepped with."""
    real = DeepSpeedEngine.step
    made: list[int] = []
    backward = DeepSpeedEngine.backward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return backward(self, *args, **kwargs)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(made) % self.gradient_accumulation_steps():
            return None
        return real(self, *args, **kwargs)

    with patch.object(DeepSpeedEngine, "backward", counted), patch.object(DeepSpeedEngine, "step", step):
        yield


@contextmanager
def later_doubled() -> Iterator[None]:
    """The loss is doubled from the second step on, which Adam hides."""
    real = DeepSpeedEngine.backward
    made: list[int] = []

    def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return real(self, loss * (2 if len(made) > 1 else 1), *args, **kwargs)

    with patch.object(DeepSpeedEngine, "backward", backward):
        yield


@contextmanager
def doubled_in_hook() -> Iterator[None]:
    """The user doubles the loss where there are ranks."""
    real = DeepSpeedEngine.backward

    def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(self, loss * 2, *args, **kwargs)

    with patch.object(DeepSpeedEngine, "backward", backward):
        yield
