"""A checkpoint of any known format as one plain Lightning state in host memory, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.commands.sources import Source
from fairlead_checkpoint_io.files.formats import REST
from fairlead_checkpoint_io.files.layout import named
from fairlead_checkpoint_io.files.reading import read_state
from fairlead_checkpoint_io.files.shards import Shards, read_shards
from fairlead_checkpoint_io.files.snapshot import on_host
from fairlead_checkpoint_io.files.trust import allowed, refuse_unsafe, unsafe_globals
from fairlead_checkpoint_io.files.writing import write_state
from fairlead_distributed.full_state import plain_name, plain_state
from fairlead_distributed.run.loading import MODEL
from fairlead_distributed.run.registry import OWN
from fairlead_runs.commit.files import disk_error

_MODEL: Final = "state_dict"
_VERSION: Final = "pytorch-lightning_version"
_DDP: Final = "module."
_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
_LIKE_PARAMETER: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")


def read_any(source: Source, trust: Sequence[str] = ()) -> dict[str, Any]:
    """The state of a checkpoint as plain Lightning has it: `state_dict`, `optimizer_states`, loops, ...

    Weights have the names of the module as it was written, whatever its parts were wrapped in.
    """
    state: dict[str, Any] = source.format.call(source.format.read, source.content, trust)
    return _without_wrappers(_of_run(state) if OWN in state else state)


def _of_run(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a `fairlead.Run`: the weights of one module by their own names, of several behind the module's."""
    modules = state[OWN].get("modules", ())
    weights = {f"{name}.{key}": value for name in modules if name in state for key, value in state[name].items()}
    weights |= state.get(MODEL, {})
    if len(modules) == 1:
        weights = {name.removeprefix(f"{modules[0]}."): value for name, value in weights.items()}
    others = {name: value for name, value in state.items() if name not in (*modules, MODEL)}
    return {**others, _MODEL: weights, **_lightning_version()}


def _without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
    """Takes the names of `torch.compile`, FSDP and activation checkpointing out, which Lightning itself writes.

    `module.` in front of all is that of DistributedDataParallel in the file of a script; in Lightning's checkpoints it
    is a layer of the user's own.
    """
    weights = state.get(_MODEL)
    if not isinstance(weights, Mapping):
        tensors = all(isinstance(one, torch.Tensor) for one in state.values())
        return _without_ddp(plain_state(state)) if tensors else state
    state = {**state, _MODEL: plain_state(weights if isinstance(weights, dict) else dict(weights))}
    if _VERSION not in state:
        state[_MODEL] = _without_ddp(state[_MODEL])
    for group in _groups(state):
        if "param_names" in group:
            group["param_names"] = [plain_name(name) for name in group["param_names"]]
    return state


def _without_ddp(weights: dict[str, Any]) -> dict[str, Any]:
    if not all(name.startswith(_DDP) for name in weights):
        return weights
    return {name.removeprefix(_DDP): value for name, value in weights.items()}


def _groups(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for optimizer in state.get("optimizer_states", ()):
        if isinstance(optimizer, Mapping):
            yield from optimizer.get("param_groups", ())


def read_file(path: Path, trust: Sequence[str] = ()) -> dict[str, Any]:
    """A file of torch.save with a mapping in it, checked while it is read."""
    refuse_unsafe(path, unsafe_globals(path, trust))
    with allowed(trust, where="--trust"):
        return read_state(path, safe_globals=trust)


def weights_of(state: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """The weights in a state; a file that is nothing but tensors is all weights."""
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
    names = ("hyper_parameters", "hparams_", "datamodule_hyper", "datamodule_hparams")
    saved = {key: value for key, value in state.items() if isinstance(key, str) and key.startswith(names)}
    described = {key: state[key] for key in (_VERSION, "epoch", "global_step") if key in state}
    return {**_lightning_version(), **described, **saved, _MODEL: weights_of(state, where)}


def write_file(state: dict[str, Any], path: Path, origin: Path) -> list[str]:
    """Writes one plain file; equal states give equal bytes."""
    write_state(on_host(state).state, path)
    return []


def write_distributed(state: Mapping[str, Any], folder: Path, origin: Path) -> list[str]:
    """Fills an empty folder with a plain Lightning state, as Lightning's sharded strategies do."""
    weights = weights_of(state, origin)
    rest = {} if weights is state else {k: v for k, v in state.items() if k not in (_MODEL, "optimizer_states")}
    shards: dict[str, Any] = {_MODEL: dict(weights)}
    for number, optimizer in enumerate(() if weights is state else state.get("optimizer_states", ())):
        shards[f"optimizer_{number}"] = named(
            optimizer, _parameter_names(optimizer, weights, where=f"{origin}, optimizer {number}")
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save(rest, folder / REST)
    return []


def _parameter_names(state: Mapping[str, Any], weights: Mapping[str, Any], *, where: str) -> list[str]:
    """The names of an optimizer's parameters, in the order of its groups.

    They are those the optimizer recorded (it was given `named_parameters()`); else those of the weights in their
    order, where numbers and shapes leave no doubt.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    recorded = {
        number: name
        for group in groups
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    if len(recorded) == len(numbers):
        return [recorded[number] for number in numbers]
    parameters = _parameters(weights)
    if len(groups) != 1:
        raise _doubt(where, f"its parameters are in {len(groups)} groups, whose order is not that of the model")
    if len(parameters) != len(numbers):
        raise _doubt(where, f"it has {len(numbers)} parameters, the weights are {len(parameters)}")
    names = dict(zip(numbers, parameters, strict=True))
    for number, value in state["state"].items():
        for key in _LIKE_PARAMETER:
            held = value.get(key) if isinstance(value, Mapping) else None
            shape = parameters[names[number]].shape
            if isinstance(held, torch.Tensor) and held.shape != shape:
                raise _doubt(where, f"{names[number]} is {list(shape)}, but number {number} is {list(held.shape)}")
    return list(parameters)


def _parameters(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What an optimizer may train, each once: tied weights are one parameter."""
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if name.rpartition(".")[2] in _BUFFERS:
            continue
        memory = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and memory in seen:
            continue
        seen.add(memory)
        found[name] = value
    return found


def _doubt(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        "which parameters an optimizer's state belongs to is not certain",
        where=where,
        why=f"the optimizer has numbered its parameters, and {why}",
        fix="--weights leaves the optimizer out; sharded strategies also resume from the plain file itself;\n"
        "an optimizer made of model.named_parameters() records the names",
    )


def read_distributed(folder: Path, trust: Sequence[str]) -> dict[str, Any]:
    """A folder of torch.distributed.checkpoint, as Lightning's sharded strategies or a `Run` write it."""
    rest: dict[str, Any] = read_file(folder / REST, trust) if (folder / REST).is_file() else {**_lightning_version()}
    if OWN in rest:
        shards = Shards(folder)
        paths = {name: path for name, path in shards.paths.items() if path[0] == MODEL}
        values = shards.read_host(paths)
        return {**rest, MODEL: {str(path[1]): values[name] for name, path in paths.items()}}
    with allowed(trust, where="--trust"):
        state = read_shards(folder, rest, verify=False)
    if not state[_MODEL]:
        raise CheckpointError(
            "this distributed checkpoint has no weights under 'state_dict'",
            where=str(folder),
            why=f"its parts are: {', '.join(sorted(str(key) for key in state if key != _MODEL)[:12])}",
            fix="only the layout of Lightning's sharded checkpoints is known here",
        )
    for optimizer in state.get("optimizer_states", ()):
        if lost := sorted(name for name in optimizer["state"] if isinstance(name, str)):
            raise CheckpointError(
                "an optimizer has state of parameters that it does not train",
                where=str(folder),
                why=", ".join(lost[:8]),
            )
    return state


def read_safetensors(path: Path, trust: Sequence[str] = ()) -> dict[str, Any]:
    """The weights in a file of safetensors, which cannot hold anything else; tied ones under all of their names."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            texts = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError("the checkpoint is damaged", where=str(path), why=str(error)) from error
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", path) from error
    # The library keeps one name of tied weights, and says of the others which one that is.
    for name, saved in texts.items():
        if name not in weights and saved in weights:
            weights[name] = weights[saved]
    return {_MODEL: weights, **_lightning_version()}


def write_safetensors(state: Mapping[str, Any], path: Path, origin: Path) -> list[str]:
    """Writes the weights to a new file of safetensors; gives the entries that are no tensors."""
    described = {"step": state.get("global_step"), "epoch": state.get("epoch")}
    return write_weights(weights_of(state, origin), path, described)


def write_weights(weights: Mapping[str, Any], path: Path, described: Mapping[str, Any]) -> list[str]:
    """Writes a new file of safetensors, which holds tensors and texts only; gives the entries that are neither."""
    from safetensors.torch import save_model

    tensors = dict(_own_memory((str(name), v) for name, v in weights.items() if isinstance(v, torch.Tensor)))
    if not tensors:
        raise CheckpointError("there are no tensors to write", where=str(path))
    # It treats tied ones as a module's, and needs nothing else of a module: one stays, the others are noted.
    given: Any = SimpleNamespace(state_dict=lambda: dict(tensors))
    texts = {str(key): str(value) for key, value in described.items() if value is not None and str(key) not in tensors}
    try:
        save_model(given, str(path), metadata={"format": "pt", **texts})
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            "safetensors cannot hold these weights",
            where=str(path),
            why=next(iter(str(error).strip().splitlines()), type(error).__name__),
            fix="`--to torch --weights` keeps them as they are",
        ) from error
    return [str(name) for name in weights if str(name) not in tensors]


def _own_memory(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Takes parts of larger buffers out of them (DeepSpeed's are such); what was one tensor stays one."""
    taken: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, value in weights:
        storage = value.untyped_storage()
        if storage.nbytes() == value.nbytes:
            yield name, value
            continue
        key = (storage.data_ptr(), value.storage_offset(), value.shape, value.stride())
        yield name, taken.setdefault(key, value.clone())


def _lightning_version() -> dict[str, str]:
    """What Lightning asks of a checkpoint before it loads anything else."""
    try:
        return {_VERSION: version("lightning")}
    except PackageNotFoundError:
        return {_VERSION: "2.6.6"}
