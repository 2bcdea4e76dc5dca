"""What a LightningModule has to say about itself to be a pipeline, and how it is asked.

`pipeline_layers()` returns its layers in order, each of which takes what the one before returns; the first takes what
`forward` is given. Where it is left out, the layers are those of the one `nn.Sequential` that has all parameters.
`pipeline_loss(output, ...)` returns the loss of an output, a mean over samples. `training_step` calls `self(...)` once
and hands what that returns to `self.pipeline_loss`. `pipeline_weight(...)`, for a mean over something else, such as
the tokens that are not padding, takes what `pipeline_loss` takes without the output, and says over how many.
"""

from __future__ import annotations

from typing import Any, Final

import lightning.pytorch as pl
from torch import nn

from fairlead.errors import ConfigError

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
