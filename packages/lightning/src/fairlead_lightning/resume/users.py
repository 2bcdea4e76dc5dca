"""What the user's code and its training change, which no checkpoint of Lightning's has: saved, or named."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelSummary
from torch import nn
from torch.optim import Optimizer

from fairlead.findings import Inexact
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.plain_data import is_engines, is_users_class
from fairlead_distributed.run.exactness import nested_optimizers
from fairlead_distributed.run.memory import Owner
from fairlead_distributed.run.registry import of_optimizer

_OF_LIGHTNING: Final = ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams", "_trainer", "trainer")
_SET_IN_TRAINING: Final = frozenset(
    {"accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch"}
)
_READ: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Users:
    """Attributes, and groups of parameters that the training adds to optimizers, from the beginning of a fit.

    Attributes:
        attributes: What is watched; loaders are watched there as well, when they are made.
    """

    def __init__(self) -> None:
        self.attributes = Attributes(_not_watched)
        self._trainer: L.Trainer | None = None
        self._groups: list[int] = []  # that each optimizer was made with
        self._begun = False

    def watch(self, trainer: L.Trainer, before: Mapping[str, Any] | None) -> None:
        """The model and its optimizers are made; of these nothing is restored yet, and with `before` it will be."""
        self._trainer = trainer
        self._groups = [len(one.param_groups) for one in trainer.optimizers]
        if before is not None:
            self._add_groups(before.get("groups", ()))
        _watch(trainer, self.attributes)

    def begun(self) -> None:
        """An epoch begins; what was made until the first of them, a resumed fit makes as well."""
        if not self._begun and self._trainer is not None:
            self._begun = True
            self.attributes.begun()

    def state(self) -> dict[str, Any]:
        """For the checkpoint of this rank."""
        return {"attributes": self.attributes.state(), "groups": list(self._added_groups())}

    def restore_before_loaders(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        """What loaders keep, before they are made: workers begin with a copy. And what finders have found."""
        finders = self._trainer is not None and any(map(is_finder, vars(self._trainer)["callbacks"]))
        saved = _fitting(state, same_ranks=same_ranks)
        kept = {name: one for name, one in saved.items() if name.startswith("loader") or finders}
        self.attributes.restore(kept, same_ranks=same_ranks)

    def restore(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        """Puts it back."""
        self.attributes.restore(_fitting(state, same_ranks=same_ranks), same_ranks=same_ranks)

    def reasons(self) -> Iterator[Inexact]:
        """What has changed and cannot be saved."""
        yield from self.attributes.reasons()
        if self._trainer is not None:
            yield from nested_optimizers(self._trainer.optimizers)
            yield from _refused(self._trainer)

    def _added_groups(self) -> Iterator[list[list[str]]]:
        """Of each optimizer the groups that were added, by the names of the parameters."""
        if self._trainer is None:
            return
        names = {id(one): name for name, one in self._trainer.lightning_module.named_parameters()}
        for one, made in zip(self._trainer.optimizers, self._groups, strict=True):
            yield [[names.get(id(p), "") for p in group["params"]] for group in one.param_groups[made:]]

    def _add_groups(self, state: Sequence[Sequence[Sequence[str]]]) -> None:
        """Adds them, before the optimizers' own state comes; one that is there already stays the only one."""
        assert self._trainer is not None
        weights = dict(self._trainer.lightning_module.named_parameters())
        for one, made, added in zip(self._trainer.optimizers, self._groups, state, strict=False):
            for group in added[len(one.param_groups) - made :]:
                if all(name in weights for name in group):
                    one.add_param_group({"params": [weights[name] for name in group]})


def _fitting(state: Mapping[str, Any], *, same_ranks: bool) -> dict[str, Any]:
    """What was saved of attributes; where a sampler is belongs to a rank of as many."""
    saved: Mapping[str, Any] = state.get("attributes", {})
    return {name: one for name, one in saved.items() if same_ranks or not name.endswith(" sampler")}


def _watch(trainer: L.Trainer, attributes: Attributes) -> None:
    """Watches the module, callbacks, data module and optimizers, and what callbacks set of the trainer."""
    model, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    configs = trainer.lr_scheduler_configs
    attributes.exclude(trainer, trainer.strategy, *model.modules(), *callbacks, *trainer.loggers, data)
    attributes.exclude(*trainer.optimizers, *configs, *(config.scheduler for config in configs))
    attributes.watch("trainer", trainer, only=_SET_IN_TRAINING)
    attributes.watch("model", model)
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        if not is_engines(type(callback)):
            attributes.watch(f"callback {name}" + f" {count[name]}" * (count[name] > 1), callback)
    if data is not None and not is_engines(type(data)):
        attributes.watch(f"data {type(data).__name__}", data)
    for number, one in enumerate(trainer.optimizers):
        if is_users_class(type(one)):  # it may be made of the weights, which a resumed fit has loaded already
            attributes.watch(f"optimizer {number}", one, always=True)
    attributes.mark()


def internal(holder: object) -> frozenset[str]:
    """The attributes of a module or data module that torch and Lightning keep for themselves."""
    if isinstance(holder, L.LightningDataModule):
        return frozenset({*vars(L.LightningDataModule()), *_OF_LIGHTNING})
    base = L.LightningModule if isinstance(holder, L.LightningModule) else nn.Module
    return frozenset({*vars(base()), *_OF_LIGHTNING, "_fabric"}) if isinstance(holder, nn.Module) else frozenset()


def owners_of_fit(trainer: L.Trainer) -> list[Owner]:
    """The user's model, callbacks and data module, with what they keep outside of parameters and buffers."""
    model = trainer.lightning_module
    callbacks: list[L.Callback] = vars(trainer)["callbacks"]
    data: Any = getattr(trainer, "datamodule", None)
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    held: list[tuple[str, Any, str]] = [
        *((path, module, f"model {type(model).__name__}") for path, module in modules),
        *(("", callback, f"callback {type(callback).__name__}") for callback in callbacks),
        *([("", data, f"data {type(data).__name__}")] if data is not None else []),
    ]
    return [Owner(one, name, prefix, internal(one), shown=not is_engines(type(one))) for prefix, one, name in held]


def _not_watched(owner: object) -> frozenset[str]:
    """What an object's base class keeps in attributes, but for hyperparameters, which a finder sets."""
    if isinstance(owner, L.Callback):
        return _of_its_base(owner)
    if isinstance(owner, Optimizer):
        return of_optimizer(owner)
    # Lightning makes empty hyperparameters where there are none.
    return internal(owner) - ({"_hparams"} if getattr(owner, "__dict__", {}).get("_hparams") else set())


def _of_its_base(callback: L.Callback) -> frozenset[str]:
    """The attributes of Lightning's class that a callback is derived from: what must outlive a stop is in its state."""
    base: Any = next(kind for kind in type(callback).__mro__ if is_engines(kind))
    needed = [one.name for one in inspect.signature(base).parameters.values() if one.default is inspect.Parameter.empty]
    made: Any = base.__new__(base)
    try:
        made.__init__(**{name: getattr(callback, name, None) for name in needed})
    except Exception:  # without its arguments; what it has by then is left out, and the rest is looked at
        return frozenset(vars(made))
    return frozenset(vars(made))


def is_finder(callback: L.Callback) -> bool:
    """Whether it looks for a learning rate or a batch size before the training, and sets an attribute to it."""
    return isinstance(callback, (LearningRateFinder, BatchSizeFinder))


def only_once(trainer: L.Trainer) -> Callable[[], None]:
    """A fit that resumes has found its learning rate and batch size and shown its model before.  Returns the undo."""
    callbacks = vars(trainer)["callbacks"]
    done = [vars(one) for one in callbacks if is_finder(one) or isinstance(one, ModelSummary)]
    for attributes in done:
        attributes["on_fit_start"] = lambda *_: None

    def undo() -> None:
        for attributes in done:
            attributes.pop("on_fit_start", None)

    return undo


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


def _refused(trainer: L.Trainer) -> Iterator[Inexact]:
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
