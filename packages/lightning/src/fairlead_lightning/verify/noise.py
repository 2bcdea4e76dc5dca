"""How far float32 alone moves a training, and where it moves it too far for anything to be said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fairlead.errors import ConfigError
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import Tensors, wide

BOUND: Final = 1e-3
"""The largest distance, relative to a gradient or to how far a weight moved, that can be rounding of float32."""
EPSILON: Final = torch.finfo(torch.float32).eps
_TOLD: Final = 30
"""An element of a gradient that is not so many times its own noise has no sign that float32 could tell."""


def resolved(name: str, exact: Tensors, repeats: Sequence[Tensors]) -> Tensor | None:
    """Which elements of a gradient float32 can tell from zero; None: all of them.

    What it cannot tell are gradients that are zero by construction, such as that of a bias before a norm or of keys
    before a softmax: Adam makes steps of full size of their rounding.
    """
    if name not in exact:
        return None
    true = wide(exact[name])
    noise = torch.zeros_like(true)
    for one in repeats:
        if name in one:
            noise = torch.maximum(noise, (wide(one[name]) - true).abs())
    lost = (noise > 0) & (true.abs() <= _TOLD * noise)
    return ~lost if bool(lost.any()) else None


def require_little_noise(exact: Any, runs: Sequence[Any], notes: Notes) -> None:
    """Raises where what float32 does to a gradient, a weight or a loss is more than rounding.

    Raises:
        ConfigError: Nothing could be said of a fault of that size.
    """
    gradients = [one.gradients for one in runs]
    masks = {name: resolved(name, exact.gradients, gradients) for name in exact.gradients}
    unresolved = sum(int((~mask).sum()) for mask in masks.values() if mask is not None)
    every = sum(one.numel() for one in exact.gradients.values())
    if unresolved > every / 2:
        raise _too_much("the gradients", f"{unresolved} of {every} elements are nothing but rounding", 1)
    for name, true in exact.gradients.items():
        worst, size = _worst(name, true, gradients, masks[name])
        if worst > BOUND * size:
            raise _too_much(f"the gradient of {name}", f"{worst / size if size else 1:.2g} of it", 1)
    for name, true in exact.weights.items():
        start = notes.start[name]
        worst, size = _worst(name, true, [one.weights for one in runs], masks.get(name), start)
        rounding = 4 * EPSILON * float(wide(true).square().sum().sqrt())
        if worst > max(BOUND * size, rounding):
            far = f"{worst / size if size else 1:.2g} of how far it moved"
            raise _too_much(f"the weight {name}", far, 2)
    for number, loss in enumerate(exact.losses):
        worst = max(abs(one.losses[number] - loss) for one in runs)
        if worst > BOUND * max(abs(loss), abs(exact.losses[0])):
            raise _too_much(f"the loss of step {number + 1}", f"{worst:.2g} for {loss:.4g}", number + 1)


def _worst(
    name: str, true: Tensor, runs: Sequence[Tensors], mask: Tensor | None, start: Tensor | None = None
) -> tuple[float, float]:
    keep = mask if mask is not None else torch.ones_like(wide(true), dtype=torch.bool)
    exact = wide(true)
    size = exact - wide(start) if start is not None else exact
    off = [(wide(one[name]) - exact)[keep] for one in runs if name in one]
    return max(float(one.square().sum().sqrt()) for one in off), float(size[keep].square().sum().sqrt())


def _too_much(what: str, far: str, step: int) -> ConfigError:
    since = "its gradients" if step == 1 else f"weights from step {step} on"
    return ConfigError(
        f"the job cannot be verified: nothing can be said of {since}",
        where="model",
        why=f"float32 alone changes {what} by {far}, in one process and with the samples in another order: that is "
        "no rounding, and would hide a fault of that size",
        fix="verify at a lower learning rate (--set model.args.lr=...), with fewer --steps, or a model whose loss does "
        "not jump; random numbers of the model's own look like this, too",
    )
