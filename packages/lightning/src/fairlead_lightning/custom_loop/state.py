"""What the run of a user's own loop carries: objects with a state, and plain data, shared or of each rank."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lightning.fabric import is_wrapped
from torch.nn import Module
from torch.optim import Optimizer

from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_distributed import rng_state
from fairlead_distributed.module_state import module_state, restore_flags, restore_module
from fairlead_lightning.resume.loading import readable_load_errors
from fairlead_lightning.resume.stateful_loader import is_stateful

OWN: Final = "fairlead"
"""The key of the run's own entry in the shared state."""

_LEAVES: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
    | {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device}
)


class LoopState:
    """The objects of a run by name: shared ones, which rank 0 or the strategy writes, and those of each rank."""

    def __init__(self, shared: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
        self.shared = dict(shared)
        self.per_rank = dict(per_rank)
        if OWN in self.shared:
            raise ConfigError(f"the name {OWN!r} is the run's own", where="LoopRun", fix="call the object another name")
        for name, value in {**self.shared, **self.per_rank}.items():
            if is_wrapped(value) and not isinstance(value, (Module, Optimizer)):
                raise ConfigError(
                    f"{name} is what setup_dataloaders returned",
                    where="LoopRun",
                    why="it does not pass on the state of the loader in it",
                    fix="give the loader itself, and take its batches from LoopRun.batches()",
                )
            if not is_stateful(value):
                plain(value, name)

    def of_strategy(self) -> dict[str, Any]:
        """What Fabric has set up; its strategy knows how that is saved and loaded."""
        return {name: value for name, value in self.shared.items() if is_wrapped(value)}

    def others(self) -> dict[str, Any]:
        """The states of the others, as plain data that can be read again, else a `ConfigError`."""
        return {name: _state_of(value, name) for name, value in self.shared.items() if not is_wrapped(value)}

    def load_others(self, states: Mapping[str, Any], file: Path) -> None:
        """Gives the others what `others` returned; plain data are replaced in `shared`."""
        for name in [name for name, value in self.shared.items() if not is_wrapped(value)]:
            _load(self.shared, name, states[name], file)

    def own(self, *, buffers: bool) -> dict[str, Any]:
        """What this rank saves; `buffers`: those of its modules too, as not all are in the shared state."""
        return {
            "objects": {name: _state_of(value, name) for name, value in self.per_rank.items()},
            "modules": {name: module_state(one, buffers=buffers) for name, one in self.modules()},
            "rng": rng_state(),
        }

    def load_own(self, state: Mapping[str, Any], file: Path, *, same_ranks: bool) -> None:
        """Gives this rank's objects what `own` returned, or rank 0's part of it; not the generators."""
        for name in self.per_rank:
            _load(self.per_rank, name, state["objects"][name], file)
        for name, module in self.modules():
            with loading(f"what a rank has saved of {name}", file):
                (restore_module if same_ranks else restore_flags)(module, state["modules"][name])

    def modules(self) -> Iterator[tuple[str, Module]]:
        """The user's own modules, by name."""
        for name, value in {**self.shared, **self.per_rank}.items():
            if isinstance(value, Module):
                yield name, inner_module(value)

    def names(self) -> dict[str, list[str]]:
        """The names of all, for the manifest of a checkpoint."""
        return {"shared": sorted(self.shared), "per_rank": sorted(self.per_rank)}

    def require_same(self, saved: Any, where: Path) -> None:
        """Raises where the names that a manifest gives are not those of this run."""
        if not isinstance(saved, Mapping) or set(saved) != {"shared", "per_rank"}:
            raise CheckpointError(
                "this is no checkpoint of a loop's run",
                where=str(where),
                why="its manifest does not name what is in it: a Trainer has written it, or another program",
                fix="load it with fabric.load() before the loop, and name it neither as `resume` nor as `ckpt_path`",
            )
        for kind, ours in self.names().items():
            missing, extra = set(ours) - set(saved[kind]), set(saved[kind]) - set(ours)
            if missing or extra:
                what = f"has no {_list(missing)}" if missing else f"also has {_list(extra)}, which was not given"
                raise CheckpointError(
                    f"the checkpoint {what}",
                    where=str(where),
                    why=f"{kind}: it holds {_list(saved[kind])}; LoopRun was given {_list(ours)}",
                    fix="give LoopRun the same objects, or begin a new run: RunConfig(name=..., resume='never')",
                )


def inner_module(module: Module) -> Module:
    """The user's own module in what `fabric.setup` returned."""
    inner = module.module if is_wrapped(module) else module
    return inner if isinstance(inner, Module) else module


def plain(value: Any, where: str) -> Any:
    """A copy of the containers in `value`, of what `torch.load(..., weights_only=True)` reads, else a `ConfigError`."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in (dict, OrderedDict, Counter):
        return kind({plain(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()})
    if kind in (list, tuple, set):
        return kind(plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, np.generic) and type(value.item()) in _LEAVES:
        return value.item()
    raise ConfigError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be read from a checkpoint again",
        where="LoopRun",
        why="reading runs no code of the file; so it holds tensors, numbers, texts, and lists and mappings of them",
        fix="convert it, or give an object whose state_dict() returns such data",
    )


def _state_of(value: Any, name: str) -> Any:
    if not is_stateful(value):
        return plain(value, name)
    state = value.state_dict()
    checked = plain(state, f"the state of {name}")
    return state if isinstance(value, Module) else checked  # torch keeps versions in an attribute of a module's state


def _load(objects: dict[str, Any], name: str, state: Any, file: Path) -> None:
    if not is_stateful(objects[name]):
        objects[name] = state
        return
    with loading(f"the state of {name}", file):
        objects[name].load_state_dict(state)


@contextmanager
def loading(what: str, file: Path) -> Iterator[None]:
    """Has whatever an object says of a state that is not its own be a `CheckpointError`."""
    try:
        with readable_load_errors(file):
            yield
    except FairleadError:
        raise
    except Exception as error:  # each class has its own way to refuse a state
        raise CheckpointError(
            f"{what} does not fit",
            where=str(file),
            why=f"{type(error).__name__}: {error}"[:1000],
            fix="give LoopRun objects like those it was saved with, or begin a new run",
        ) from error


def _list(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
