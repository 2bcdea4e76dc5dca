"""Activation checkpointing: layers that keep only their inputs and recompute the rest in the backward pass.

A layer stays the object it is, with the same names in `state_dict()` and `named_parameters()`: only its `forward` is
replaced. So it goes together with every way to split a model, in the order in which they are applied: tensor
parallelism, then this, then DDP, FSDP or `fully_shard`.

Of a share of the layers, too, or of what is called in a block, with the same promises.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fairlead.errors import ConfigError, did_you_mean
from fairlead_distributed._sharded import is_fsdp1, is_fully_sharded

Op = torch._ops.OpOverload
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_layers(
    module: nn.Module, classes: Collection[type[nn.Module]], *, save_ops: Collection[str | Op] = ()
) -> int:
    """Checkpoints every layer of the given classes, in place, and no other; returns how many there are.

    The gradients are those without it. The random state of the forward pass is restored for the second one, so that
    dropout drops the same, and buffers that a forward pass changes (the running statistics of a batch normalisation)
    change once. A layer that is checkpointed already stays as it is.

    Args:
        module: The model; itself a layer where it is of one of the classes.
        classes: The classes of the layers; those derived from them count too. None at all: nothing is done.
        save_ops: Operators whose results are stored, such as `aten.mm` (all of its overloads) or
            `torch.ops.aten.mm.default`: expensive ones are not computed twice.

    Raises:
        ConfigError: The model has no layer of these classes (the error names those it has), or torch no such operator.

    Example:
        >>> model = nn.Sequential(nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 8))
        >>> checkpoint_layers(model, {nn.TransformerEncoderLayer})
        1
    """
    found = [layer for layer in module.modules() if isinstance(layer, tuple(classes))]
    if classes and not found:
        names = sorted({type(layer).__qualname__ for layer in module.modules()})
        raise ConfigError(
            f"the model has no {' or '.join(sorted(c.__qualname__ for c in classes))} to checkpoint",
            where="activation checkpointing",
            why=f"it consists of: {', '.join(names)}",
            fix="name the class of its layers",
        )
    ops = operators(save_ops)
    for layer in found:
        checkpoint_layer(layer, ops)
    return len(found)


def checkpoint_layer(layer: nn.Module, save_ops: Collection[Op] = ()) -> Callable[[], None]:
    """Checkpoints one layer in place; calling what is returned undoes it."""
    own = vars(layer).get("forward")
    if isinstance(own, _Recomputed):
        return lambda: None
    layer.forward = _Recomputed(layer, list(save_ops))

    def undo() -> None:
        del layer.forward
        if own is not None:
            layer.forward = own

    return undo


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether this layer recomputes its activations."""
    return isinstance(vars(layer).get("forward"), _Recomputed)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model by name: what has parameters in its outermost `ModuleList`s and `Sequential`s.

    Example:
        >>> list(find_layers(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])})))
        ['blocks.0', 'blocks.1']
    """
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        items = isinstance(module, (nn.ModuleList, nn.Sequential))
        for name, child in module.named_children():
            if not items or isinstance(child, nn.ModuleList):
                walk(child, f"{prefix}{name}.")
            elif any(True for _ in child.parameters()):
                found[f"{prefix}{name}"] = child

    walk(model, "")
    return found


def operators(names: Collection[str | Op]) -> list[Op]:
    """Torch's operators of these names; `aten.mm` means all overloads of it. Raises ConfigError for an unknown one."""
    found: list[Op] = []
    for name in names:
        if isinstance(name, Op):
            found.append(name)
            continue
        space, _, rest = name.removeprefix("torch.ops.").partition(".")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space, None), packet_name, None) if packet_name else None
        overloads = packet.overloads() if packet is not None else []
        wanted = [overload] if overload else overloads
        if not wanted or not set(wanted) <= set(overloads):
            near = did_you_mean(overload, overloads) if overloads else None
            raise ConfigError(
                f"torch has no operator {name!r}",
                where="save_ops",
                why=f"the overloads of {space}.{packet_name} are: {', '.join(overloads)}" if overloads else None,
                fix=f"did you mean '{space}.{packet_name}.{near}'?" if near else "write it as `aten.mm`",
            )
        found += [getattr(packet, one) for one in wanted]
    return found


class _Recomputed:
    """The `forward` of a checkpointed layer. An object and no closure, so that a copy of the model has its own."""

    def __init__(self, layer: nn.Module, save_ops: list[Op]) -> None:
        functools.update_wrapper(self, layer.forward)  # its signature may be inspected
        self.layer, self.original, self.save_ops = layer, layer.forward, save_ops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.original, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> Contexts:
        """What surrounds the first and the second forward pass."""
        buffers = _Buffers(self.layer)
        if not self.save_ops:
            return buffers.first(), buffers.recompute()
        first, recompute = create_selective_checkpoint_contexts(self.save_ops)  # type: ignore[no-untyped-call]
        return _both(buffers.first(), first), _both(buffers.recompute(), recompute)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


class _Buffers:
    """Lets the second forward pass see the buffers as the first one did, and leave them as they are.

    Otherwise a batch normalisation would count every batch twice, and a spectral norm use another estimate.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._buffers = list(layer.buffers())
        norms = (part for part in layer.modules() if isinstance(part, _NormBase) and part.training)
        self._running = {id(one) for norm in norms for one in norm.buffers(recurse=False)}
        self._before: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        copies = [(one, one._version, one.clone()) for one in self._buffers]
        yield
        # Torch does not count a version for running statistics.
        self._before = [
            (one, copy) for one, version, copy in copies if one._version != version or id(one) in self._running
        ]

    @contextmanager
    def recompute(self) -> Iterator[None]:
        now = [(one, one.clone()) for one, _ in self._before]
        _put(self._before)
        try:
            yield
        finally:
            _put(now)


@torch.no_grad()
def _put(values: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in values:
        buffer.copy_(value)


class SelectiveGradientCheckpointing:
    """Checkpoints a share of a model's layers in place: these keep their inputs only, and are recomputed in backward.

    Layers are the items with parameters in the model's outermost `ModuleList`s and `Sequential`s. Those chosen are
    spread evenly: a half is every second one.

    Args:
        model: The model.
        checkpoint_ratio: The share of its layers, from 0 (none) to 1 (all).
        save_ops: Operators whose results are stored all the same; see `checkpoint_layers`.

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
        # Item i is taken where the running share crosses an integer: evenly, and exactly `count` of them.
        self.layers = [n for i, n in enumerate(names) if (i + 1) * count // len(names) > i * count // len(names)]
        self._undo = [checkpoint_layer(found[name], ops) for name in self.layers]

    def remove(self) -> None:
        """Makes the model what it was."""
        for undo in self._undo:
            undo()
        self._undo, self.layers = [], []


@contextmanager
def checkpoint_scope(*, save_ops: Collection[str | Op] = ()) -> Iterator[None]:
    """Models called inside the block keep only the inputs of their layers, and recompute the rest in backward.

    Layers are the items with parameters in a model's outermost `ModuleList`s and `Sequential`s; a model that has none
    is one layer. What is computed between layers, or outside of any module, is stored as usual: code that no module
    holds cannot be recomputed. The backward pass may be inside the block or after it. It counts for this thread only.

    Not with a model in FSDP or `fully_shard`: checkpoint its layers before it is wrapped.

    Args:
        save_ops: Operators whose results are stored all the same; see `checkpoint_layers`.

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
