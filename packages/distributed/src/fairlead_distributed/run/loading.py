"""Weights from a file, and a checkpoint of another model, reported in the user's terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fairlead.errors import CheckpointError, MissingDependencyError, RunFailedError
from fairlead.install import install_line
from fairlead_distributed._sharded import is_dtensor
from fairlead_distributed.full_state import named_as, plain_name, plain_state

MODEL: Final = "model (by names of the unsplit model)"
"""In a checkpoint of a `Run`: the key of the shared modules' state, where it is sharded or gathered."""
_EXPORTED: Final = "weights.safetensors"

_OVER = re.compile(r"Tried to step \d+ times\. The specified number of total steps is (?P<total>\d+)")
_HEAD = re.compile(r"Error\(s\) in loading state_dict for (?P<model>\w+):")


@contextmanager
def readable_load_errors(checkpoint: Path | None) -> Iterator[None]:
    """Has torch's report of keys and shapes that do not fit the model be a `CheckpointError` with the file."""
    try:
        yield
    except RuntimeError as error:
        head = _HEAD.match(str(error))
        if checkpoint is None or head is None:
            raise
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        shown = [line if len(line) <= 160 else f"{line[:157]}..." for line in lines[:5]]
        if len(lines) > 5:
            shown.append(f"and {len(lines) - 5} more")
        raise CheckpointError(
            f"the checkpoint is of another model than {head['model']}",
            where=str(checkpoint),
            why="\n".join(shown),
            fix="use the model that it was written with, or start anew with --resume never",
        ) from error


@contextmanager
def schedule_errors() -> Iterator[None]:
    """Has torch's report of a schedule that is over (`OneCycleLR`) say what to change."""
    try:
        yield
    except ValueError as error:
        found = _OVER.search(str(error))
        if found is None:
            raise
        raise RunFailedError(
            f"a learning-rate schedule was made for {found['total']} steps, and the training continues beyond them",
            where="configure_optimizers",
            why=f"{str(error).splitlines()[0]}; a schedule that is resumed keeps the length that it was made with",
            fix="train no longer than that (trainer.max_steps, trainer.max_epochs); or make it longer from the start: "
            "total_steps=self.trainer.estimated_stepping_batches with the final max_steps or max_epochs, in a new run; "
            "to continue from these weights: --resume weights:PATH",
        ) from error


def as_it_was_saved(model: nn.Module) -> Callable[[], None]:
    """Has a model as it was made take the weights of one that its training has changed; returns what ends it.

    A buffer that has grown gets the shape that it had. What the training has pruned is loaded as it was trained: its
    mask comes with the rest of the state (`restore_module`), when the optimizers know the parameter.
    """

    def before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for path, one in module.named_modules(prefix=prefix.rstrip(".")):
            for name, buffer in list(one._buffers.items()):
                saved = state.get(f"{path}.{name}".lstrip("."))
                if not isinstance(saved, torch.Tensor) or is_lazy(buffer):
                    continue
                if buffer is None or buffer.shape != saved.shape:
                    device = saved.device if buffer is None else buffer.device
                    one._buffers[name] = torch.empty_like(saved, device=device)
        known = dict(module.named_parameters(prefix=prefix.rstrip(".")))
        for mask in [key for key in state if key.endswith("_mask")]:
            name = mask.removesuffix("_mask")
            if name in known and f"{name}_orig" in state:
                state[name] = state.pop(f"{name}_orig")
                del state[mask]

    handle: Any = model.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
    return lambda: handle.remove()


def load_weights(model: nn.Module, weights: Path, name: str | None = None) -> None:
    """Loads nothing but the weights of a checkpoint, of a file of torch's, or of an exported folder or file.

    `name`: of the module in a `Run`, where its weights are not called `state_dict` in the file.
    """
    if (weights / _EXPORTED).exists():
        weights = weights / _EXPORTED
    if weights.is_dir():
        raise CheckpointError(
            "the weights lie in shards",
            where=str(weights),
            fix="make one file of them: `fairlead checkpoint consolidate`, and name that file",
        )
    configure = getattr(type(model), "configure_model", None)  # of a LightningModule
    if configure is not None and not configure.__module__.startswith("lightning."):
        raise CheckpointError(
            f"{type(model).__name__} makes its layers in configure_model, after weights could be loaded",
            where=str(weights),
            fix="load them at the end of configure_model, or make the layers in the constructor",
        )
    if weights.suffix == ".safetensors":
        _load_exported(model, weights)
        return
    try:
        found = torch.load(weights, map_location="cpu", weights_only=True)
        if name is not None and MODEL in found:  # gathered: those of all modules, behind the module's name
            own = (key for key in found[MODEL] if key.startswith(f"{name}."))
            found = {key.removeprefix(f"{name}."): found[MODEL][key] for key in own}
        state = next((found[key] for key in ("state_dict", name) if key in found), found)
    except Exception as error:  # pickle, zip, OS: torch.load raises whatever it meets
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError("the weights cannot be read", where=str(weights), why=why) from error
    with readable_load_errors(weights):
        if not any(map(is_dtensor, model.parameters())):
            model.load_state_dict(named_as(model, state))
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # half a second

        set_model_state_dict(model, plain_state(state), options=StateDictOptions(full_state_dict=True))


def _load_exported(model: nn.Module, weights: Path) -> None:
    try:
        from safetensors.torch import load_file, load_model
    except ImportError as error:
        raise MissingDependencyError(
            "loading an exported folder needs safetensors", why=str(error), fix=install_line("lightning")
        ) from error
    with readable_load_errors(weights):
        if all(plain_name(path) == path for path, _ in model.named_modules()):
            load_model(model, str(weights))
            return
        state = named_as(model, load_file(weights))
        tied = {one.data_ptr(): state[name] for name, one in model.state_dict().items() if name in state}
        lacking = {name: one for name, one in model.state_dict().items() if name not in state}
        state.update({name: tied[one.data_ptr()] for name, one in lacking.items() if one.data_ptr() in tied})
        model.load_state_dict(state)
