"""Silent faults of distributed training, one function each: put into the process of a rank, for one training.

Each is a fault that was published of another code base (design: FIELD.md 2.1), injected where ours would have it: in
the communication hook of DDP, in what `fully_shard` does to gradients, in clipping, in accumulation. A mutation is a
context manager; what it changes is undone behind it, so that many can be tried in one start of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import fairlead_distributed.parallel._context as split_sequences
import fairlead_distributed.parallel._layers as layers
import fairlead_distributed.parallel.context as context
import fairlead_distributed.parallel.expert as expert
import fairlead_distributed.parallel.tensor as tensor
import fairlead_strategies.ddp_runtime as ddp_runtime
import fairlead_strategies.mesh.parallelize as mesh_parallelize
import fairlead_strategies.mesh.runtime as mesh_runtime
from fairlead_distributed.parallel._comm import gather_for_all, sum_over_ranks
from fairlead_distributed.parallel._local import group_of, local, read_locally
from integration_tests.verify import models, training


@contextmanager
def _ddp_hook(reduced: Callable[[Any], Tensor]) -> Iterator[None]:
    """DDP with another communication hook, which gives a bucket's gradients at once."""

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(reduced(bucket))
        return future

    # DDP reads the annotations, and takes none that are texts.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    with patch.object(ddp_runtime, "register_hook", lambda config, model: model.register_comm_hook(None, hook)):
        yield


def _summed(bucket: Any) -> Tensor:
    buffer: Tensor = bucket.buffer()
    dist.all_reduce(buffer)
    return buffer


def _mean_but_one(bucket: Any) -> Tensor:
    buffer: Tensor = bucket.buffer()
    if bucket.index() != 0:
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
    return buffer


def summed_over_replicas() -> AbstractContextManager[None]:
    """Gradients world-size times too large (torchtitan #2972)."""
    return _ddp_hook(_summed)


def bucket_not_reduced() -> AbstractContextManager[None]:
    """The gradients of one bucket stay those of each rank."""
    return _ddp_hook(_mean_but_one)


def nothing_reduced() -> AbstractContextManager[None]:
    """No gradient is reduced: each rank trains alone."""
    return _ddp_hook(lambda bucket: bucket.buffer())


@contextmanager
def _before_the_step(change: Callable[[L.LightningModule], None]) -> Iterator[None]:
    """Changes gradients when they are complete, as a fault of a reduction would."""
    real = Precision.post_backward

    def post_backward(self: Any, tensor: Tensor, module: L.LightningModule) -> Tensor:
        change(module)
        return real(self, tensor, module)

    with patch.object(Precision, "post_backward", post_backward):
        yield


@torch.no_grad()
def _scale(module: L.LightningModule, word: str, factor: float) -> None:
    for name, parameter in module.named_parameters():
        if word in name and parameter.grad is not None:
            parameter.grad.mul_(factor)


def doubled_bias() -> AbstractContextManager[None]:
    """A bias that each of two ranks adds (torchtitan #4245): its gradient is two times what it should be."""
    return _before_the_step(lambda module: _scale(module, "bias", 2.0))


def frozen_stage() -> AbstractContextManager[None]:
    """A stage that no gradient reaches."""
    return _before_the_step(lambda module: _scale(module, "blocks.0.", 0.0))


@contextmanager
def overwritten() -> Iterator[None]:
    """Each micro-batch begins with `grad = None`, so that only the last one trains (Automodel #3530)."""
    real = Precision.pre_backward

    def pre_backward(self: Any, tensor: Tensor, module: L.LightningModule) -> Any:
        for parameter in module.parameters():
            parameter.grad = None
        return real(self, tensor, module)

    with patch.object(Precision, "pre_backward", pre_backward):
        yield


@contextmanager
def accumulation_summed() -> Iterator[None]:
    """The micro-batches are added up, not averaged (DeepSpeed #7773)."""
    real = ClosureResult.from_training_step_output

    def made(cls: Any, output: Any, normalize: int = 1) -> Any:
        return real(output)

    with patch.object(ClosureResult, "from_training_step_output", classmethod(made)):
        yield


@contextmanager
def clipped_by_own_shard() -> Iterator[None]:
    """Each rank clips by the norm of what it holds (torchtune #2420)."""

    def clip(parameters: Any, max_norm: float) -> None:
        held = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in held]))
        for one in held:
            one.mul_(min(1.0, float(max_norm / (norm + 1e-6))))

    with patch.object(mesh_runtime, "clip_grad_norm", clip):
        yield


@contextmanager
def not_divided() -> Iterator[None]:
    """`fully_shard` adds the gradients of all ranks, and does not divide them."""
    real = mesh_parallelize.parallelize

    def parallelize(module: Any, *args: Any, **options: Any) -> None:
        real(module, *args, **options)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other way to this
                part.set_gradient_divide_factor(1.0)

    with patch.object(mesh_runtime, "parallelize", parallelize):
        yield


@contextmanager
def other_weights() -> Iterator[None]:
    """The ranks begin with weights of their own."""
    with patch.object(mesh_parallelize, "from_first_rank", lambda tensor, mesh, device: None):
        yield


@contextmanager
def row_bias_on_each_rank() -> Iterator[None]:
    """The bias of a row-parallel layer is added before the sum over the ranks (torchtitan #4245)."""
    real = layers.Row.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        out = real(self, input)
        bias, group = local(self.bias), group_of(self.weight)
        assert group is not None
        return out - bias + sum_over_ranks(bias, group)

    with patch.object(layers.Row, "forward", forward):
        yield


@contextmanager
def input_gradient_partial() -> Iterator[None]:
    """A column-parallel layer does not add up its input's gradient: what is before it gets a part on each rank."""
    with patch.object(layers._Entered, "enter", lambda self, x, group, sequence: x):
        yield


@contextmanager
def sequence_gradients_partial() -> Iterator[None]:
    """With split sequences, a norm's weights get the gradient of a rank's tokens alone (Megatron-LM #7452)."""
    with patch.object(tensor, "read_locally", lambda module, summed=False: read_locally(module)):
        yield


@contextmanager
def context_off() -> Iterator[None]:
    """Context parallelism is asked for and never switched on (accelerate #3856)."""
    with patch.object(context, "parallelize_context", lambda module, mesh, **settings: None):
        yield


@contextmanager
def keys_of_own_queries() -> Iterator[None]:
    """Keys and values get no gradient from the queries of other ranks (Megatron-LM #1464)."""
    with patch.object(split_sequences, "gather_for_parts", gather_for_all):
        yield


@contextmanager
def experts_summed() -> Iterator[None]:
    """Experts see the tokens of all ranks, and their gradients are not divided by how many those are."""
    with patch.object(expert, "scale_gradient", lambda x, factor: x):
        yield


@contextmanager
def experts_not_divided() -> Iterator[None]:
    """Expert parallelism is asked for and never switched on."""
    with patch.object(mesh_parallelize, "ExpertFields", ()):
        yield


@contextmanager
def step_lost() -> Iterator[None]:
    """One rank leaves the optimizer's second step out."""
    real = torch.optim.Adam.step
    made: list[int] = []

    def step(self: Any, closure: Any = None) -> Any:
        made.append(1)
        if len(made) == 2 and dist.is_initialized() and dist.get_rank() == 1:
            return closure() if closure is not None else None
        return real(self, closure)

    with patch.object(torch.optim.Adam, "step", step):
        yield


@contextmanager
def average_of_own_batches() -> Iterator[None]:
    """A buffer that follows the batches of each rank."""
    with patch.object(models.Averaging, "reduced", lambda self, mean: mean):
        yield


@contextmanager
def average_on_rank_0() -> Iterator[None]:
    """A buffer that rank 0 alone keeps."""

    def reduced(self: models.Averaging, mean: Tensor) -> Tensor:
        return mean if dist.get_rank() == 0 else self.average

    with patch.object(models.Averaging, "reduced", reduced):
        yield


@contextmanager
def same_data() -> Iterator[None]:
    """All replicas read the samples of the first one."""
    real = training.data

    def data(replica: int, *args: Any, **kwargs: Any) -> Any:
        return real(0, *args, **kwargs)

    with patch.object(training, "data", data):
        yield


@contextmanager
def parameter_missed() -> Iterator[None]:
    """The optimizer of the last rank does not have its last parameter."""
    real = torch.optim.Adam.__init__

    def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        own = list(params)
        real(self, own[:-1] if dist.get_rank() == dist.get_world_size() - 1 else own, *args, **kwargs)

    with patch.object(torch.optim.Adam, "__init__", init):
        yield


@contextmanager
def scheduled_twice() -> Iterator[None]:
    """The scheduler is stepped by the user and by Lightning."""
    real = torch.optim.lr_scheduler.LinearLR.step

    def step(self: Any, *args: Any) -> None:
        real(self, *args)
        if self.last_epoch:
            real(self, *args)

    with patch.object(torch.optim.lr_scheduler.LinearLR, "step", step):
        yield


@contextmanager
def noise_of_each_rank() -> Iterator[None]:
    """From the second step on, weights get noise by a seed of each rank."""
    real = torch.optim.Adam.step
    made: list[int] = []

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        result = real(self, closure)
        made.append(1)
        if len(made) > 1 and dist.is_initialized():
            generator = torch.Generator().manual_seed(1000 + dist.get_rank())
            for weight in self.param_groups[0]["params"]:
                held = weight.to_local() if isinstance(weight, DTensor) else weight
                held.add_(1e-3 * torch.randn(held.shape, generator=generator))
        return result

    with patch.object(torch.optim.Adam, "step", step):
        yield


@contextmanager
def clipped_by_hand() -> Iterator[None]:
    """The user clips by the norm of what the rank holds."""

    def clip(self: Any, optimizer: Any, value: Any = None, algorithm: Any = None, **_: Any) -> None:
        every = [p.grad for p in self.parameters() if p.grad is not None]
        held = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in every]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in held if one.numel()]))
        for one in held:
            one.mul_(min(1.0, 0.05 / (float(norm) + 1e-6)))

    with patch.object(L.LightningModule, "configure_gradient_clipping", clip):
        yield


def clipped_before_it_is_reduced() -> AbstractContextManager[None]:
    """Each rank clips the gradients of its own batch, and then they are averaged."""

    def reduced(bucket: Any) -> Tensor:
        buffer: Tensor = bucket.buffer()
        buffer.mul_(min(1.0, 0.05 / float(buffer.norm())))
        dist.all_reduce(buffer)
        return buffer / dist.get_world_size()

    return _ddp_hook(reduced)


@contextmanager
def positions_of_each_rank() -> Iterator[None]:
    """`torch.arange` over the tokens that a rank holds counts from 0."""
    with patch.object(split_sequences, "_counts_to", lambda length, args, kwargs: False):
        yield


@contextmanager
def later_doubled() -> Iterator[None]:
    """Gradients are doubled from the second step on, which Adam hides."""
    made: list[int] = []

    def change(module: L.LightningModule) -> None:
        made.append(1)
        _scale(module, "", 2.0 if len(made) > 1 else 1.0)

    with _before_the_step(change):
        yield


@contextmanager
def doubled_in_hook() -> Iterator[None]:
    """The user's own hook adds up over the ranks what was averaged already."""

    def hook(self: L.LightningModule, optimizer: Any) -> None:
        _scale(self, "", 2.0)

    with patch.object(models.Net, "on_before_optimizer_step", hook):
        yield


@contextmanager
def drifting_copy() -> Iterator[None]:
    """Rank 1's weights change by half a unit in the last place with each step."""
    real = torch.optim.Adam.step

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        result = real(self, closure)
        if dist.is_initialized() and dist.get_rank() == 1:
            weight = self.param_groups[0]["params"][0]
            held = weight.to_local() if isinstance(weight, DTensor) else weight
            held.mul_(1 + 1.2e-7)
        return result

    with patch.object(torch.optim.Adam, "step", step):
        yield


@contextmanager
def imaginary_part_tripled() -> Iterator[None]:
    """The imaginary part of gradients is three times too large."""

    @torch.no_grad()
    def change(module: L.LightningModule) -> None:
        for parameter in module.parameters():
            if parameter.is_complex() and parameter.grad is not None:
                parameter.grad.imag.mul_(3)

    with _before_the_step(change):
        yield


def none() -> AbstractContextManager[None]:
    """The control."""
    return nullcontext()
