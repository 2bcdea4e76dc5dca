"""Activation checkpointing: layers that keep only their inputs and compute the rest again in the backward pass.

A layer stays the object it is, with the same names in `state_dict()` and `named_parameters()`: only its `forward` is
replaced. So it goes together with every way to split a model, in the order in which they are applied: tensor
parallelism, then this, then DDP, FSDP or `fully_shard`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fairlead.errors import ConfigError, did_you_mean

Op = torch._ops.OpOverload
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_layers(
    module: nn.Module, classes: Collection[type[nn.Module]], *, save_ops: Collection[str | Op] = ()
) -> int:
    """Checkpoints every layer of the given classes, in place, and no other; returns how many there are.

    The gradients are those without it. The random state of the forward pass is restored for the second one, so that
    dropout drops the same, and buffers that a forward pass changes (the running statistics of a batch normalisation)
    change once. A layer that is checkpointed already is not checkpointed again.

    Args:
        module: The model; itself a layer where it is of one of the classes.
        classes: The classes of the layers; those derived from them count too. None at all: nothing is done.
        save_ops: Operators whose results are kept, such as `aten.mm` (all of its overloads) or
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
    """Whether this layer computes its activations again."""
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
        functools.update_wrapper(self, layer.forward)  # for those who look at the signature
        self.layer, self.original, self.save_ops = layer, layer.forward, save_ops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.original, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> Contexts:
        """What surrounds the first and the second forward pass."""
        buffers = _Buffers(self.layer)
        if not self.save_ops:
            return buffers.first(), buffers.again()
        first, again = create_selective_checkpoint_contexts(self.save_ops)  # type: ignore[no-untyped-call]
        return _both(buffers.first(), first), _both(buffers.again(), again)


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
    def again(self) -> Iterator[None]:
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
