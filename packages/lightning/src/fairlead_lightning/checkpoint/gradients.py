"""Gradients that are no numbers: which, since which step, and which rank's batch they come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

SCALED: Final = 20
"""Steps in a row that a gradient scaler may skip: its usual first scale of 65536 is below 1 after 17."""


FEW: Final = 1 << 14
"""Elements that are looked at in every step: a pass over all gradients would cost a step of DDP 4 %."""


class GradientWatch:
    """Looks at gradients before each step of an optimizer, and remembers the first that is not finite.

    In every step at those of the smallest parameters, biases and gains, together `FEW` elements: where a backward pass
    meets a value that is not finite, those of all layers before it are not finite either. At all of them where that is
    so, and where the caller asks for it. On an accelerator nothing waits for the device: it counts there until `found`
    is asked.
    """

    def __init__(self) -> None:
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._own_hook: Any = None
        self.begin(None)

    def begin(self, module: nn.Module | None, *, several_batches: bool = False) -> None:
        """A training of this module begins; `several_batches`: ranks have other ones than this one."""
        if self._own_hook is not None:
            self._own_hook.remove()
            self._own_hook = None
        self._row: int | Tensor = 0
        self._since: int | Tensor = 0
        self._first: Tensor | None = None
        self._own: bool | Tensor = False
        self._own_first: bool | Tensor = False
        self._weights = [] if module is None else [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._few = _smallest([parameter for _, parameter in self._weights])
        if several_batches and self._weights:
            # The ranks' mean does not say whose it was. This rank's own part passes here before: the gradient of the
            # first small parameter of a layer, one of the last that are computed.
            few: list[tuple[str, Any]] = [self._weights[index] for index in self._few]
            first = next((parameter for name, parameter in few if "." in name), few[0][1])
            self._own_hook = first.register_hook(self._see_own)

    def _see_own(self, grad: Tensor) -> None:
        own = _local(grad)
        if own is not None and own.numel() and not _surely_finite([own]):
            self._own = self._own | ~_largest([own])[0].isfinite()

    @torch.no_grad()
    def look(self, step: int, *, at_all: bool = True) -> None:
        """The gradients are those of the step: unscaled, and the mean over the ranks."""
        given = [parameter.grad for _, parameter in self._weights]
        few = given if at_all else [given[index] for index in self._few]
        quiet = not isinstance(self._row, Tensor) and not self._row  # asking a device would wait for it
        if quiet and _surely_finite([grad for grad in map(_local, few) if grad is not None]):
            self._own = False
            return
        if not at_all and any(grad is not None and not _on_host(grad) for grad in few):
            seen = set(self._few)
            given = [grad if index in seen else None for index, grad in enumerate(given)]
        grads = [_local(grad) for grad in given]
        there = [grad for grad in grads if grad is not None and grad.numel()]
        own, self._own = self._own, False
        if not there:
            return
        norms = iter(_largest(there))
        zero = torch.zeros((), device=there[0].device)
        full = [next(norms) if grad is not None and grad.numel() else zero for grad in grads]
        bad = ~torch.stack([norm.to(zero) for norm in full]).isfinite()
        if _on_host(zero) and not bad.any():
            self._row = 0
        elif _on_host(zero):
            if not self._row:
                self._since, self._first, self._own_first = step, bad, own
            self._row += 1
        else:
            fresh = torch.as_tensor(self._row, device=zero.device) == 0
            known = bad if self._first is None else self._first
            self._first = torch.where(fresh, bad, known)
            self._since = torch.where(fresh, step, torch.as_tensor(self._since, device=zero.device))
            before = torch.as_tensor(self._own_first, device=zero.device)
            self._own_first = torch.where(fresh, torch.as_tensor(own, device=zero.device), before)
            self._row = (torch.as_tensor(self._row, device=zero.device) + 1) * bad.any()

    def found(self, *, scaled: bool) -> tuple[str, int, bool] | None:
        """The first weight whose gradient is not finite, since which step, and whether by this rank's own batch.

        None where the last gradients were finite, or where a gradient scaler (`scaled`) skips such steps and has not
        skipped too many in a row.
        """
        if int(self._row) < (SCALED if scaled else 1) or self._first is None:
            return None
        index = int(self._first.nonzero()[0])
        return self._weights[index][0], int(self._since), bool(self._own_first)


def _smallest(parameters: list[nn.Parameter]) -> list[int]:
    """The indices, in their order, of the smallest parameters that have `FEW` elements together; one at least."""
    sizes = {i: 0 if isinstance(one, nn.UninitializedParameter) else one.numel() for i, one in enumerate(parameters)}
    found: list[int] = []
    total = 0
    for index in sorted(sizes, key=lambda index: (sizes[index] == 0, sizes[index])):
        total += sizes[index]
        if found and (total > FEW or not sizes[index]):
            break
        found.append(index)
    return sorted(found)


def _surely_finite(grads: list[Tensor]) -> bool:
    """Whether the gradients, all dense and on a CPU, are finite, by one fused call for all of their norms.

    The norm of values above 1e19 is infinite in float32 though they are not: then there is no answer.
    """
    if not all(map(_dense_on_host, grads)):
        return False
    return not grads or all(math.isfinite(norm.item()) for norm in torch._foreach_norm(grads))


def _dense_on_host(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.is_cpu and grad.layout is torch.strided


def _on_host(grad: Tensor) -> bool:
    return grad.device.type == "cpu"


def _local(grad: Tensor | None) -> Tensor | None:
    to_local: Callable[[], Tensor] | None = getattr(grad, "to_local", None)
    return to_local() if to_local is not None else grad


def _largest(grads: list[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, shape (); infinite or NaN where one of its values is. Copies nothing."""
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    found: dict[int, Tensor] = {}
    for device in dict.fromkeys(grad.device for grad in dense):
        at = [i for i, grad in enumerate(dense) if grad.device == device and grad.numel()]
        found |= dict(zip(at, torch._foreach_norm([dense[i] for i in at], math.inf), strict=True))
    return [found.get(i, grad.new_zeros(())) for i, grad in enumerate(dense)]
