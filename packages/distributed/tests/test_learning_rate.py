"""Learning rates that follow the batch: a whole schedule is multiplied, once, whatever is saved and loaded between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from fairlead.errors import ConfigError
from fairlead_distributed import apply_lr_factor

STEPS = 12
Make = Callable[[Optimizer], Any]

SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: schedules.ConstantLR(o),
    "LinearLR": lambda o: schedules.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 9, power=2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 8, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, eta_min=0.01),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 0.7, step_size_up=3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.7, total_steps=STEPS + 1),
    "OneCycleLR of three phases": lambda o: schedules.OneCycleLR(o, 0.7, total_steps=STEPS + 1, three_phase=True),
    "a warm-up, then a cosine": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=3), schedules.CosineAnnealingLR(o, 8, eta_min=0.02)], milestones=[3]
    ),
    "a chain": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, total_iters=3), schedules.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, factor=0.5, min_lr=0.05),
}


def made(make: Make | None = None) -> tuple[SGD, Any]:
    """Two groups, one with a learning rate of its own."""
    one, other = (torch.zeros(1, requires_grad=True) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [other], "lr": 0.4}]
    optimizer = SGD(groups, lr=0.2, momentum=0.9)
    return optimizer, make(optimizer) if make is not None else None


def rates(optimizer: SGD, schedule: Any, steps: int = STEPS) -> list[float]:
    """The learning rates of both groups over some steps."""
    seen = []
    for _ in range(steps):
        seen += [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return seen


def close(found: list[float], wanted: list[float]) -> bool:
    return found == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_is_multiplied_as_a_whole(name: str) -> None:
    """Also where it goes on from a state, whose numbers are multiplied already, and the factor becomes another."""
    make = SCHEDULES[name]
    undisturbed = rates(*made(make))
    optimizer, schedule = made(make)
    assert apply_lr_factor(4.0, [optimizer], [schedule]) == 4.0
    assert close(rates(optimizer, schedule, 5), [4 * rate for rate in undisturbed[:10]])
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    for start, factor, changed in ((5, 4.0, 1.0), (5, 2.0, 0.5)):
        optimizer, schedule = made(make)
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        schedule.load_state_dict(copy.deepcopy(saved[1]))
        assert apply_lr_factor(factor, [optimizer], [schedule]) == changed
        assert apply_lr_factor(factor, [optimizer], [schedule]) == 1.0  # once
        assert close(rates(optimizer, schedule, STEPS - start), [factor * rate for rate in undisturbed[2 * start :]])


def test_a_tensor_is_multiplied_where_it_is() -> None:
    """A compiled or captured step reads the tensor that it has seen."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = SGD([torch.zeros(1)], lr=rate)
    apply_lr_factor(8.0, [optimizer])
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.8


def test_the_rule_is_taken_back_where_it_is_gone() -> None:
    optimizer, schedule = made(SCHEDULES["CosineAnnealingLR"])
    apply_lr_factor(4.0, [optimizer], [schedule])
    assert apply_lr_factor(1.0, [optimizer], [schedule]) == 0.25
    assert close(rates(optimizer, schedule), rates(*made(SCHEDULES["CosineAnnealingLR"])))


class Own(schedules.LambdaLR):
    """Decides by itself."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [0.5 for _ in self.base_lrs]


class Named(schedules.StepLR):
    """Of torch's in all but name."""


def test_a_schedule_that_is_not_known_is_refused_and_nothing_is_changed() -> None:
    optimizer, schedule = made(lambda o: Own(o, lambda step: 1.0))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigError, match="the schedule Own is not known") as caught:
        apply_lr_factor(4.0, [optimizer], [schedule])
    assert "multiply its learning rates by 4 yourself" in str(caught.value)
    assert optimizer.state_dict() == before
    assert apply_lr_factor(1.0, [optimizer], [schedule]) == 1.0  # nothing to do, nothing to refuse
    optimizer, schedule = made(lambda o: Named(o, 2))
    assert apply_lr_factor(4.0, [optimizer], [schedule]) == 4.0
    optimizer, schedule = made(SCHEDULES["StepLR"])
    with pytest.raises(ConfigError, match="a schedule of an optimizer is not known"):
        apply_lr_factor(4.0, [optimizer])  # it would set the old learning rates again


def test_a_schedule_of_torch_has_the_parts_that_are_multiplied() -> None:
    """If torch renames them, `learning_rate` has to multiply what is there in their place."""
    chain = made(SCHEDULES["a chain"])[1]
    assert [type(one).__name__ for one in chain._schedulers] == ["LinearLR", "ExponentialLR"]
    held = {name: made(make)[1] for name, make in SCHEDULES.items()}
    assert vars(held["StepLR"]).keys() >= {"base_lrs", "_last_lr"}
    assert vars(held["CosineAnnealingLR"])["eta_min"] == vars(held["CosineAnnealingWarmRestarts"])["eta_min"] == 0.01
    assert vars(held["CyclicLR"])["max_lrs"] == [0.7, 0.7]
    assert vars(held["ReduceLROnPlateau"]).keys() >= {"min_lrs", "default_min_lr", "eps"}
    groups = made(SCHEDULES["OneCycleLR"])[0].param_groups
    assert groups[0].keys() >= {"initial_lr", "max_lr", "min_lr"}
