"""What a LightningModule has to define to be a pipeline, and how it is read.

`pipeline_layers()` returns its layers in order, each of which takes what the one before returns; the first takes what
`forward` is given. Where it is left out, the layers are those of the one `nn.Sequential` that has all parameters.
`pipeline_loss(output, ...)` returns the loss of an output, a mean over samples. `training_step` calls `self(...)` once
and hands what that returns to `self.pipeline_loss`. `pipeline_weight(...)`, for a mean over something else, such as
the tokens that are not padding, takes what `pipeline_loss` takes without the output, and says over how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from fairlead.errors import ConfigError
from fairlead_distributed import derive_seed, isolated_rng
from fairlead_distributed._sharded import local_part
from fairlead_distributed.parallel.pipeline.pipeline import Pipeline, add_gradients
from fairlead_strategies.pipeline.stages import Split

EXAMPLE: Final = """\
def pipeline_layers(self):          # in their order; each takes what the one before returns
    return [self.embedding, *self.blocks, self.head]

def pipeline_loss(self, output, target):     # of a part of the batch: a mean over its samples
    return torch.nn.functional.cross_entropy(output, target)

def training_step(self, batch, batch_idx):
    loss = self.pipeline_loss(self(batch[0]), batch[1])
    self.log("train/loss", loss)
    return loss"""


def layers_of(module: pl.LightningModule) -> list[nn.Module]:
    """The layers of a module in their order.

    Raises:
        ConfigError: It does not say which they are, or leaves out some of its parameters.
    """
    if not callable(getattr(module, "pipeline_loss", None)):
        raise _missing(module, "it has no pipeline_loss")
    own = getattr(module, "pipeline_layers", None)
    if callable(own):
        layers = list(own())
    else:
        chains = [one for one in module.children() if any(True for _ in one.parameters())]
        if len(chains) != 1 or not isinstance(chains[0], nn.Sequential):
            raise _missing(module, "it has no pipeline_layers, and is not one torch.nn.Sequential")
        layers = list(chains[0])
    wrong = next((one for one in layers if not isinstance(one, nn.Module)), None)
    if wrong is not None or not layers:
        what = f"pipeline_layers returns a {type(wrong).__name__}" if layers else "pipeline_layers returns no layers"
        raise ConfigError(what, where=f"{type(module).__name__}.pipeline_layers", fix="return a list of modules")
    _all_there(module, layers)
    return layers


def layer_names(module: nn.Module, layers: list[nn.Module]) -> list[str]:
    """The name of each layer in the module; of one that is in no attribute of it, its class."""
    names = {id(one): name for name, one in module.named_modules()}
    return [names.get(id(layer), type(layer).__name__) for layer in layers]


def _all_there(module: pl.LightningModule, layers: list[nn.Module]) -> None:
    known = {id(one) for one in module.parameters()}
    used: dict[int, nn.Parameter] = {id(one): one for layer in layers for one in layer.parameters()}
    idle = [name for name, one in module.named_parameters() if id(one) not in used and one.requires_grad]
    if idle:
        raise ConfigError(
            f"the parameter {idle[0]} is in no layer of the pipeline"
            + (f", nor {len(idle) - 1} others" if idle[1:] else ""),
            where=f"{type(module).__name__}.pipeline_layers",
            why="it would get no gradient",
            fix="make it part of the layer that uses it, or freeze it (requires_grad_(False))",
        )
    if any(key not in known for key in used):
        raise ConfigError(
            "a layer of the pipeline has parameters that the module does not have",
            where=f"{type(module).__name__}.pipeline_layers",
            why="no optimizer and no checkpoint would know them",
            fix="make the layer in __init__ and keep it in an attribute",
        )


def _missing(module: pl.LightningModule, why: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} does not say how it is split into stages",
        where="trainer.strategy",
        why=f"{why}; a training_step cannot be split",
        fix=f"add these to it, with its own names:\n{EXAMPLE}",
    )


class Pending:
    """What `self(...)` returns in a training step: the output will be on the last stage only, part by part."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _used(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any of torch's functions."""
        raise _used(f"in {getattr(func, '__name__', func)}")

    def _operator(self, *_: Any) -> Any:
        raise _used("in an expression")

    __getitem__ = __iter__ = __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __neg__ = _operator
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __len__ = __float__ = _operator


def _used(how: str) -> ConfigError:
    return ConfigError(
        f"training_step uses the output of the model {how}",
        where="training_step",
        why="in a pipeline it is on the last stage only, a micro-batch at a time",
        fix="hand what self(...) returns to self.pipeline_loss as it is, and do the rest in there or in a last layer",
    )


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
        """Each stage draws other numbers, then all continue alike: what loaders draw afterwards is the same."""
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
        local = [] if plain else [local_part(one) for one in gradients if one is not None]
        for device in {g.device for g in local}:
            torch._foreach_mul_([g for g in local if g.device == device], scale.to(device))
        add_gradients(ctx.parameters, gradients)
        return None, None, None, None
