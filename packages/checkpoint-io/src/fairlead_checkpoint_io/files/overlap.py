"""Copies from GPUs that go on while the next step computes.

Only the states of optimizers are copied so, most of what Adam's checkpoints hold: nothing but the step of their
optimizer changes them, so that one hook is enough.  Weights and buffers are copied before the GPU computes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class OverlappedCopies:
    """A second stream for each GPU; an optimizer that would overwrite what is being copied is held.

    It learns of an optimizer when that makes a step, so the first save knows none.  The host is never held: the
    GPU waits, in front of the update, behind the forward and backward of the step.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._own: set[int] = set()
        self._copies: list[torch.cuda.Event] = []
        self._hook: RemovableHandle | None = None

    def begin(self) -> None:
        """A save begins: looks which memory belongs to optimizers, and watches their steps from now on."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        self.watch()
        self._own = {address for optimizer in self._optimizers for address in storages_of(optimizer)}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def watch(self) -> None:
        """Learns of optimizers by their steps, and holds those steps, until `end`."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def stream(self, source: torch.UntypedStorage) -> torch.cuda.Stream | None:
        """The stream to copy a GPU's memory in; None: the one that computes."""
        if source.data_ptr() not in self._own:
            return None
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(source.device))
        return stream

    def hold(self, event: torch.cuda.Event) -> None:
        """No optimizer updates anything before this event."""
        self._copies.append(event)

    def end(self) -> None:
        """Watches no steps any more; those that come wait for nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure computes before it is updated, as Lightning's does: only the update is held."""
        self._optimizers.add(optimizer)
        if not self._copies:
            return None
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._then_held(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:  # args[0] is the optimizer
            return (args[0], self._then_held(args[1]), *args[2:]), kwargs
        self._wait()
        return None

    def _then_held(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def held() -> Any:
            result = closure()
            self._wait()
            return result

        return held

    def _wait(self) -> None:
        copies, self._copies = self._copies, []
        for event in copies:
            torch.cuda.current_stream(event.device).wait_event(event)


def storages_of(optimizer: Optimizer, device_type: str = "cuda") -> set[int]:
    """The addresses of the memory that only this optimizer's step changes: its state, not its parameters."""
    leaves = tree_leaves(list(optimizer.state.values()))
    state = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == device_type]
    shared = {_address(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return {_address(tensor) for tensor in state} - shared


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
