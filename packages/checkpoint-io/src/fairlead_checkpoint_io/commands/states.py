"""A checkpoint of any known format as one plain Lightning state in host memory, and the way back."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.commands.deepspeed_folder import read_deepspeed
from fairlead_checkpoint_io.commands.optimizers import by_name, by_number
from fairlead_checkpoint_io.commands.places import Source
from fairlead_checkpoint_io.commands.trust import foreign, refuse_foreign, trusted
from fairlead_checkpoint_io.files.dcp_reading import SafeReader, nested, read_flat
from fairlead_checkpoint_io.files.reading import read_state
from fairlead_runs.commit.files import disk_error

__all__ = ["REST", "only_weights", "read_any", "read_file", "weights_of", "write_distributed"]

REST: Final = "meta.pt"
"""In a sharded folder: everything of the state that is neither weights nor optimizers."""
_MODEL: Final = "state_dict"


def read_any(source: Source, trust: Sequence[str] = ()) -> dict[str, Any]:
    """The state of a checkpoint as plain Lightning has it: `state_dict`, `optimizer_states`, loops, ...

    Raises:
        CheckpointError: Something is missing, damaged, or an object that is not in `trust`.
    """
    if source.format == "torch":
        return read_file(source.content, trust)
    if source.format == "distributed":
        return _read_distributed(source.content, trust)
    if source.format == "deepspeed":
        return read_deepspeed(source.content, trust)
    return {_MODEL: _read_safetensors(source.content), **_lightning_version()}


def read_file(path: Path, trust: Sequence[str] = ()) -> dict[str, Any]:
    """A file of torch.save with a mapping in it, checked while it is read.

    Raises:
        CheckpointError: As `read_any`.
    """
    refuse_foreign(path, foreign(path, trust))
    with trusted(trust):
        return read_state(path, safe_globals=trust)


def weights_of(state: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """The weights in a state; a file that is nothing but tensors is all weights.

    Raises:
        CheckpointError: There are none.
    """
    weights = state.get(_MODEL)
    if isinstance(weights, Mapping):
        return weights
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        return state
    raise CheckpointError(
        "this file holds no weights", where=str(where), why=f"its keys are: {', '.join(map(str, list(state)[:12]))}"
    )


def only_weights(state: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """What plain Lightning needs to load a model: weights, hyperparameters, versions; no optimizers, no loops."""
    kept = {
        key: value
        for key, value in state.items()
        if isinstance(key, str)
        and key.startswith(("hyper_parameters", "hparams_", "datamodule_hyper", "datamodule_hparams"))
    }
    described = {key: state[key] for key in ("pytorch-lightning_version", "epoch", "global_step") if key in state}
    return {**_lightning_version(), **described, **kept, _MODEL: weights_of(state, where)}


def write_distributed(state: Mapping[str, Any], folder: Path, where: Path) -> None:
    """Fills an empty folder as Lightning's sharded strategies and the backend `distributed` do.

    Args:
        state: A plain Lightning state.
        folder: Where to write; it exists.
        where: Where the state is from, for errors.

    Raises:
        CheckpointError: The optimizers' parameters cannot be named.
    """
    weights = weights_of(state, where)
    rest = {} if weights is state else {k: v for k, v in state.items() if k not in (_MODEL, "optimizer_states")}
    shards: dict[str, Any] = {_MODEL: dict(weights)}
    for number, optimizer in enumerate(() if weights is state else state.get("optimizer_states", ())):
        shards[f"optimizer_{number}"] = by_name(optimizer, weights, where=f"{where}, optimizer {number}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save(rest, folder / REST)


def _read_distributed(folder: Path, trust: Sequence[str]) -> dict[str, Any]:
    reader = SafeReader(folder)
    with trusted(trust):
        shards = nested(reader, read_flat(reader))
    state: dict[str, Any] = read_file(folder / REST, trust) if (folder / REST).is_file() else {**_lightning_version()}
    weights = shards.pop(_MODEL, shards.pop("model", None))
    if weights is None:
        raise CheckpointError(
            "this distributed checkpoint has no weights under 'state_dict'",
            where=str(folder),
            why=f"its parts are: {', '.join(sorted(shards)[:12])}",
            fix="only the layout of Lightning's sharded checkpoints is known here",
        )
    state[_MODEL] = OrderedDict(weights)
    optimizers = sorted((name for name in shards if name.startswith("optimizer_")), key=_number)
    if optimizers:
        state["optimizer_states"] = [by_number(shards[name]) for name in optimizers]
    return state


def _number(name: str) -> tuple[int, str]:
    digits = name.removeprefix("optimizer_")
    return (int(digits) if digits.isdecimal() else -1), name


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            said = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError("the checkpoint is damaged", where=str(path), why=str(error)) from error
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", path) from error
    # The library keeps one name of tied weights, and says of the others which one that is.
    for name, kept in said.items():
        if name not in weights and kept in weights:
            weights[name] = weights[kept]
    return weights


def _lightning_version() -> dict[str, str]:
    """What Lightning asks of a checkpoint before it loads anything else."""
    for dist in ("lightning", "pytorch-lightning"):
        try:
            return {"pytorch-lightning_version": version(dist)}
        except PackageNotFoundError:
            continue
    return {"pytorch-lightning_version": "2.6.6"}
