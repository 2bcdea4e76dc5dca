"""What a step would call on a GPU, in a trace on a machine that has none.

A build of torch for CPUs refuses tensors of the device `cuda`, even without data. So a trace is of the CPU's operators,
but where those of a GPU differ in what they keep or compute in: attention in one kernel, dropout with a mask of bytes,
and functions that autocast calls in float32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_IN_FLOAT32: Final = frozenset(
    # Of torch's autocast_mode.h: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, as far as models call them.
    [
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "pow",
        "__pow__",
        "__rpow__",
        "softplus",
        "layer_norm",
        "group_norm",
        "cdist",
        "cosine_similarity",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "renorm",
        "logsumexp",
        "softmax",
        "log_softmax",
        "cross_entropy",
        "nll_loss",
        "norm",
    ]
)


_SUMMED_IN_FLOAT32: Final = frozenset(("sum", "prod", "cumsum", "cumprod"))
"""Read what they are given as it is, and give float32."""


@torch.library.custom_op("fairlead_planning::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("there is a shape of it only")  # pragma: no cover


@_attention.register_fake
def _shape(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    # As the kernels of FlashAttention lay it out: the heads beside each other, so that the result is joined by a view.
    batch, heads, length = q.shape[0], q.shape[-3], q.shape[-2]
    out = q.new_empty(*q.shape[:-3], length, heads, v.shape[-1]).transpose(-3, -2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("fairlead_planning::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("there is a shape of it only")  # pragma: no cover


@_attention_backward.register_fake
def _shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    return (*_attention_backward(grad, *ctx.saved_tensors, ctx.causal), None)


_attention.register_autograd(_backward, setup_context=_keep)


class CudaOperators(TorchFunctionMode):
    """Within it functions do what they would do with tensors on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function, or what stands for it on a GPU."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.dropout or func is torch.dropout:
            return _drop(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            name = getattr(func, "__name__", "")
            if name in _IN_FLOAT32:
                args = tuple(_float(one) for one in args)
            elif name in _SUMMED_IN_FLOAT32 and kwargs.get("dtype") is None and _is_low(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del (
            scale,
            enable_gqa,
            dropout_p,
            attn_mask,
        )  # none changes what is saved for the backward pass; a mask is saved by its maker
        if torch.is_autocast_enabled("cpu"):
            kind = torch.get_autocast_dtype("cpu")
            query, key, value = (one.to(kind) for one in (query, key, value))
        out: Tensor = _attention(query, key, value, is_causal)[0]
        return out


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    del inplace
    return torch.native_dropout(input, p, True)[0]


def _float(value: Any) -> Any:
    return value.float() if _is_low(value) else value


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
