"""Lightning's checkpoint as a directory of shards has it: a flat mapping of leaves, and the rest.

The names are those of Lightning's own sharded checkpoints: `state_dict.<name>`, `optimizer_0.state.<parameter>.<name>`,
`optimizer_0.param_groups.<index>.<name>`.  Parameters have names, not numbers, so that each strategy finds its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from fairlead.errors import CheckpointError

KeyPath = tuple[str | int, ...]
"""Where a leaf is: keys of mappings and indices of lists, from the top."""

_VERSIONS: Final = "state_dict_metadata"
"""In `meta.pt`: the versions of the modules, which plain Lightning keeps in an attribute of the weights."""
_WEIGHTS: Final = "state_dict"
_OPTIMIZERS: Final = "optimizer_states"


@dataclass(frozen=True)
class Leaf:
    """A value that is written as one: anything but a dense tensor."""

    value: Any


@dataclass(frozen=True)
class Layout:
    """A checkpoint, taken apart: leaves by their names in the shards, where each is, and what `meta.pt` holds."""

    values: dict[str, torch.Tensor | Leaf]
    paths: dict[str, KeyPath]
    rest: dict[str, Any]


def named(state: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
    """An optimizer's state with names instead of numbers for its parameters; the tensors are the same objects.

    A parameter without a name (None, or too few names) is called `_unnamed.<number>`.
    """
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    known = dict(zip(numbers, names, strict=False))
    called = {number: known.get(number) or f"_unnamed.{number}" for number in numbers}
    if len(set(called.values())) != len(called):
        twice = next(name for name in called.values() if list(called.values()).count(name) > 1)
        raise CheckpointError("two parameters of an optimizer have one name", where=twice)
    return _renamed(state, called)


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `named`: what `Optimizer.load_state_dict` takes."""
    names = [name for group in state.get("param_groups", ()) for name in group["params"]]
    return _renamed(state, {name: number for number, name in enumerate(names)})


def _renamed(state: Mapping[str, Any], called: Mapping[Any, Any]) -> dict[str, Any]:
    new = dict(state)
    if "state" in state:
        new["state"] = {called.get(key, key): value for key, value in state["state"].items()}
    if "param_groups" in state:
        new["param_groups"] = [
            {**group, "params": [called.get(key, key) for key in group["params"]]} for group in state["param_groups"]
        ]
    return new


def to_layout(checkpoint: Mapping[str, Any], names: Sequence[Sequence[str | None]]) -> Layout:
    """Takes a checkpoint apart, without copying anything; `names` has those of each optimizer's parameters."""
    rest = {key: value for key, value in checkpoint.items() if key not in (_WEIGHTS, _OPTIMIZERS)}
    leaves: list[tuple[KeyPath, Any]] = []
    weights = checkpoint.get(_WEIGHTS)
    if weights is not None:
        leaves += [((_WEIGHTS, key), value) for key, value in weights.items()]
        versions = getattr(weights, "_metadata", None)  # of its modules; `load_state_dict` looks at them
        if versions is not None:
            rest[_VERSIONS] = {key: dict(value) for key, value in versions.items()}
    optimizers = checkpoint.get(_OPTIMIZERS)
    if optimizers is not None and not optimizers:
        rest[_OPTIMIZERS] = []
    for index, state in enumerate(optimizers or ()):
        known = names[index] if index < len(names) else ()
        leaves += _of_optimizer(f"optimizer_{index}", named(state, known))
    values: dict[str, torch.Tensor | Leaf] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in (leaf for leaf in leaves for leaf in _split(*leaf)):
        name = ".".join(map(str, path))
        if name in values:
            raise CheckpointError("two parts of a checkpoint have one name", where=name)
        values[name], paths[name] = value, path
    return Layout(values, paths, rest)


def _of_optimizer(top: str, state: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in state.items():
        if key == "state":
            for parameter, entries in value.items():
                if not isinstance(parameter, str) or not isinstance(entries, Mapping):
                    yield (top, key, _text(parameter, top)), entries
                    continue
                yield from (((top, key, parameter, _text(name, top)), entry) for name, entry in entries.items())
        elif key == "param_groups":
            for index, group in enumerate(value):
                yield from (((top, key, index, _text(name, top)), entry) for name, entry in group.items())
        else:
            yield (top, _text(key, top)), value


def _text(key: object, top: str) -> str:
    if isinstance(key, str):
        return key
    raise CheckpointError(
        f"the state of an optimizer has the key {key!r}",
        where=top,
        why="shards are found by their names, so that it has to be text",
        fix="checkpoint_io: torch",
    )


def _split(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, torch.Tensor | Leaf]]:
    """One leaf, unless a container holds DTensors, of which each rank has its own part."""
    if _is_dense(value):
        yield path, value
    elif not _holds_shards(value):
        yield path, Leaf(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _split((*path, _text(key, str(path[0]))), item)
    else:
        for index, item in enumerate(value):
            yield from _split((*path, index), item)


def _is_dense(value: Any) -> bool:
    if isinstance(value, DTensor):
        return True
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and value.layout is torch.strided and not value.is_quantized


def _holds_shards(value: Any) -> bool:
    if isinstance(value, DTensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_shards, value))


def from_layout(values: Mapping[KeyPath, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuilds a state from its leaves, in their order, and the rest, with numbers for the optimizers' parameters."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        set_element(tree, path, value)
    checkpoint = dict(rest)
    versions = checkpoint.pop(_VERSIONS, None)
    # The first FSDP calls the weights `model`.
    weights = tree.pop(_WEIGHTS, tree.pop("model", {}))
    if versions is not None:  # those of a module's `state_dict`, which is ordered
        weights = OrderedDict(weights)
        vars(weights)["_metadata"] = OrderedDict(versions)
    checkpoint[_WEIGHTS] = weights
    optimizers = sorted(int(number) for number in map(_optimizer_number, tree) if number is not None)
    if optimizers:
        checkpoint[_OPTIMIZERS] = [numbered({"state": {}, **tree.pop(f"optimizer_{number}")}) for number in optimizers]
    return {**checkpoint, **tree}


def _optimizer_number(key: str) -> str | None:
    number = key.removeprefix("optimizer_")
    return number if number != key and number.isdecimal() else None
