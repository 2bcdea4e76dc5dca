"""What a module has beside its `state_dict`, on each rank: torchmetrics' sums, buffers, what is frozen."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import prune

from fairlead_distributed._sharded import is_dtensor


def module_state(module: Module, *, buffers: bool) -> dict[str, Any]:
    """The state on this rank of a module, which is not what a strategy has wrapped it in: plain data and tensors.

    Each rank of data parallel training has its own buffers (batch norm), and a `state_dict` has those of one.
    """
    return {
        "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
        "buffers": {name: buffer.detach() for name, buffer in _buffers(module)} if buffers else {},
        "in_evaluation": [name for name, one in module.named_modules() if not one.training],
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "pruned": {name: (original.detach(), mask) for name, original, mask in _pruned(module)},
    }


@torch.no_grad()
def restore_module(module: Module, state: Mapping[str, Any]) -> None:
    """Puts back what `module_state` gave on a rank of this number, after the `state_dict`."""
    metrics, buffers = dict(_metrics(module)), dict(_buffers(module))
    for name, saved in state["metrics"].items():
        if name in metrics:
            _set_metric_state(metrics[name], saved)
    for name, buffer in state["buffers"].items():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffers[name].copy_(buffer)
    for name, (original, mask) in state.get("pruned", {}).items():
        path, _, parameter = name.rpartition(".")
        owner = module.get_submodule(path)
        if not hasattr(owner, f"{parameter}_mask"):
            prune.custom_from_mask(owner, parameter, mask)  # type: ignore[no-untyped-call]
        getattr(owner, f"{parameter}_orig").copy_(original)
        getattr(owner, f"{parameter}_mask").copy_(mask)
    restore_flags(module, state)


def restore_flags(module: Module, state: Mapping[str, Any]) -> None:
    """Puts back what is the same on every rank: which parts are in evaluation mode, which parameters are frozen."""
    evaluated, frozen = set(state["in_evaluation"]), set(state["frozen"])
    for name, one in module.named_modules():
        one.training = name not in evaluated
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)


def is_metric(module: Module) -> bool:
    """Whether it is one of torchmetrics; where that was not imported, there can be none."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def _metrics(module: Module) -> Iterator[tuple[str, Any]]:
    return ((name, one) for name, one in module.named_modules() if is_metric(one))


def _metric_state(metric: Any) -> dict[str, Any]:
    values = {key: list(value) if isinstance(value, list) else value for key, value in metric.metric_state.items()}
    return {"values": values, "updates": metric.update_count}


def _set_metric_state(metric: Any, saved: Mapping[str, Any]) -> None:
    for key, value in saved["values"].items():
        moved = [one.to(metric.device) for one in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, key, moved)
    metric._update_count = saved["updates"]  # torchmetrics has no public way
    metric._computed = None


def _pruned(module: Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Parameters that torch prunes: name, what is trained, its mask; a state_dict can have their product only."""
    for path, one in module.named_modules():
        for mask in [name for name, _ in one.named_buffers(recurse=False) if name.endswith("_mask")]:
            parameter = mask.removesuffix("_mask")
            if f"{parameter}_orig" in one._parameters:
                yield f"{path}.{parameter}", getattr(one, f"{parameter}_orig"), getattr(one, mask)


def _buffers(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a `state_dict` holds, but those of metrics, which are saved elsewhere."""
    for prefix, one in module.named_modules():
        if is_metric(one):
            continue
        left_out: set[str] = getattr(one, "_non_persistent_buffers_set", set())
        for name, buffer in one.named_buffers(recurse=False):
            if name not in left_out and not is_dtensor(buffer):
                yield f"{prefix}.{name}".lstrip("."), buffer
