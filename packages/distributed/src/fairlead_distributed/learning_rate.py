"""Learning rates that follow the global batch: of optimizers that exist already, with the schedules that move them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch.optim.lr_scheduler as schedules
from torch import Tensor
from torch.optim import Optimizer

from fairlead.errors import ConfigError

_MARK: Final = "lr_factor"
"""What a group of an optimizer, and a schedule, are multiplied by already; it is in their `state_dict`."""
_OF_A_GROUP: Final = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_A_SCHEDULE: Final[Mapping[type, tuple[str, ...]]] = {
    schedules.LambdaLR: (),
    schedules.MultiplicativeLR: (),
    schedules.StepLR: (),
    schedules.MultiStepLR: (),
    schedules.ConstantLR: (),
    schedules.LinearLR: (),
    schedules.ExponentialLR: (),
    schedules.PolynomialLR: (),
    schedules.OneCycleLR: (),
    schedules.CosineAnnealingLR: ("eta_min",),
    schedules.CosineAnnealingWarmRestarts: ("eta_min",),
    schedules.CyclicLR: ("max_lrs",),
    schedules.ReduceLROnPlateau: ("min_lrs", "default_min_lr", "eps"),
    schedules.ChainedScheduler: (),
    schedules.SequentialLR: (),
}
"""The learning rates that a schedule of torch holds beside `base_lrs` and what is in the groups."""
_DECIDES: Final = ("get_lr", "_get_closed_form_lr", "step", "_reduce_lr", "_update_lr")


def apply_lr_factor(factor: float, optimizers: Iterable[Optimizer], schedulers: Iterable[Any] = ()) -> float:
    """Multiplies the learning rates of optimizers, and all that their schedules hold, by a factor: the full curve.

    Each group and schedule notes the factor in its state, so that this can be called at every start, behind the loading
    of a checkpoint: what is multiplied already stays, and with another factor it is multiplied by the ratio of both.

    Args:
        factor: What `fairlead_runs.batch_size.lr_factor` gives.
        optimizers: All whose learning rates follow the batch.
        schedulers: All schedules of these optimizers.

    Returns:
        What was multiplied by now: 1 where nothing was.

    Raises:
        ConfigError: A schedule is none of torch's, or one is missing; nothing was changed.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> apply_lr_factor(4.0, [optimizer]), apply_lr_factor(4.0, [optimizer])
        (4.0, 1.0)
        >>> optimizer.param_groups[0]["lr"]
        0.4
    """
    groups = {id(group): group for one in optimizers for group in one.param_groups}
    known = [one for scheduler in schedulers for one in _parts(scheduler)]
    ratios: list[float] = [factor / group.get(_MARK, 1.0) for group in groups.values()]
    ratios += [factor / getattr(one, _MARK, 1.0) for one in known]
    if all(ratio == 1.0 for ratio in ratios):
        return 1.0
    for scheduler in known:
        _require_known(scheduler, factor)
    _require_all(groups.values(), known)
    for group in groups.values():
        _multiply(group, _OF_A_GROUP, factor)
    for scheduler in known:
        _multiply(vars(scheduler), ("base_lrs", "_last_lr", *_held(scheduler)), factor)
    return ratios[0]


def _parts(scheduler: Any) -> Iterator[Any]:
    """A schedule, and those that it is made of."""
    yield scheduler
    if isinstance(scheduler, (schedules.ChainedScheduler, schedules.SequentialLR)):
        for one in scheduler._schedulers:
            yield from _parts(one)


def _known(scheduler: Any) -> type | None:
    """The class of torch that decides what a schedule does; None: another one does."""
    for kind in type(scheduler).__mro__:
        if kind in _OF_A_SCHEDULE:
            return kind
        if any(name in vars(kind) for name in _DECIDES):
            return None
    return None


def _held(scheduler: Any) -> tuple[str, ...]:
    kind = _known(scheduler)
    assert kind is not None
    return _OF_A_SCHEDULE[kind]


def _require_known(scheduler: Any, factor: float) -> None:
    if _known(scheduler) is not None:
        return
    raise ConfigError(
        f"the learning rate cannot follow the global batch: the schedule {type(scheduler).__name__} is not known",
        where="configure_optimizers",
        why="it may hold learning rates that Fairlead cannot see, and would restore the old ones",
        fix=f"multiply its learning rates by {factor:.6g} yourself (fairlead_distributed.scale_lr), and leave "
        "base_batch_size out; or use a schedule of torch.optim.lr_scheduler",
    )


def _require_all(groups: Iterable[Mapping[str, Any]], known: Iterable[Any]) -> None:
    """A schedule leaves `initial_lr` in the groups; one that is not given here would restore the old rates."""
    moved = {id(group) for one in known for group in one.optimizer.param_groups}
    if any("initial_lr" in group and id(group) not in moved for group in groups):
        raise ConfigError(
            "the learning rate cannot follow the global batch: a schedule of an optimizer is not known",
            where="configure_optimizers",
            why="a group of its parameters has an initial_lr, which schedules leave there",
            fix="return the schedule with its optimizer, or give it to apply_lr_factor; "
            "or leave base_batch_size out and scale the learning rate yourself (fairlead_distributed.scale_lr)",
        )


def _multiply(held: dict[str, Any], names: Iterable[str], factor: float) -> None:
    ratio = factor / held.get(_MARK, 1.0)
    if ratio != 1.0:
        for name in names:
            if held.get(name) is not None:
                held[name] = _multiplied(held[name], ratio, in_place=name == "lr")
    held[_MARK] = factor


def _multiplied(value: Any, ratio: float, *, in_place: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_multiplied(one, ratio, in_place=False) for one in value)
    if isinstance(value, Tensor) and in_place:  # a compiled or captured step reads this very tensor
        return value.mul_(ratio)
    return value * ratio
