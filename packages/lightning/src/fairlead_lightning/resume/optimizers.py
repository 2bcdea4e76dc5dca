"""What optimizers of the user's classes have beside their `state_dict`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import lightning.pytorch as L
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from fairlead.findings import Inexact
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.user_objects import is_users_class

_SHARED: Final = ("state", "param_groups")
_READ: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Groups:
    """The groups of parameters that a training adds to its optimizers, by the names of the parameters."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._made = [len(one.param_groups) for one in optimizers]

    def state(self) -> list[list[list[str]]]:
        """Of each optimizer the groups that were added."""
        names = {id(one): name for name, one in self._model.named_parameters()}
        return [[[names.get(id(p), "") for p in group["params"]] for group in added] for added in self._added()]

    def _added(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        for one, made in zip(self._optimizers, self._made, strict=True):
            yield one.param_groups[made:]

    def restore(self, state: Sequence[Sequence[Sequence[str]]]) -> None:
        """Adds them again, before the optimizers' own state comes; one that is there already stays the only one."""
        weights = dict(self._model.named_parameters())
        for one, made, added in zip(self._optimizers, self._made, state, strict=False):
            for group in added[len(one.param_groups) - made :]:
                if all(name in weights for name in group):
                    one.add_param_group({"params": [weights[name] for name in group]})


def with_plain_numbers(checkpoint: dict[str, Any]) -> None:
    """Puts Python's numbers for NumPy's into the states of schedules and optimizers: a resume reads no others."""
    checkpoint["lr_schedulers"] = _plain_numbers(checkpoint.get("lr_schedulers", []))
    for state in checkpoint.get("optimizer_states", ()):
        if isinstance(state, dict) and "param_groups" in state:
            state["param_groups"] = _plain_numbers(state["param_groups"])


def _plain_numbers(state: Any) -> Any:
    if isinstance(state, (np.float64, np.int64, np.bool_)):
        return state.item()
    if type(state) is dict:
        return {key: _plain_numbers(value) for key, value in state.items()}
    return type(state)(map(_plain_numbers, state)) if type(state) in (list, tuple) else state


def refused(trainer: L.Trainer) -> Iterator[Inexact]:
    """States that a resume does not read, since they hold more than tensors and plain data."""
    groups = [(one, one.param_groups) for one in trainer.optimizers]
    schedules = [(one.scheduler, one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs]
    for owner, state in (*groups, *schedules):
        if found := sorted(set(_foreign(_plain_numbers(state)))):
            yield Inexact(
                f"the state of {type(owner).__name__}",
                why=f"it holds {', '.join(found)}, and a resume reads no pickled objects",
                fix="numbers, lists and dicts in it; or name these classes in checkpoint_io.safe_globals",
                certain=False,
            )


def _foreign(value: Any) -> Iterator[str]:
    if type(value) in (dict, OrderedDict, list, tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _foreign(one)
    elif not isinstance(value, torch.Tensor) and type(value) not in _READ:
        yield f"{type(value).__module__}.{type(value).__qualname__}"


def watch_optimizers(kept: Attributes, optimizers: list[Optimizer]) -> Callable[[], None]:
    """Watches what they keep in attributes; returns what has those that one is made of share its state again.

    An optimizer around another (Lookahead, SAM) shares its groups, and `load_state_dict` gives it others.
    """
    internal = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
    shared: list[tuple[Any, Any, str]] = []
    for number, one in enumerate(optimizers):
        if not is_users_class(type(one)):
            continue
        inner = [value for value in vars(one).values() if isinstance(value, Optimizer)]
        mine: Any = one
        shared += [(mine, its, n) for its in inner for n in _SHARED if getattr(mine, n) is getattr(its, n)]
        kept.watch(f"optimizer {number}", one, internal)
        kept.always(f"optimizer {number}")  # made of the weights that a resumed fit has loaded already

    def share() -> None:
        for outer, its, name in shared:
            setattr(its, name, getattr(outer, name))

    return share
