"""Silent faults of pipelines, injected into ours: in the schedule's scale, in the hand-over of gradients, in clipping.

As in `mutations.py`, each is a context manager for one training of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

import fairlead_distributed.parallel.pipeline.pipeline as pipeline
import fairlead_strategies.pipeline.gathering as optimizers
import fairlead_strategies.pipeline.model as model
import fairlead_strategies.pipeline.runtime as runtime
from fairlead_distributed import clip_grad_norm
from fairlead_distributed.parallel.pipeline import Pipeline, clip_grad_norm_over_stages
from fairlead_distributed.parallel.pipeline.pipeline import schedule_class
from fairlead_distributed.parallel.pipeline.stage import RunningStage
from fairlead_strategies.pipeline.runtime import PipelineStrategy


@contextmanager
def summed_over_micro_batches() -> Iterator[None]:
    """The losses of the micro-batches are added up, not averaged; the loss that is reported stays right."""
    real = Pipeline._micro_loss

    def micro_loss(self: Any, output: Any, index: Tensor | int) -> Tensor:
        self._scales[int(index)] = 1.0
        return real(self, output, index)

    with patch.object(Pipeline, "_micro_loss", micro_loss):
        yield


@contextmanager
def divided_twice() -> Iterator[None]:
    """Torch's schedule divides by the micro-batches once more (`scale_grads=True`)."""

    def scaling(*args: Any) -> Any:
        return lambda *stages, **settings: schedule_class(*args)(*stages, **{**settings, "scale_grads": True})

    with patch.object(pipeline, "schedule_class", scaling):
        yield


@contextmanager
def moving_average() -> Iterator[None]:
    """The scale meets what earlier batches of a step have left in `.grad` as well (torchtitan #1733)."""

    def halved(parameters: Any, gradients: Any) -> None:
        pipeline.add_gradients(parameters, gradients)
        for one in parameters:
            if one.grad is not None:
                one.grad.div_(2)

    with patch.object(model, "add_gradients", halved):
        yield


@contextmanager
def overwritten() -> Iterator[None]:
    """Each micro-batch begins with `grad = None`, so that only the last one trains (Automodel #3530)."""
    real = RunningStage.backward_one_chunk

    def backward_one_chunk(self: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.submod.parameters():
            parameter.grad = None
        real(self, *args, **kwargs)

    with patch.object(RunningStage, "backward_one_chunk", backward_one_chunk):
        yield


@contextmanager
def frozen(stage: int = 1) -> Iterator[None]:
    """What the backward pass of one rank has found is not handed to its parameters."""

    def by_others(parameters: Any, gradients: Any) -> None:
        if dist.get_rank() != stage:
            pipeline.add_gradients(parameters, gradients)

    with patch.object(model, "add_gradients", by_others):
        yield


def frozen_first() -> AbstractContextManager[None]:
    """The same of the first rank, which reports."""
    return frozen(0)


@contextmanager
def tied_apart() -> Iterator[None]:
    """A weight that two stages hold gets, on each, the gradient of its own use alone."""
    with patch.object(pipeline, "add_up", lambda tied: None):
        yield


@contextmanager
def clipped_by_own_stage() -> Iterator[None]:
    """Each rank clips by the norm of its own stage."""

    def clip(self: Any, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm(self.precision_plugin.main_params(optimizer), clip_val)

    with patch.object(PipelineStrategy, "_clip_by_norm", clip):
        yield


@contextmanager
def tied_counted_twice() -> Iterator[None]:
    """The norm counts a weight once for each stage that holds it."""

    def clip(parameters: Any, max_norm: float, *, group: Any, copies: Any, stage: Any) -> Tensor:
        return clip_grad_norm_over_stages([*parameters, *copies], max_norm, group=group)

    with patch.object(runtime, "clip_grad_norm_over_stages", clip):
        yield


@contextmanager
def copy_not_stepped() -> Iterator[None]:
    """The second stage's copy of a weight is in no optimizer: the two come apart."""
    real = optimizers.keep_own

    def keep_own(optimizer: Any, own: set[int]) -> None:
        real(optimizer, own)
        if dist.get_rank() == 1:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p.shape != (12, 6)]

    with patch.object(runtime, "keep_own", keep_own):
        yield
