"""Gradients that a checkpoint needs, since the next step adds to them: most loops begin each step without any."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fairlead_distributed._sharded import is_dtensor


class Gradients:
    """Which gradients are saved: those that no optimizer has used yet, and used ones that the loop does not free.

    A used gradient is watched once: one that is there in the optimizer's next step was added to, or set to zero, and a
    parameter with a gradient of zero is not one without. Until that is seen, it is saved too.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
        self._modules = modules
        self._optimizers = list(optimizers.values())
        self._used: set[Optimizer] = set()  # those that have stepped with what the last batch gave
        self._fresh = True  # whether none has stepped since the last boundary
        self._position: object = None
        self._watched: dict[Optimizer, list[tuple[Tensor, weakref.ref[Tensor]]]] = {}
        self._seen: set[Optimizer] = set()
        self._kept: set[int] = set()

    def watch(self) -> list[RemovableHandle]:
        """Begins to watch the optimizers' steps; returns what ends it."""
        return [one.register_step_pre_hook(self._steps) for one in self._optimizers]

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        if self._fresh:
            self._used.clear()
            self._fresh = False
        self._used.add(optimizer)
        if optimizer in self._watched:
            for parameter, gradient in self._watched.pop(optimizer):
                if (before := gradient()) is not None and before is parameter.grad:
                    self._kept.add(id(parameter))
            self._seen.add(optimizer)

    def boundary(self, position: object) -> None:
        """Between two steps; `position` changes with each batch and step."""
        if self._fresh and position != self._position:
            self._used.clear()  # the batches since then were used by none
        self._fresh, self._position = True, position
        for optimizer in self._used - self._seen - self._watched.keys():
            # DDP's buckets outlive what is None in between (gradient_as_bucket_view).
            there = [(one, one.grad) for one in _parameters(optimizer) if one.grad is not None]
            watched = [(one, weakref.ref(gradient)) for one, gradient in there if gradient._base is None]
            if watched:
                self._watched[optimizer] = watched
            else:
                self._seen.add(optimizer)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The gradients to save on this rank, by module and parameter; not copied."""
        owner = {id(one): optimizer for optimizer in self._optimizers for one in _parameters(optimizer)}
        free = self._used & self._seen
        return {
            name: {
                path: _local(one.grad, one)
                for path, one in module.named_parameters()
                if one.grad is not None and id(one) in owner and (owner[id(one)] not in free or id(one) in self._kept)
            }
            for name, module in self._modules.items()
        }

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Puts back what `state` gave on a rank of this number."""
        for name, gradients in state.items():
            parameters = dict(self._modules[name].named_parameters())
            for path, saved in gradients.items():
                parameters[path].grad = _like(saved, parameters[path])


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _local(gradient: Any, parameter: Any) -> Tensor:
    """This rank's part of a gradient. A collective where it is summed over ranks only when it is used."""
    if is_dtensor(gradient):
        gradient = gradient.redistribute(placements=parameter.placements).to_local()
    found: Tensor = gradient.detach()
    return found


def _like(saved: Tensor, parameter: Any) -> Tensor:
    if not is_dtensor(parameter):
        return saved.to(parameter.device)
    from torch.distributed.tensor import DTensor

    local = saved.to(parameter.to_local().device)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
