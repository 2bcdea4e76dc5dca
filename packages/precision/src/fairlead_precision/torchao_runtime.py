"""Linear layers that compute in 8-bit floating point, by torchao."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fairlead import BuildContext
from fairlead_precision.conversion import Conversion, Converts, left_out, refuse_none
from fairlead_precision.hardware import refuse_without_fp8
from fairlead_precision.torchao import TorchAOFloat8PrecisionConfig

MULTIPLE = 16
"""Of what 8-bit matrix units take (cuBLAS, `torch._scaled_mm`)."""
_DONE = "_fairlead_float8"


def convert(module: nn.Module, config: TorchAOFloat8PrecisionConfig, *, emulate: bool) -> Conversion | None:
    """Replaces the Linear layers of a model in place, keeping their parameters; None where that was done before.

    Raises:
        ConfigError: There is no layer to convert, or `ignore_modules` names none.
    """
    if getattr(module, _DONE, False):
        return None
    linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    ends = {linears[0], linears[-1]} if config.skip_first_and_last and linears else set()

    def unfit(name: str, layer: nn.Linear) -> str | None:
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            return f"a size that is no multiple of {MULTIPLE}"
        return "the first or last: skip_first_and_last" if name in ends else None

    conversion = left_out(module, config.ignore_modules, unfit, trains=True)
    refuse_none(conversion, "8-bit floating point")
    recipe = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(config.recipe), emulate=emulate, pad_inner_dim=config.pad_inner_dim
    )
    chosen = set(conversion.converted)
    convert_to_float8_training(module, config=recipe, module_filter_fn=lambda layer, name: name in chosen)
    setattr(module, _DONE, True)
    return conversion


class _Float8(Converts):
    """What computes in 8 bits, added to Lightning's precision of everything else."""

    def __init__(self, config: TorchAOFloat8PrecisionConfig, family: str, device: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._made_of = (config, family, device)
        self._config = config
        self._on_cpu = device == "cpu"

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, self._made_of  # its class is made as well, and `ddp_spawn` pickles it

    def convert_layers(self, module: nn.Module) -> Conversion | None:
        found = convert(module, self._config, emulate=self._on_cpu or self._config.emulate)
        if found is not None and self._on_cpu:
            for name in found.converted:
                module.get_submodule(name).register_forward_pre_hook(_autocast_on_cpu)
        return found


def _autocast_on_cpu(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """torchao's layer does to its input what autocast does to that of a Linear, but for CUDA only."""
    if torch.is_autocast_enabled("cpu"):
        return (inputs[0].to(torch.get_autocast_dtype("cpu")), *inputs[1:])
    return None


def _class(family: str, base: str) -> type[_Float8]:
    precisions = importlib.import_module(f"lightning.{family}.plugins.precision")
    return type("TorchAOFloat8Precision", (_Float8, getattr(precisions, base)), {})


def _make(config: TorchAOFloat8PrecisionConfig, family: str, device: str) -> _Float8:
    base, arguments = {
        "bf16-mixed": ("MixedPrecision", ("bf16-mixed", device)),
        "bf16-true": ("HalfPrecision", ("bf16-true",)),
        "32-true": ("Precision", ()),
    }[config.compute]
    return _class(family, base)(config, family, device, *arguments)


def build(config: TorchAOFloat8PrecisionConfig, context: BuildContext) -> Any:
    """The precision for the engine; raises where a GPU has no 8-bit units and is not to emulate them."""
    if not config.emulate:
        refuse_without_fp8()
    family = "pytorch" if context.engine == "trainer" else "fabric"
    return _make(config, family, context.resolution.device_type)
