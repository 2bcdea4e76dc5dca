"""Comparing a model that is split over ranks with itself in one process, in numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Loss = Callable[[nn.Module], Tensor]


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Compared:
    """How far a split model is from itself in one process.

    Attributes:
        loss: Of the first step, the difference.
        gradients: Of each parameter, the largest difference in the first step.
        weights: Of each parameter, the largest difference after the last step.
        live: Of each parameter, its largest gradient in one process.
        moved: Of each parameter, how far it moved in one process.
        forward: Collectives in the first forward pass.
        backward: Collectives in the first backward pass.
    """

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    live: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)

    def check(self, within: float = 1e-9, still: frozenset[str] = frozenset()) -> None:
        """Fails where the two differ, or where nothing happened in one process (but to what is `still`)."""
        assert self.gradients
        dead = [n for n in self.live if n not in still and (self.live[n] < 1e-7 or self.moved[n] < 1e-5)]
        assert not dead, f"nothing to see in {dead}"
        differ = {name: d for name, d in (self.gradients | {"loss": abs(self.loss)}).items() if not d <= within}
        assert not differ, f"other gradients: {differ}"
        moved = {name: d for name, d in self.weights.items() if not d <= 1e3 * within}
        assert not moved, f"other weights: {moved}"


def whole(x: Any) -> Tensor:
    """A tensor, not spread over ranks."""
    tensor: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return tensor.detach()


def compare(
    model: nn.Module,
    split: Callable[[nn.Module], object],
    loss: Loss,
    *,
    steps: int = 2,
    backward: Callable[[Tensor], object] = Tensor.backward,
    after_backward: Callable[[nn.Module], object] = lambda _: None,
    gather: Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]] = lambda _, own: own,
) -> Compared:
    """Trains a model and a split copy of it side by side.

    Args:
        model: In one process.
        split: Splits its copy, in place.
        loss: Of either.
        steps: Optimizer steps.
        backward: The split model's backward pass.
        after_backward: What is due between the split model's backward pass and its step.
        gather: From this rank's gradients or weights of the split model to those of all ranks.
    """
    ours = copy.deepcopy(model)
    split(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True) for m in (model, ours)]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = Compared()
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference = loss(model)
        reference.backward()  # type: ignore[no-untyped-call]
        with Collectives() as forward:
            value = loss(ours)
        with Collectives() as back:
            backward(value)
        after_backward(ours)
        if step == 0:
            result.loss = float(whole(value) - reference.detach())
            result.forward, result.backward = forward.counts, back.counts
            grads = gather(ours, {n: whole(p.grad) for n, p in ours.named_parameters() if p.grad is not None})
            for name, p in model.named_parameters():
                assert p.grad is not None, name
                result.live[name] = float(p.grad.abs().max())
                result.gradients[name] = float((grads[name] - p.grad).abs().max())
        for optimizer in optimizers:
            optimizer.step()
    weights = gather(ours, {n: whole(p) for n, p in ours.named_parameters()})
    for name, p in model.named_parameters():
        result.weights[name] = float((weights[name] - p.detach()).abs().max())
        result.moved[name] = float((start[name] - p.detach()).abs().max())
    return result
