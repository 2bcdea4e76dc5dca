"""A stage: layers that follow each other, on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.utils._pytree import tree_map

from fairlead.errors import ConfigError


class PipelineStage(nn.Module):
    """Layers that follow each other, on one device. Each gets what the one before returns.

    Stages that are called one after the other are the full model, also in one process: the input is brought to the
    stage's device, and gradients go back the same way. For several processes, which each hold one stage or a few, hand
    them to `Pipeline`. A layer that returns a tuple gives its parts to the next one as arguments.

    Args:
        layers: Modules in their order, such as `model.layers[8:16]`.
        device: Where they go; None: they stay where they are.

    Raises:
        ConfigError: There are no layers, or one of them is no module.

    Example:
        >>> layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        >>> first, last = PipelineStage(layers=layers[:4], device="cpu"), PipelineStage(layers=layers[4:], device="cpu")
        >>> last(first(torch.ones(2, 4))).shape
        torch.Size([2, 4])
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device | str | None = None) -> None:
        super().__init__()
        given = list(layers)
        if not given:
            raise ConfigError("a pipeline stage without layers", where="PipelineStage(layers=)")
        for number, layer in enumerate(given):
            if not isinstance(layer, nn.Module):
                raise ConfigError(
                    f"layer {number} of a pipeline stage is a {type(layer).__name__}, not a module",
                    where="PipelineStage(layers=)",
                    fix="make a torch.nn.Module of it",
                )
        self.layers = nn.ModuleList(given)
        self.device = torch.device(device) if device is not None else None
        if self.device is not None:
            self.layers.to(self.device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the last layer returns; keyword arguments go to the first layer."""
        if self.device is not None:
            inputs, kwargs = tree_map(self._here, (inputs, kwargs))
        out: Any = inputs
        for layer in self.layers:
            out = layer(*out, **kwargs) if isinstance(out, tuple) else layer(out, **kwargs)
            kwargs = {}
        return out

    def _here(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value


class RunningStage(TorchStage):
    """Torch's stage, which runs a module in torch's schedules, with three things done differently.

    The first stage takes its inputs from `inputs`, by micro-batch: any arguments, cut as the batch was cut. What is
    received lives only as long as it is needed, not for all micro-batches from the first step on. And the dry run in
    which torch learns shapes and dtypes leaves the buffers of the model (statistics of norms) as they were.
    """

    def __init__(
        self, module: nn.Module, index: int, stages: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(module, index, stages, device, group=group)
        self.inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.most_alive = 0
        """The most micro-batches whose activations were stored at the same time, since it was last set to 0."""
        self._buffers: dict[str, Tensor] = {}
        self._torch_frees = not hasattr(self, "fwd_cache")
        """Whether torch itself frees what was received, and puts the model's buffers back: so in 2.15, not in 2.13."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """What is sent has to lie in memory without gaps, and torch takes it from the graph in place: no view."""
        out = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        return out if self.is_last else tree_map(_own, out)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """One micro-batch forward."""
        if self.is_first:
            args, kwargs = self.inputs[fwd_chunk_id]
        out = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        forwards = vars(self)["_forward_chunk_states" if self._torch_frees else "fwd_cache"]
        self.most_alive = max(self.most_alive, len(forwards) + len(self.backward_state))
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """One micro-batch backward, in the formats that its forward has chosen; what it received is let go of."""
        with torch.autocast(self.device.type, enabled=False):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.bwd_cache[bwd_chunk_id] = tree_map(_without_gaps, self.bwd_cache[bwd_chunk_id])
        if not self._torch_frees:
            for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
                info.buffer = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of a backward pass that a schedule has put off."""
        with torch.autocast(self.device.type, enabled=False):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        for info in () if self._torch_frees else recv_infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        if not self._torch_frees:
            self._buffers = {name: copy.deepcopy(one) for name, one in module.named_buffers()}
        if self.is_first:
            args, kwargs = self.inputs[0]
        return tree_map(_without_gaps, super()._compute_outputs(*args, module=module, **kwargs))

    def _compute_input_grads(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(_without_gaps, super()._compute_input_grads(*args, **kwargs))

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        if self._torch_frees:
            return
        for info in (one for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()) for one in infos):
            info.buffer = None
        for name, value in self._buffers.items():
            self.submod.get_buffer(name).copy_(value)
        self._buffers = {}


def _without_gaps(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _own(value: Any) -> Any:
    value = _without_gaps(value)
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value
