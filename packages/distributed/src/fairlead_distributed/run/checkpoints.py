"""The checkpoints of a `Run`: its registered state, replicated, sharded or gathered, and a part of each rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fairlead.config import CheckpointConfig
from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_distributed.full_state import plain_name
from fairlead_distributed.info import get_rank, get_world_size
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_distributed.rng import set_rng_state
from fairlead_distributed.run.commits import (
    Commit,
    Commits,
    Problem,
    dump,
    explained,
    load_part,
    raised_by,
    rank_file,
    seed_anew,
    write_errors,
)
from fairlead_distributed.run.loading import MODEL
from fairlead_distributed.run.registry import OPTIMIZERS, OTHERS, OWN, Layout, Registry, loading
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_distributed.run.silent_faults import finite_weights, non_finite_weights
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.commit import Checkpoint, write_file
from fairlead_runs.commit.files import hash_file
from fairlead_runs.commit.manifest import file_problem
from fairlead_runs.describe import counted

T = TypeVar("T")
_FIX: Final = "a smaller learning rate, clipped gradients, or other data; Run(finite=False) continues anyway"


class GroupRanks:
    """The ranks of torch's default process group, or this process alone."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return get_rank() == 0

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank 0's object, on all ranks."""
        assert src == 0
        return broadcast_object(obj)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            dist.barrier()


class RunCheckpoints(Commits):
    """Writes and reads the checkpoints of a run; each method is called by all ranks together.

    `gather`: a sharded model is written as one file with the full state, instead of a folder of shards.
    """

    def __init__(
        self,
        session: RunSession,
        registry: Registry,
        config: CheckpointConfig,
        copies: CheckpointCopies | None,
        *,
        finite: bool,
        gather: bool,
    ) -> None:
        super().__init__(session, GroupRanks(), copies, get_rank(), config)
        self._registry = registry
        self._finite = finite
        self._gather = gather
        self.layout: Layout = "replicated"

    def save(
        self,
        step: int,
        own: Mapping[str, Any],
        shared: Mapping[str, Any],
        metrics: Mapping[str, float],
        metadata: Mapping[str, Any],
        *,
        position: object,
    ) -> bool:
        """Writes and commits a checkpoint: this rank's `own` entry and the `shared` one besides the registered state.

        Raises:
            ConfigError: The state holds what could not be read back.
            RunFailedError: A weight is not finite, and has to be.
        """
        registry = self._registry
        names = [f"{name}.{weight}" for name, one in registry.modules().items() for weight in non_finite_weights(one)]
        finite = finite_weights(names, self.session, step, _FIX, ends=self._finite)
        sharded = self.layout != "replicated"
        modules = [name for name in registry.names()["shared"] if name in registry.modules()]
        state: dict[str, Any] = {OWN: {**shared, "modules": modules}}

        def rank_part() -> dict[str, Any]:
            state.update(registry.shared_state(sharded=sharded))  # on all: each has to know of an error
            return {**registry.rank_state(buffers=sharded or self._rank > 0), **own}

        form = "gathered" if sharded and self._gather else "sharded" if sharded else "replicated"
        manifest = {**metadata, "state": registry.names(), "form": form, "finite": finite}
        write = {"replicated": self._write, "sharded": self._write_shards, "gathered": self._write_gathered}[form]
        return self.commit(step, rank_part, partial(write, state), metrics, manifest, position=position)

    def _write(self, state: Mapping[str, Any], file: Path, commit: Commit) -> Problem:
        if self._rank:
            return None

        def write() -> None:
            commit({file.name: write_file(file, partial(dump, dict(state)))})

        return raised_by(write)

    def _write_gathered(self, state: Mapping[str, Any], file: Path, commit: Commit) -> Problem:
        model, optimizers = self._split_state(full=True)
        return self._write({**state, MODEL: model, OPTIMIZERS: optimizers}, file, commit)

    def _write_shards(self, state: Mapping[str, Any], file: Path, commit: Commit) -> Problem:
        import torch.distributed.checkpoint as dcp  # takes half a second

        hashes, error = {}, None
        try:
            model, optimizers = self._split_state(full=False)
            with _without_torchs_advice():
                dcp.save({MODEL: model, OPTIMIZERS: optimizers}, checkpoint_id=file)
            mine = [file / ".metadata"] if self._rank == 0 else []
            hashes = {f"{file.name}/{one.name}": hash_file(one, sync=True) for one in [*mine, *self._shards(file)]}
            if self._rank == 0:
                hashes[f"{file.name}/{OTHERS}"] = write_file(file / OTHERS, partial(dump, dict(state)))
        except write_errors() as raised:
            error = explained(raised, file)
        found = gather_objects((hashes, error))
        error = next((one for _, one in found if one is not None), None)
        if error is not None or self._rank:
            return error
        together = {name: digest for one, _ in found for name, digest in one.items()}
        return raised_by(partial(commit, together))

    def _shards(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"__{self._rank}_*.distcp"))

    def _split_state(self, *, full: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shared modules' and optimizers' states by the names of the unsplit model, full ones on rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        optimizers = list(self._registry.shared_optimizers().values())
        model, states = get_state_dict(self._registry.model(), optimizers, options=options)
        return dict(model), dict(states)

    # -- back again

    def load(self, file: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], bool]:
        """Loads what `save` wrote, on all ranks together, but for the random generators.

        Returns:
            The metadata, the shared and the own entry, and whether as many ranks continue as have saved.

        Raises:
            CheckpointError: It is damaged, or does not fit; some objects may have been loaded already.
        """
        checkpoint = _of_a_run(file)
        metadata, registry = checkpoint.metadata, self._registry
        registry.require_same(metadata.get("state"), checkpoint.path)
        same_ranks = self._same_ranks(checkpoint)
        mine = self._together(checkpoint, self._rank if same_ranks else 0)
        form, sharded = metadata.get("form"), self.layout != "replicated"
        if form == "replicated" and sharded:
            raise CheckpointError(
                "the checkpoint is of a model that was not sharded, now it is",
                where=str(checkpoint.path),
                why="the optimizer's state is saved by the order of its parameters, of which each rank has shards now",
                fix="start as before; or begin with its weights: RunConfig(resume='weights:PATH'), before sharding",
            )
        with loading("the state of modules and optimizers", file):
            shared = self._load_shared(file, str(form))
        registry.load_shared({name: one for name, one in shared.items() if name not in (MODEL, OPTIMIZERS)}, file)
        registry.load_rank(mine, file, same_ranks=same_ranks)
        return metadata, shared[OWN], mine, same_ranks

    def restore_generators(self, mine: Mapping[str, Any], step: int, data_rank: int, *, same_ranks: bool) -> None:
        """Gives the global random generators the state of this rank's part, or seeds those of other ranks."""
        if same_ranks:
            set_rng_state(mine["rng"])
        else:
            seed_anew(torch.initial_seed(), step, data_rank)

    def _load_shared(self, file: Path, form: str) -> Mapping[str, Any]:
        if form == "replicated":
            return _shared(file)
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_state_dict,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=form == "gathered", cpu_offload=form == "gathered")
        optimizers = list(self._registry.shared_optimizers().values())
        module = self._registry.model()
        if form == "gathered":
            shared = _shared(file)
            model, states = shared[MODEL], shared[OPTIMIZERS]
        else:
            shared = _shared(file / OTHERS)
            model, states = get_state_dict(module, optimizers, options=options)
            parts = {MODEL: model, OPTIMIZERS: states}
            with _without_torchs_advice():
                dcp.load(parts, checkpoint_id=file)
            model, states = parts[MODEL], parts[OPTIMIZERS]
        set_model_state_dict(module, model, options=options)
        for optimizer in optimizers:
            set_optimizer_state_dict(module, optimizer, _part_of(states, optimizer, module), options=options)
        return shared

    def _same_ranks(self, checkpoint: Checkpoint) -> bool:
        """Whether as many ranks continue; what is of each rank cannot be divided over another number of them."""
        before, now = int(checkpoint.metadata["world_size"]), get_world_size()
        if before == now:
            return True
        if names := self._registry.names()["per_rank"]:
            raise CheckpointError(
                f"states of {counted(before, 'rank')} are saved, and {now} would resume",
                where=str(checkpoint.path),
                why=f"registered per rank: {', '.join(names)}",
                fix=f"start {counted(before, 'rank')}",
            )
        if self._rank == 0:
            print(
                f"warning: saved by {counted(before, 'rank')}, resumed by {now}: the random generators start fresh",
                flush=True,
            )
        return False

    def _together(self, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
        """A rank's part, or the first error of any rank: no rank waits for one that could not read."""
        path, found, problem = checkpoint.path / rank_file(rank), {}, None
        try:
            expected = checkpoint.manifest.files.get(path.name)
            damage = (
                file_problem(path, expected, deep=True) if expected is not None else "its manifest does not name it"
            )
            if damage is not None:  # torch does not look
                raise CheckpointError(
                    "a rank's part of the checkpoint is damaged",
                    where=str(path),
                    why=damage,
                    fix="begin from an older one: RunConfig(resume=PATH)",
                )
            found = load_part(path)
        except FairleadError as error:
            problem = error
        first = next((error for error in gather_objects(problem) if error is not None), None)
        if first is not None:
            raise first
        return found


def number(name: str, value: Any) -> float:
    """A metric as a number.

    Raises:
        ConfigError: It is not one number.
    """
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the metric {name!r} is not one number", where="Run", why=str(error)) from error


def _of_a_run(file: Path) -> Checkpoint:
    folder = file.parent if file.name == STATE_FILE else file
    try:
        checkpoint = Checkpoint.at(folder)
        _ = checkpoint.manifest
    except CheckpointError as error:
        raise CheckpointError(
            "this is no checkpoint of a Run",
            where=str(file),
            why=error.why or error.what,
            fix="name a folder under a run's checkpoints/; load another file yourself before the loop",
        ) from error
    return checkpoint


def _part_of(states: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """One optimizer's part of the states of all: torch finds it by itself only where each has some (plain SGD)."""
    owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
    names = {plain_name(name) for name, one in module.named_parameters(remove_duplicate=False) if id(one) in owned}
    groups = [one for one in states["param_groups"] if not one["params"] or not names.isdisjoint(one["params"])]
    return {"state": {name: states["state"][name] for name in states["state"] if name in names}, "param_groups": groups}


def _shared(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = load_part(file, "the shared part of the checkpoint")
    return found


@contextmanager
def _without_torchs_advice() -> Iterator[None]:
    """Torch's distributed checkpoint warns of a process without a group, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
