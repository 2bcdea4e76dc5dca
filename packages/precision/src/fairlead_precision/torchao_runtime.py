"""Linear layers that compute in 8-bit floating point, by torchao."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear as TorchAOLinear
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

from fairlead import BuildContext
from fairlead_precision.conversion import Conversion, Converts, left_out, refuse_none
from fairlead_precision.hardware import refuse_without_fp8
from fairlead_precision.torchao import TorchAOFloat8PrecisionConfig

MULTIPLE = 16
"""Of what 8-bit matrix units take (cuBLAS, `torch._scaled_mm`)."""
_DONE = "_fairlead_float8"


def convert(module: nn.Module, config: TorchAOFloat8PrecisionConfig, *, emulate: bool) -> Conversion | None:
    """Replaces the Linear layers of a model in place, with their parameters; None where that was done before.

    Raises:
        ConfigError: There is no layer to convert, or `ignore_modules` names none.
    """
    if getattr(module, _DONE, False):
        return None
    linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    ends = {linears[0], linears[-1]} if config.skip_first_and_last and linears else set()

    in_mixtures = {
        id(part)
        for mixture in module.modules()
        if isinstance(experts := getattr(mixture, "experts", None), nn.ModuleList)
        for part in experts.modules()
    }

    def unfit(name: str, layer: nn.Linear) -> str | None:
        if id(layer) in in_mixtures:
            return "an expert, which gets any number of tokens, also none"
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
    for name in chosen:
        module.get_submodule(name).__class__ = Float8Linear
    setattr(module, _DONE, True)
    return conversion


class Float8Linear(TorchAOLinear):  # type: ignore[misc]
    """torchao's layer, which computes with a part of its weight as well, and follows autocast on CPUs too."""

    multiple = MULTIPLE
    """Of what the sizes of such a part are to be multiples."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The forward pass, with a weight (out, in) and a bias (out) that may be a rank's part."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        out: Tensor = matmul_with_hp_or_float8_args.apply(input, weight.t(), self.linear_mm_config, self.config)
        return out if bias is None else out + bias.to(out.dtype)


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
        return convert(module, self._config, emulate=self._on_cpu or self._config.emulate)


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
