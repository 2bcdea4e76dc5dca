"""The named state of a run: what a checkpoint holds, how each part is restored, and whether that is exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_distributed._sharded import is_dtensor, is_fsdp1
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.divergence import Entry as TensorEntry
from fairlead_distributed.divergence import entry_of
from fairlead_distributed.full_state import named_as, plain_state
from fairlead_distributed.module_state import module_state, restore_flags, restore_module
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.plain_data import GENERATORS, from_plain, is_stateful, is_users_class, put_back, to_plain
from fairlead_distributed.rng import rng_state
from fairlead_distributed.run.loading import readable_load_errors
from fairlead_runs.describe import counted

OWN: Final = "fairlead"
"""The key of the run's own entry in the shared state."""
OPTIMIZERS: Final = "optimizers (by names of the unsplit model)"
"""The key of the shared optimizers' state, where it is sharded or gathered."""
OTHERS: Final = "meta.pt"
"""The file, in its folder, with the shared state that torch's distributed checkpoint does not take."""
ALL_GROUPS: Final = "parameters that do not require gradients yet (`requires_grad_(False)`) stay as they are"
"""Why an optimizer can have from the start what a loop would add to it."""

Layout = Literal["replicated", "sharded", "stages"]
"""What the ranks hold of the registered modules: all the same; shards of it; or other modules, as of a pipeline."""

_ENGINES: Final = ("lightning.fabric.wrappers", "accelerate.")
"""Whose wrappers around modules and optimizers are looked into: the state is that of what they wrap."""


@dataclass(frozen=True)
class Entry:
    """One registered object; `per_rank`: each rank has its own."""

    name: str
    value: Any
    per_rank: bool


class Registry:
    """The objects of a run by name, in torch DCP's protocol: `state_dict` and `load_state_dict`.

    Random generators (`torch.Generator`, `numpy.random.Generator`, `random.Random`) are taken as well. Modules and
    optimizers that Fabric or Accelerate has wrapped are looked into.

    Attributes:
        attributes: What modules, optimizers of the user's classes and datasets of the loaders keep in attributes.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._groups: dict[str, int] = {}  # of each optimizer's parameters, as the script has made it
        self.attributes = Attributes(of_optimizer)

    def add(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        """Registers an object.

        Raises:
            ConfigError: The name is taken, or the object has no state that can be saved and restored.
        """
        if name == OWN or name in self._entries:
            what = "is the run's own" if name == OWN else "is registered already"
            raise ConfigError(f"the name {name!r} {what}", where="Run", fix="choose another name")
        value = _unwrapped(value)
        if type(value).__module__.startswith("deepspeed."):
            raise ConfigError(
                f"{name} is DeepSpeed's, whose engine keeps weights and optimizer state in its own way",
                where="Run",
                fix="train with fairlead.Trainer(strategy='deepspeed'), or shard the model with torch's fully_shard",
            )
        if isinstance(value, nn.Module) and any(map(is_fsdp1, value.modules())):
            raise ConfigError(
                f"{name} is sharded by FullyShardedDataParallel",
                where="Run",
                why="torch cannot load what its distributed checkpoints hold of the optimizer (torch 2.13)",
                fix="shard it with torch's fully_shard (Accelerate: fsdp_version=2), "
                "or train with fairlead.Trainer(strategy='fsdp')",
            )
        if not is_stateful(value) and not isinstance(value, GENERATORS):
            raise ConfigError(
                f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which has no state to restore",
                where="Run",
                why="it has no state_dict() and load_state_dict()",
                fix=f"put plain data into run.state[{name!r}]; give other objects these two methods",
            )
        self._entries[name] = Entry(name, value, per_rank)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def names(self) -> dict[str, list[str]]:
        """The names of all, for the manifest of a checkpoint."""
        shared = sorted(one.name for one in self if not one.per_rank)
        return {"shared": shared, "per_rank": sorted(one.name for one in self if one.per_rank)}

    def modules(self) -> dict[str, nn.Module]:
        """The modules, without DistributedDataParallel around them."""
        return {one.name: _bare(one.value) for one in self if isinstance(one.value, nn.Module)}

    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers of torch's kind."""
        return {one.name: one.value for one in self if isinstance(one.value, Optimizer)}

    def saved_optimizers(self) -> list[Optimizer]:
        """The optimizers, also those that one around them keeps; a schedule has one too, and saves nothing of it."""
        others = (one.value for one in self if hasattr(one.value, "zero_grad") and not isinstance(one.value, nn.Module))
        held = (value for one in others for value in getattr(one, "__dict__", {}).values())
        return [*self.optimizers().values(), *(value for value in held if isinstance(value, Optimizer))]

    def grown_optimizers(self) -> list[str]:
        """The optimizers to which the loop has added parameter groups."""
        return [
            name
            for name, one in self.optimizers().items()
            if len(one.param_groups) > self._groups.get(name, len(one.param_groups))
        ]

    def is_ddp(self) -> bool:
        """Whether DistributedDataParallel copies buffers of rank 0 to all before each forward pass."""
        return any(isinstance(one.value, DistributedDataParallel) and one.value.broadcast_buffers for one in self)

    def layout(self) -> Layout:
        """What the ranks hold of the shared modules. A collective: the ranks compare the names of their parameters."""
        held = [one for one in self._parts() if isinstance(one.value, nn.Module)]
        tensors = [tensor for one in held for tensor in one.value.parameters()]
        if any(map(is_dtensor, tensors)):
            return "sharded"
        names = [name for name, _ in self.model().named_parameters()]
        if len(set(map(tuple, gather_objects(names)))) == 1:
            return "replicated"
        self._require_one_tensor_a_name()
        return "stages"

    def _require_one_tensor_a_name(self) -> None:
        """Stages are written as one model: what two ranks call alike has to be the same tensor."""
        held = {name: entry_of(name, one) for name, one in self.model().named_parameters()}
        found: dict[str, TensorEntry] = {}
        for rank, theirs in enumerate(gather_objects(held)):
            for name, tensor in theirs.items():
                if found.setdefault(name, tensor) != tensor:
                    raise ConfigError(
                        f"the ranks hold different tensors under the name {name!r}",
                        where=f"Run, rank {rank}",
                        why="modules with other names on each rank are saved as the parts of one model",
                        fix="give the stages the names of the full model; or register them for each rank: "
                        "Run(per_rank={...})",
                    )

    def model(self) -> nn.Module:
        """The shared modules as one module with their names, for torch's helpers of distributed checkpoints."""
        together = nn.Module()
        for one in self._parts():
            if isinstance(one.value, nn.Module):
                together.add_module(one.name, _bare(one.value))
        return together

    def shared_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers whose state is shared."""
        return {one.name: one.value for one in self._parts() if isinstance(one.value, Optimizer)}

    def shared_state(self, *, sharded: bool) -> dict[str, Any]:
        """The states of the shared objects, as plain data and tensors; `sharded`: but for modules and optimizers.

        Raises:
            ConfigError: A state holds what could not be read back.
        """
        return {
            one.name: _state_of(one)
            for one in self._parts()
            if not (sharded and isinstance(one.value, (nn.Module, Optimizer)))
        }

    def load_shared(self, states: Mapping[str, Any], file: Path) -> None:
        """Gives the shared objects what `shared_state` returned."""
        for name, state in states.items():
            if name != OWN:
                _load(self._entries[name], state, file)

    def watch(self) -> None:
        """Begins to watch what training may change in modules and optimizers, before anything is restored."""
        self._groups = {name: len(one.param_groups) for name, one in self.optimizers().items()}
        modules = self.modules()
        self.attributes.exclude(
            *(one.value for one in self), *(part for one in modules.values() for part in one.modules())
        )
        for name, module in modules.items():
            self.attributes.watch(name, module)
        for name, optimizer in self.optimizers().items():
            if is_users_class(type(optimizer)) and type(optimizer).state_dict is Optimizer.state_dict:
                self.attributes.watch(f"optimizer {name}", optimizer, always=True)
        self.attributes.mark()

    def rank_state(self, *, buffers: bool) -> dict[str, Any]:
        """What this rank saves; `buffers`: those of its modules too, as not all are in the shared state."""
        return {
            "objects": {one.name: _state_of(one) for one in self if one.per_rank},
            "modules": {name: module_state(one, buffers=buffers) for name, one in self.modules().items()},
            "attributes": self.attributes.state(),
            "rng": rng_state(),
        }

    def load_rank(self, state: Mapping[str, Any], file: Path, *, same_ranks: bool) -> None:
        """Gives this rank's objects what `rank_state` returned, or rank 0's part of it; not the generators."""
        for one in self:
            if one.per_rank:
                _load(one, state["objects"][one.name], file)
        for name, module in self.modules().items():
            with loading(f"what a rank has saved of {name}", file):
                (restore_module if same_ranks else restore_flags)(module, state["modules"][name])
        self.attributes.restore(state.get("attributes", {}), same_ranks=same_ranks)

    def require_same(self, saved: Any, where: Path) -> None:
        """Raises where the names that a manifest gives are not those of this run."""
        if not isinstance(saved, Mapping) or set(saved) != {"shared", "per_rank"}:
            raise CheckpointError(
                "this checkpoint was not written by a Run",
                where=str(where),
                why="its manifest does not name what is in it: a Trainer has written it, or another program",
                fix="load it yourself before the loop, or begin with its weights: RunConfig(resume='weights:PATH')",
            )
        for kind, ours in self.names().items():
            missing, extra = set(ours) - set(saved[kind]), set(saved[kind]) - set(ours)
            if missing or extra:
                what = f"has no {_list(missing)}" if missing else f"also has {_list(extra)}, which was not given"
                raise CheckpointError(
                    f"the checkpoint {what}",
                    where=str(where),
                    why=f"{kind}: it holds {_list(saved[kind])}; Run was given {_list(ours)}",
                    fix="give Run the same objects, or begin a new run: RunConfig(name=..., resume='never')",
                )

    def _parts(self) -> Iterator[Entry]:
        return (one for one in self if not one.per_rank)


def serialize(value: Any, where: str) -> Any:
    """The value as a file holds it, for `from_plain`.

    Raises:
        ConfigError: It holds what could not be read back.
    """
    try:
        return to_plain(value, where, devices=False)
    except TypeError as error:
        raise ConfigError(
            f"{error}: it cannot be read from a checkpoint again",
            where="Run",
            why="reading runs no code of the file; so it holds tensors, arrays, numbers, texts, and lists and mappings "
            "of them",
            fix="convert it, or register an object whose state_dict() returns such data",
        ) from error


def of_optimizer(owner: object) -> frozenset[str]:
    """The attributes that torch's class of optimizers keeps for itself; none of another object."""
    return frozenset(vars(SGD([torch.zeros(1)])) if isinstance(owner, Optimizer) else ())


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
            fix="give Run objects like those it was saved with, or begin a new run",
        ) from error


def _state_of(entry: Entry) -> Any:
    value, where = entry.value, f"the state of {entry.name}"
    if isinstance(value, nn.Module):
        state = plain_state(_bare(value).state_dict())
        serialize(dict(state), where)
        return state  # torch keeps versions in an attribute of a module's state
    return serialize(value if isinstance(value, GENERATORS) else value.state_dict(), where)


def _load(entry: Entry, state: Any, file: Path) -> None:
    value = entry.value
    if isinstance(value, Optimizer):
        _require_groups(entry.name, value, state, file)
    with loading(f"the state of {entry.name}", file):
        if isinstance(value, nn.Module):
            bare = _bare(value)
            bare.load_state_dict(named_as(bare, state))
        elif isinstance(value, GENERATORS):
            put_back(value, from_plain(state))
        else:
            value.load_state_dict(from_plain(state))


def _require_groups(name: str, optimizer: Optimizer, state: Any, file: Path) -> None:
    here = len(optimizer.param_groups)
    saved = len(state.get("param_groups", optimizer.param_groups))  # one around another may have a state of its own
    if here != saved:
        raise CheckpointError(
            f"{name} has {counted(here, 'parameter group')}, and in the checkpoint {saved}",
            where=str(file),
            why="the loop has added some since it began, or the script makes it otherwise now",
            fix=f"before restore(), make {name} with all its groups; {ALL_GROUPS}",
        )


def _unwrapped(value: Any) -> Any:
    """What an engine's wrapper holds: a Fabric module's own forward module, the optimizer or scheduler behind one."""
    while type(value).__module__.startswith(_ENGINES):
        held = (getattr(value, name, None) for name in ("_forward_module", "optimizer", "scheduler"))
        inner = next((one for one in held if one is not None), None)
        if inner is None:
            break
        value = inner
    return value


def _bare(module: nn.Module) -> nn.Module:
    """The module in a DistributedDataParallel."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, nn.Module)
    return inner


def _list(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
