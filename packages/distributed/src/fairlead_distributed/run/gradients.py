"""Gradients that a checkpoint needs, since the next step adds to them: most loops begin each step without any."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fairlead_distributed._sharded import is_dtensor, local_part


class Gradients:
    """Which gradients are saved: those that no optimizer has used yet, and used ones that the loop does not free.

    A used gradient is watched once: one that is there in the optimizer's next step was added to, or set to zero, and a
    parameter with a gradient of zero is not one without. Until that is seen, it is saved too. Where there was none to
    watch, one that a later save finds was left by what followed the step, as a generator's loss leaves some in its
    discriminator.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
        self._modules = modules
        self._optimizers = list(optimizers.values())
        self._used: set[Optimizer] = set()  # those that have stepped with what the last batch gave
        self._fresh = True  # whether none has stepped since the last boundary
        self._position: object = None
        self._watched: dict[Optimizer, list[tuple[Tensor, weakref.ref[Tensor]]]] = {}
        self._in_buckets: dict[Optimizer, dict[Tensor, RemovableHandle]] = {}
        self._seen: set[Optimizer] = set()
        self._without: set[Optimizer] = set()
        self._kept: set[int] = set()

    def watch(self) -> list[RemovableHandle]:
        """Begins to watch the optimizers' steps; returns what ends it."""
        return [one.register_step_pre_hook(self._steps) for one in self._optimizers]

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        if self._fresh:
            self._used.clear()
            self._fresh = False
        self._used.add(optimizer)
        if optimizer not in self._watched:
            return
        for parameter, gradient in self._watched.pop(optimizer):
            if (before := gradient()) is not None and before is parameter.grad:
                self._kept.add(id(parameter))
        for parameter, handle in self._in_buckets.pop(optimizer).items():
            handle.remove()
            if parameter.grad is not None:  # no backward pass has come to it
                self._kept.add(id(parameter))
        self._seen.add(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        there = [(one, one.grad) for one in _parameters(optimizer) if one.grad is not None]
        if not there:
            self._without.add(optimizer)
            return
        # DDP's buckets (gradient_as_bucket_view) outlive what is None in between: these are looked at by a hook.
        self._watched[optimizer] = [(one, weakref.ref(gradient)) for one, gradient in there if gradient._base is None]
        handles = self._in_buckets[optimizer] = {}

        def hook_of(parameter: Tensor) -> Callable[[Tensor], None]:
            def before_it_is_added(_: Tensor) -> None:
                handles.pop(parameter).remove()
                if parameter.grad is not None:
                    self._kept.add(id(parameter))

            return before_it_is_added

        for parameter, gradient in there:
            if gradient._base is not None and parameter.requires_grad:
                handles[parameter] = parameter.register_hook(hook_of(parameter))  # type: ignore[no-untyped-call]
            elif gradient._base is not None:
                self._kept.add(id(parameter))

    def boundary(self, position: object) -> None:
        """Between two steps; `position` changes with each batch and step."""
        if self._fresh and position != self._position:
            self._used.clear()  # the batches since then were used by none
        self._fresh, self._position = True, position
        for optimizer in self._used - self._seen - self._without - self._watched.keys():
            self._watch(optimizer)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The gradients to save on this rank, by module and parameter; not copied.

        Without an optimizer none: who frees them is not known, and such a run is not called exact.
        """
        owner = {id(one): optimizer for optimizer in self._optimizers for one in _parameters(optimizer)}
        free = self._used & self._seen
        return {
            name: {
                path: gradient_to_save(one)
                for path, one in module.named_parameters()
                # One that is in no optimizer as well: nothing frees its gradient, and `clip_grad_norm_` counts it.
                if one.grad is not None and (owner.get(id(one)) not in free or id(one) in self._kept)
            }
            for name, module in self._modules.items()
            if self._optimizers
        }

    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Puts back what `state` gave on a rank of this number."""
        for name, gradients in state.items():
            parameters = dict(self._modules[name].named_parameters())
            for path, saved in gradients.items():
                restore_gradient(parameters[path], saved)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (one for group in optimizer.param_groups for one in group["params"])


def gradient_to_save(parameter: Any) -> Tensor:
    """This rank's part of a gradient that is there. A collective where it is summed over ranks only when it is used."""
    gradient = parameter.grad
    if is_dtensor(gradient):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient).detach()


def restore_gradient(parameter: Any, saved: Tensor) -> None:
    """Gives a parameter, on a rank of the same number, what `gradient_to_save` returned."""
    saved = saved.to(local_part(parameter).device)
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        saved = DTensor.from_local(saved, mesh, placements, run_check=False, shape=shape, stride=stride)
    parameter.grad = saved
