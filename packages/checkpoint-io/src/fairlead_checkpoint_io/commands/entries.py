"""What two checkpoints are compared by: every tensor and value under a name, tensors read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fairlead_checkpoint_io.commands.sources import Source
from fairlead_checkpoint_io.commands.states import read_any, read_safetensors
from fairlead_checkpoint_io.files.formats import REST
from fairlead_checkpoint_io.files.layout import VERSIONS, numbered, optimizer_number
from fairlead_checkpoint_io.files.reading import read_state
from fairlead_checkpoint_io.files.shards import Shards
from fairlead_checkpoint_io.files.trust import allowed, refuse_unsafe, unsafe_globals

WEIGHTS: Final = "state_dict."
"""What the names of the model's weights begin with."""


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read when it is compared.

    Attributes:
        shape: Its sizes.
        dtype: Its number format.
        read: Reads it into host memory, or maps it there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def entries_of(source: Source, trust: Sequence[str] = ()) -> dict[str, Any]:
    """All of a checkpoint: tensors as `Lazy`, other values as they are, each under its path (`state_dict.0.weight`).

    Files are mapped, not read: comparing two of 10 GiB takes the memory of two tensors.  A folder of DeepSpeed's has
    to be put together first, in memory.

    Raises:
        CheckpointError: Something is missing, damaged, or an object that is not in `trust`.
    """
    if source.format == "torch":
        state = _mapped(source.content, trust)
        bare = isinstance(state, Mapping) and all(isinstance(value, torch.Tensor) for value in state.values())
        found = dict(_flat({"state_dict": state} if bare else state))  # weights alone have no names around them
    elif source.format == "distributed":
        found = _distributed(source.content, trust)
    elif source.format == "safetensors":
        found = dict(_flat({"state_dict": read_safetensors(source.content)}))
    else:
        found = dict(_flat(read_any(source, trust)))
    if source.own is not None:
        for path in sorted(source.path.glob("rank-*.pt")):
            found.update((f"{path.stem}.{name}", value) for name, value in _flat(_mapped(path, trust)))
    return found


def _mapped(path: Path, trust: Sequence[str]) -> Any:
    refuse_unsafe(path, unsafe_globals(path, trust))
    try:
        with allowed(trust, where="--trust"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # of the old format, which cannot be mapped, or damaged: the thorough reader says which
        return read_state(path, safe_globals=trust)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value by its path; an empty mapping or list is one too."""
    if isinstance(value, torch.Tensor):
        yield path, Lazy(tuple(value.shape), value.dtype, lambda: value.detach())
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(
        isinstance(item, (Mapping, list, tuple, torch.Tensor)) for item in value
    ):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}")
    elif path:  # all of an empty file is nothing
        yield path, value


def _distributed(folder: Path, trust: Sequence[str]) -> dict[str, Any]:
    """Under the names that a plain file has: optimizers' parameters by number."""
    shards = Shards(folder)
    stored = shards.contents.state_dict_metadata
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    with allowed(trust, where="--trust"):
        plain = shards.read_host([name for name in stored if name not in tensors])
    lazy = {name: _lazy(shards, name, entry) for name, entry in tensors.items()}
    found: dict[str, Any] = {}
    for key, part in shards.nested({**plain, **lazy}).items():
        number = optimizer_number(key)
        if number is not None:
            found.update(_flat(numbered({"state": {}, "param_groups": [], **part}), f"optimizer_states.{number}"))
        else:
            found.update(_flat(part, "state_dict" if key == "model" else key))
    if (folder / REST).is_file():
        rest = _mapped(folder / REST, trust)
        found.update(_flat({key: value for key, value in rest.items() if key != VERSIONS}))
    return found


def _lazy(shards: Shards, name: str, entry: TensorStorageMetadata) -> Lazy:
    return Lazy(tuple(entry.size), entry.properties.dtype, lambda: shards.read_host([name])[name])
