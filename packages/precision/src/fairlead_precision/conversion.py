"""Replaces the Linear layers of a model by those of another library, says which, and leaves out what would break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn

from fairlead.errors import ConfigError, did_you_mean

Make = Callable[[nn.Linear], nn.Linear]


@dataclass(frozen=True)
class Conversion:
    """What became of the Linear layers of a model.

    Attributes:
        converted: The names of those that were replaced.
        left: The names of those that stay as they are, each with the reason.

    Example:
        >>> print(Conversion(("body.0", "body.2"), {"head": "trainer.precision.ignore_modules"}))
        2 of 3 Linear layers converted; left as they are: head (trainer.precision.ignore_modules)
    """

    converted: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        text = f"{len(self.converted)} of {len(self.converted) + len(self.left)} Linear layers converted"
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            by_reason.setdefault(reason, []).append(name)
        parts = [f"{_some(names)} ({reason})" for reason, names in by_reason.items()]
        return f"{text}; left as they are: {', '.join(parts)}" if parts else text


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def left_out(
    module: nn.Module, ignore: Iterable[str], unfit: Callable[[str, nn.Linear], str | None], *, trains: bool
) -> Conversion:
    """Which Linear layers of a model are to be replaced, and why not the others; changes nothing.

    Args:
        module: The model.
        ignore: Names of submodules whose layers stay, `model.lm_head`; each must be there.
        unfit: The reason why a layer cannot be replaced, or None.
        trains: Whether the new layer keeps the weight itself as its parameter, so that it may be shared with others.

    Raises:
        ConfigError: A name of `ignore` is none of the model's, or no layer can be replaced.
    """
    names = [name for name, _ in module.named_modules()]
    for entry in ignore:
        if entry not in names:
            near = did_you_mean(entry, names) or next((name for name in names if name.endswith(f".{entry}")), None)
            raise ConfigError(
                f"the model has no submodule {entry!r}",
                where="trainer.precision.ignore_modules",
                why="names are written from the module that is trained on: `model.lm_head`",
                fix=f"did you mean {near!r}?" if near else "see `dict(module.named_modules())`",
            )
    users = _users(module)
    converted: list[str] = []
    left: dict[str, str] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if type(layer) is not nn.Linear:
            # Such as that in nn.MultiheadAttention, which takes its weight without calling it.
            left[name] = f"a {type(layer).__name__}, no plain Linear"
        elif any(name == entry or name.startswith(f"{entry}.") for entry in ignore):
            left[name] = "trainer.precision.ignore_modules"
        elif not trains and len(users[id(layer.weight)]) > 1:
            other = next(one for one in users[id(layer.weight)] if one != name)
            left[name] = f"its weight is also that of {other}"
        elif reason := unfit(name, layer):
            left[name] = reason
        else:
            converted.append(name)
    return Conversion(tuple(converted), left)


def _users(module: nn.Module) -> dict[int, list[str]]:
    users: dict[int, list[str]] = {}
    for name, layer in module.named_modules():
        for parameter in layer.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    return users


def refuse_none(conversion: Conversion, what: str) -> None:
    """Raises a `ConfigError` where no layer at all is converted: the user would believe that it was."""
    if not conversion.converted:
        raise ConfigError(
            f"the model has no Linear layer that can be converted: nothing would be computed by {what}",
            where="trainer.precision",
            why=str(conversion) if conversion.left else "it has no torch.nn.Linear (GPT-2 of Hugging Face has Conv1D)",
            fix="precision: bf16-mixed",
        )


def replace(module: nn.Module, names: Iterable[str], make: Make) -> None:
    """Replaces each named layer by `make(layer)`; one with several names stays one layer."""
    layers = dict(module.named_modules())
    made: dict[int, nn.Linear] = {}
    for name in names:
        old = layers[name]
        assert isinstance(old, nn.Linear)
        made[id(old)] = make(old).train(old.training)
    for parent in list(module.modules()):
        for key, child in list(parent._modules.items()):
            if child is not None and id(child) in made:
                setattr(parent, key, made[id(child)])


def no_fast_path(module: nn.Module) -> None:
    """Keeps torch's encoder layer from computing with the weights of its layers, past their `forward`.

    It does so in evaluation; the switch is torch's, for all of the process.
    """
    if any(isinstance(one, nn.TransformerEncoderLayer) for one in module.modules()):
        torch.backends.mha.set_fastpath_enabled(False)


class Converts:
    """What a precision that converts layers adds to Lightning's: once for each model, and early enough.

    Lightning converts after it has read a checkpoint's weights, which then would not fit the layers. The Trainer gets
    `callbacks`, which do it before; elsewhere (Fabric) `convert_module` is the first thing that happens anyway.
    """

    conversion: Conversion | None = None
    """What became of the model's layers; None before."""

    def convert_layers(self, module: nn.Module) -> Conversion | None:
        """Converts a model in place; None where it was converted before."""
        raise NotImplementedError

    @property
    def callbacks(self) -> tuple[pl.Callback, ...]:
        """What the Trainer has to call."""
        return (_ConvertEarly(self),)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the layers where that is still to do, and says which; then what Lightning's precision does."""
        found = self.convert_layers(module)
        if found is not None:
            self.conversion = found
            no_fast_path(module)
            _say(f"{type(self).__name__}: {found}")
        converted: nn.Module = super().convert_module(module)  # type: ignore[misc]
        return converted


class _ConvertEarly(pl.Callback):
    def __init__(self, precision: Converts) -> None:
        self._precision = precision

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Now, or where the model is made in `configure_model`, behind that."""
        if type(pl_module).configure_model is pl.LightningModule.configure_model:
            self._precision.convert_module(pl_module)
            return
        configure = pl_module.configure_model

        def then_convert() -> None:
            configure()
            self._precision.convert_module(pl_module)

        vars(pl_module)["configure_model"] = then_convert

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restores the model's own method."""
        vars(pl_module).pop("configure_model", None)


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
