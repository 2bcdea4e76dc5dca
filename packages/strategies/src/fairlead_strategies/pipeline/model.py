"""A LightningModule that runs as a pipeline: its `forward` and `pipeline_loss` go through all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from fairlead.errors import ConfigError
from fairlead_distributed import derive_seed, isolated_rng
from fairlead_distributed._sharded import is_dtensor
from fairlead_distributed.parallel.pipeline.pipeline import Pipeline, add_gradients
from fairlead_strategies.pipeline.contract import Pending
from fairlead_strategies.pipeline.stages import Split

Target = tuple[tuple[Any, ...], dict[str, Any]]


class PipelinedModule:
    """Has a module's own steps run as a pipeline, as long as it is attached.

    In a training step `self(...)` only takes note of its input, and `self.pipeline_loss(output, ...)` then runs all
    micro-batches forward and backward, and returns the loss. Its backward pass hands the gradients over: scaled by
    whatever the loss was multiplied with meanwhile, such as Lightning's 1 / accumulate_grad_batches. Anywhere else
    `self(...)` runs forward through all stages and returns the output on all ranks.

    Args:
        module: The module, of which each rank has its stages.
        split: How it was cut.
        make: Makes the pipeline from the loss and the weight of micro-batches.
    """

    def __init__(self, module: pl.LightningModule, split: Split, make: Callable[[Any, Any], Pipeline]) -> None:
        self.module, self.split = module, split
        own: Any = module
        self._loss: Callable[..., Tensor] = own.pipeline_loss
        self._weight: Callable[..., Any] | None = getattr(module, "pipeline_weight", None)
        self.pipeline = make(self._loss_of, self._weight_of if self._weight is not None else None)
        self._training = self._ran = False
        vars(module).update(forward=self.forward, pipeline_loss=self.pipeline_loss)

    @classmethod
    def of(cls, module: pl.LightningModule) -> PipelinedModule | None:
        """What is attached to a module."""
        found = getattr(vars(module).get("forward"), "__self__", None)
        return found if isinstance(found, cls) else None

    def detach(self) -> None:
        """Gives the module its own methods back."""
        for name in ("forward", "pipeline_loss"):
            vars(self.module).pop(name, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `self(...)` does."""
        if self._training:
            return Pending(args, kwargs)
        with self._random():
            return self.pipeline.forward(*args, **kwargs)

    def pipeline_loss(self, output: Any, *target: Any, **named: Any) -> Tensor:
        """What `self.pipeline_loss(...)` does."""
        if not isinstance(output, Pending):
            return self._loss(output, *target, **named)
        with self._random():
            loss, gradients = self.pipeline.gradients(*output.args, target=(target, named), **output.kwargs)
        self._ran = True
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        handed: Tensor = _HandOver.apply(anchor, loss, self.pipeline.parameters, gradients)  # type: ignore[no-untyped-call]
        return handed

    @contextmanager
    def training(self) -> Iterator[None]:
        """A training step runs inside the block.

        Raises:
            ConfigError: It has not run the pipeline.
        """
        self._training, self._ran = True, False
        try:
            yield
            if not self._ran:
                raise ConfigError(
                    "training_step has not computed the loss with self.pipeline_loss(self(...), ...)",
                    where=f"{type(self.module).__name__}.training_step",
                    why="nothing was trained",
                    fix="loss = self.pipeline_loss(self(inputs), targets)",
                )
        finally:
            self._training = False

    def _loss_of(self, output: Any, target: Target) -> Tensor:
        args, named = target
        return self._loss(output, *args, **named)

    def _weight_of(self, target: Target) -> Any:
        assert self._weight is not None
        args, named = target
        return self._weight(*args, **named)

    @contextmanager
    def _random(self) -> Iterator[None]:
        """Each stage draws numbers of its own, and all go on as one: what loaders draw afterwards is the same."""
        seed = int(torch.randint(2**62, ()))
        with isolated_rng(derive_seed("stage", seed, self.pipeline.rank)):
            yield


class _HandOver(torch.autograd.Function):
    """A loss whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, parameters: list[nn.Parameter], gradients: Any) -> Tensor:
        ctx.parameters, ctx.gradients = parameters, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise ConfigError("the loss of a pipeline is taken backward a second time", where="training_step")
        scale = scales[0]
        plain = scale.device.type == "cpu" and float(scale) == 1.0  # a GPU would be waited for
        local = [] if plain else [g.to_local() if is_dtensor(g) else g for g in gradients if g is not None]
        for device in {g.device for g in local}:
            torch._foreach_mul_([g for g in local if g.device == device], scale.to(device))
        add_gradients(ctx.parameters, gradients)
        return None, None, None, None
