"""Activation checkpointing of a share of the layers, or of what is called in a block; the field says gradient, too.

Both are made of `activation_checkpointing`, whose promises hold: the same gradients, random numbers and statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import is_fsdp1, is_fully_sharded
from fairlead_distributed.activation_checkpointing import (
    Op,
    checkpoint_layer,
    find_layers,
    is_checkpointed,
    operators,
)


class SelectiveGradientCheckpointing:
    """Checkpoints a share of a model's layers in place: these keep their inputs only, and run again in backward.

    Layers are the items with parameters in the model's outermost `ModuleList`s and `Sequential`s. Those chosen are
    spread evenly: a half is every second one.

    Args:
        model: The model.
        checkpoint_ratio: The share of its layers, from 0 (none) to 1 (all).
        save_ops: Operators whose results are kept all the same; see `checkpoint_layers`.

    Attributes:
        layers: The names of the checkpointed layers.

    Raises:
        ConfigError: The ratio is none, the model has no layers, or torch no such operator.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
        >>> SelectiveGradientCheckpointing(model, checkpoint_ratio=0.5).layers
        ['1', '3']
    """

    def __init__(self, model: nn.Module, checkpoint_ratio: float = 0.5, *, save_ops: Collection[str | Op] = ()) -> None:
        where = "SelectiveGradientCheckpointing"
        if not 0 <= checkpoint_ratio <= 1:
            raise ConfigError(
                f"checkpoint_ratio={checkpoint_ratio}", where=where, why="a share of the layers lies in 0 to 1"
            )
        found = find_layers(model)
        if not found:
            raise ConfigError(
                f"{type(model).__name__} has no layers to choose from",
                where=where,
                why="layers are the items of its ModuleLists and Sequentials, and it has none with parameters",
                fix="name their classes: checkpoint_layers(model, {MyLayer})",
            )
        ops, count = operators(save_ops), int(checkpoint_ratio * len(found) + 0.5)
        names = list(found)
        # Item i is taken where the running share crosses a whole number: evenly, and exactly `count` of them.
        self.layers = [n for i, n in enumerate(names) if (i + 1) * count // len(names) > i * count // len(names)]
        self._undo = [checkpoint_layer(found[name], ops) for name in self.layers]

    def remove(self) -> None:
        """Makes the model what it was."""
        for undo in self._undo:
            undo()
        self._undo, self.layers = [], []


@contextmanager
def checkpoint_scope(*, save_ops: Collection[str | Op] = ()) -> Iterator[None]:
    """Models called inside the block keep only the inputs of their layers, and compute the rest again in backward.

    Layers are the items with parameters in a model's outermost `ModuleList`s and `Sequential`s; a model that has none
    is one layer. What is computed between layers, or outside of any module, is kept as always: code that no module
    holds cannot be run again. The backward pass may be inside the block or after it. It counts for this thread only.

    Not with a model in FSDP or `fully_shard`: checkpoint its layers before it is wrapped.

    Args:
        save_ops: Operators whose results are kept all the same; see `checkpoint_layers`.

    Raises:
        ConfigError: Torch has no such operator, or a model is sharded.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))
        >>> batch = next(nn.Linear(2, 4).parameters()).detach()
        >>> with checkpoint_scope():
        ...     loss = model(batch).sum()
        >>> loss.backward()
    """
    scope = _Scope(operators(save_ops))
    with scope.watch():
        yield


class _Scope:
    def __init__(self, save_ops: list[Op]) -> None:
        self._save_ops = save_ops
        self._thread = threading.get_ident()
        self._known: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        # A module's `forward` is looked up before its hooks run, so that only `__call__` comes in time (torch.fx traces
        # in the same way).
        called: Any = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread and id(module) not in self._known:
                self._add(module)
            return called(module, *args, **kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = called  # type: ignore[method-assign]
            for undo in reversed(self._undo):
                undo()

    def _add(self, model: nn.Module) -> None:
        if any(is_fsdp1(part) or is_fully_sharded(part) for part in model.modules()):
            raise ConfigError(
                f"{type(model).__name__} is sharded already",
                where="checkpoint_scope()",
                why="its parameters are gathered around each unit",
                fix="checkpoint_layers(model, {MyLayer}) before it is wrapped",
            )
        layers = find_layers(model)
        self._known.update(map(id, model.modules()))
        for layer in layers.values() if layers else (model,):
            if not is_checkpointed(layer):
                self._undo.append(checkpoint_layer(layer, self._save_ops))
