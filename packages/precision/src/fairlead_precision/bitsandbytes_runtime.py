"""Linear layers of bitsandbytes whose weights really are quantised, on a CPU as on a GPU."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from fairlead import BuildContext
from fairlead.errors import ConfigError
from fairlead_distributed.objects import gather_objects
from fairlead_precision.bitsandbytes import BitsandbytesPrecisionConfig
from fairlead_precision.conversion import Conversion, Converts, left_out, refuse_none, replace

_WEIGHT = "weight"


class FourBitLinear(bnb.nn.Linear4bit):  # type: ignore[misc]
    """A Linear whose frozen weight is stored in 4 bits, two in a byte, with a scale for every 64 of them.

    Its checkpoint has the quantised weight and its scales, as bitsandbytes writes them; it reads these, and also the
    float weight of a plain Linear, which it quantises.
    """

    weight: Any  # a bnb.nn.Params4bit

    def __init__(self, linear: nn.Linear, quant_type: str, dtype: torch.dtype | None, *, double: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, quant_type=quant_type, device="meta")
        self.bias = linear.bias
        self._double = double
        self._dtype = dtype
        self.quantise(linear.weight.data)

    def quantise(self, weight: Tensor) -> None:
        """Takes a float weight, shape (out_features, in_features), and stores it in 4 bits on its device."""
        parameter = bnb.nn.Params4bit(
            weight.contiguous(),
            requires_grad=False,
            compress_statistics=self._double,
            quant_type=self.weight.quant_type,
            module=self,
        )
        self.weight = parameter.to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, computed in the compute dtype; the result has the dtype of `x`, shape (..., in).

        Unlike bitsandbytes' own it leaves the dtype of the bias alone, which an optimizer holds, and never repacks the
        weight in evaluation (AVX-512 machines), which training does not read.
        """
        dtype = self._dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        state: QuantState = self.weight.quant_state
        out: Tensor
        if x.device.type == "cpu" and self.in_features % state.blocksize:
            out = nn.functional.linear(flat, self._float_weight(state).to(dtype), bias)
        else:
            out = bnb.matmul_4bit(flat, self.weight, bias=bias, quant_state=state)
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    def _float_weight(self, state: QuantState) -> Tensor:
        """The float weight, read as one long row: with AVX-512 bitsandbytes 0.50 mixes up scales that rows share."""
        flat = copy.copy(state)
        flat.shape = torch.Size([state.shape.numel()])
        weight: Tensor = dequantize_4bit(self.weight.data, flat)
        return weight.view(state.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """bitsandbytes writes the scales, but does not read them."""
        key = f"{prefix}{_WEIGHT}"
        scales = {name: state_dict.pop(name) for name in [*state_dict] if name.startswith(f"{key}.")}
        weight = state_dict.get(key)
        if scales and weight is not None:
            state = QuantState.from_dict({name.removeprefix(f"{key}."): v for name, v in scales.items()}, weight.device)
            requested = (self.weight.quant_type, self._double)
            if (state.quant_type, bool(state.nested)) != requested:
                errors: list[str] = rest[-1]
                errors.append(
                    f"{key} is stored as {_spoken(state.quant_type, state.nested)}, not {_spoken(*requested)}"
                )
            else:
                state.to(self.weight.device)
                self.weight.quant_state = self.quant_state = state
        elif weight is not None and weight.is_floating_point():
            self.quantise(weight.to(self.weight.device))
            state_dict[key] = self.weight.data
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _spoken(quant_type: str, nested: bool) -> str:
    return f"{quant_type}-dq" if nested else quant_type


class EightBitLinear(bnb.nn.Linear8bitLt):  # type: ignore[misc]
    """A Linear whose frozen weight is stored in 8 bits, with a scale for each row (LLM.int8())."""

    def __init__(self, linear: nn.Linear, threshold: float) -> None:
        sizes = (linear.in_features, linear.out_features)
        super().__init__(*sizes, bias=False, has_fp16_weights=False, threshold=threshold, device="meta")
        self.bias = linear.bias
        self.quantise(linear.weight.data)

    def quantise(self, weight: Tensor) -> None:
        """Takes a float weight, shape (out_features, in_features), and stores it in 8 bits on its device."""
        data, scales, _ = bnb.functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
        self.weight = bnb.nn.Int8Params(data, requires_grad=False, has_fp16_weights=False)
        self.state.CB, self.state.SCB = self.weight.data, scales

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, in the dtype of `x`, shape (..., in_features)."""
        self.state.is_training = self.training
        return _matmul_8bit(x, self.weight, self.bias, self.state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EightBitLinear:
        """The scales go where the weight goes; bitsandbytes takes them along in its own `to` only."""
        super()._apply(fn, recurse)
        self.state.CB = self.weight.data
        self.state.SCB = self.state.SCB.to(self.weight.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """bitsandbytes looks for the scales where they are only until the first forward pass."""
        weight = state_dict.get(f"{prefix}{_WEIGHT}")
        scales = state_dict.pop(f"{prefix}SCB", None)
        if scales is not None:
            self.state.SCB.copy_(scales)
        elif weight is not None and weight.is_floating_point():
            self.quantise(weight.to(self.weight.device))
            state_dict[f"{prefix}{_WEIGHT}"] = self.weight.data
        super()._load_from_state_dict(state_dict, prefix, *rest)


class EightBitTrainingLinear(bnb.nn.Linear8bitLt):  # type: ignore[misc]
    """A Linear that trains its float weight, and computes with 8 bits of it, quantised anew in every forward pass."""

    def __init__(self, linear: nn.Linear, threshold: float) -> None:
        sizes = (linear.in_features, linear.out_features)
        super().__init__(*sizes, bias=False, has_fp16_weights=True, threshold=threshold, device="meta")
        self.bias = linear.bias
        self.weight = linear.weight  # the very parameter: an optimizer may hold it already

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`, in the dtype of `x`, shape (..., in_features).

        bitsandbytes keeps the 8 bits of an earlier weight in evaluation, and while a gradient is there, also one of
        zeros (`zero_grad(set_to_none=False)`): the layer would continue with what it was before the optimizer's steps.
        """
        self.state.reset_grads()
        tracked = torch.is_grad_enabled() and self.weight.requires_grad
        self.state.is_training = self.training or tracked
        return _matmul_8bit(x, self.weight if tracked else self.weight.detach(), self.bias, self.state)


def _matmul_8bit(x: Tensor, weight: Tensor, bias: Tensor | None, state: Any) -> Tensor:
    # Flat: on a CPU the backward pass of bitsandbytes takes two dimensions only.
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = bnb.matmul(flat, weight, bias=None if bias is None else bias.to(x.dtype), state=state)
    return out.reshape(*x.shape[:-1], -1)


LAYERS = (FourBitLinear, EightBitLinear, EightBitTrainingLinear)


def convert(
    module: nn.Module, config: BitsandbytesPrecisionConfig, dtype: torch.dtype | None = None
) -> Conversion | None:
    """Replaces the Linear layers of a model in place; None where that was done before.

    Args:
        module: The model, with its weights.
        config: Which layers, and how.
        dtype: What 4-bit layers compute in; None: what comes in.

    Raises:
        ConfigError: There is no layer to convert, `ignore_modules` names none, or the ranks hold different weights.
    """
    if any(isinstance(one, LAYERS) for one in module.modules()):
        return None
    trains = config.mode == "int8-training"
    conversion = left_out(module, config.ignore_modules, _unfit, trains=trains)
    if not any(isinstance(one, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)) for one in module.modules()):
        refuse_none(conversion, "bitsandbytes")
    if not trains:
        _refuse_different(module, conversion.converted)
    replace(module, conversion.converted, lambda linear: _layer(linear, config, dtype))
    return conversion


def _layer(linear: nn.Linear, config: BitsandbytesPrecisionConfig, dtype: torch.dtype | None) -> nn.Linear:
    made: nn.Linear
    if config.mode == "int8-training":
        made = EightBitTrainingLinear(linear, config.threshold)
    elif config.mode == "int8":
        made = EightBitLinear(linear, config.threshold)
    else:
        made = FourBitLinear(linear, config.mode[:3], dtype, double=config.mode.endswith("-dq"))
    return made


def _unfit(name: str, layer: nn.Linear) -> str | None:
    return "its weight is on the meta device, without values" if layer.weight.is_meta else None


def _refuse_different(module: nn.Module, names: tuple[str, ...]) -> None:
    """DDP sends the weights of rank 0 to all, but would not send the scales that belong to them."""
    digest = hashlib.sha256()
    for name in names:
        weight = module.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    found = gather_objects(digest.hexdigest())
    if len(set(found)) > 1:
        rank = next(rank for rank, one in enumerate(found) if one != found[0])
        raise ConfigError(
            f"rank {rank} has other weights than rank 0 before they are quantised",
            where="trainer.precision",
            why="each rank would keep scales of its own",
            fix="trainer.seed_everything: 0 in every rank, or load the same weights",
        )


class _Quantises(Converts):
    def __init__(self, config: BitsandbytesPrecisionConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._config = config
        self._dtype = dtype

    def convert_layers(self, module: nn.Module) -> Conversion | None:
        return convert(module, self._config, self._dtype)


class BitsandbytesPrecision(_Quantises, Precision):
    """For the Trainer."""


class FabricBitsandbytesPrecision(_Quantises, FabricPrecision):
    """For Fabric."""


class _Quiet(logging.Filter):
    """Lets nothing through about inputs that are cast to float16 to be quantised: each forward pass repeats it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "inputs will be cast" not in record.getMessage()


def build(config: BitsandbytesPrecisionConfig, context: BuildContext) -> Any:
    """The precision for the engine."""
    messages = logging.getLogger("bitsandbytes.autograd._functions")
    if not any(isinstance(one, _Quiet) for one in messages.filters):
        messages.addFilter(_Quiet())
    kind = BitsandbytesPrecision if context.engine == "trainer" else FabricBitsandbytesPrecision
    return kind(config, _compute_dtype(config, context.resolution.device_type))


def _compute_dtype(config: BitsandbytesPrecisionConfig, device_type: str) -> torch.dtype | None:
    if config.dtype is not None:
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    if device_type != "cuda" or config.mode.startswith("int8"):
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
