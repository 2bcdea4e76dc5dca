"""What a training changes in the layers of a model: a rate of dropout, a momentum; and layers that are others now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from fairlead.findings import Inexact
from fairlead_distributed.plain_data import beside_state
from fairlead_distributed.user_objects import is_users_class

_METRICS: Final = "torchmetrics"  # what they count is kept in another way


class Layers:
    """The layers of torch's and others' in a model, from the beginning of a fit; those of the user's are watched whole.

    A model has thousands of them, and each of them a handful of numbers: one look goes over all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kinds = _kinds(model)
        self._before = dict(_settings(model))
        self._moved: set[tuple[str, str]] = set()

    def begun(self) -> None:
        """The training begins: the layers are all there."""
        self._kinds = _kinds(self._model)

    def state(self) -> dict[str, dict[str, Any]]:
        """The numbers that have changed, by layer."""
        found: dict[str, dict[str, Any]] = {}
        for (path, name), value in _settings(self._model):
            key = path, name
            if key in self._moved or key not in self._before or self._before[key] != value:
                self._moved.add(key)
                found.setdefault(path, {})[name] = value
        return found

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Puts back what `state` gave, where there is such a layer."""
        layers = dict(self._model.named_modules())
        for path, values in state.items():
            for name, value in values.items():
                self._moved.add((path, name))
                if path in layers:
                    setattr(layers[path], name, value)

    def reasons(self) -> Iterator[Inexact]:
        """Layers that are not those of the beginning: a resumed fit begins with these."""
        now = _kinds(self._model)
        for path in sorted(now.keys() | self._kinds.keys()):
            before, after = (kinds.get(path) for kinds in (self._kinds, now))
            if before is not after:
                was, became = (kind.__name__ if kind is not None else "nothing" for kind in (before, after))
                yield Inexact(
                    f"model {path}",
                    why=f"the training has replaced it ({was} became {became}), and each start makes the model anew",
                    fix="make all of them in __init__, and choose among them by a number in an attribute",
                )
                return  # one says enough: those inside of it are others too


def _kinds(model: nn.Module) -> dict[str, type]:
    # A lazy layer becomes another with its first batch, and does so again.
    found = {path: getattr(one, "cls_to_become", None) or type(one) for path, one in model.named_modules()}
    # One that is pruned is trained under another name.
    return found | {name.removesuffix("_orig"): nn.Parameter for name, _ in model.named_parameters()}


def _settings(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, one in model.named_modules():
        kind = type(one)
        if not is_users_class(kind) and kind.__module__.partition(".")[0] != _METRICS:
            for name, value in beside_state(one).items():
                yield (path, name), value
