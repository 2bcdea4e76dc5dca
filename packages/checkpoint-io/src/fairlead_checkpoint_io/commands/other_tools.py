"""Folders that other tools write and read: DeepSpeed's checkpoints, and those that transformers loads."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fairlead.errors import CheckpointError, MissingDependencyError
from fairlead.install import install_line
from fairlead_checkpoint_io.commands.states import read_file, read_safetensors
from fairlead_checkpoint_io.files.formats import TRAINER_STATE
from fairlead_checkpoint_io.files.trust import allowed, refuse_unsafe, unsafe_globals

_OF_THE_ENGINE: Final = frozenset(
    (
        *("module", "optimizer", "lr_scheduler", "buffer_names", "param_shapes", "frozen_param_shapes"),
        *("frozen_param_fragments", "shared_params", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size"),
        *("mp_world_size", "ds_config", "ds_version", "expert_parallel_size", "autoep_layers"),
        "checkpoint_parallel_dimensions",
    )
)
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")
_FORCE: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def read_deepspeed(folder: Path, trust: Sequence[str]) -> dict[str, Any]:
    """The weights of all ranks together in float32, and what Lightning saved with them; no optimizer state."""
    base, tag = _tag(folder)
    found: set[str] = set()
    for path in sorted((base / tag).glob("*.pt")):
        found.update(unsafe_globals(path, trust))
    refuse_unsafe(base / tag, sorted(found), kind="this DeepSpeed folder")
    try:
        zero = importlib.import_module("deepspeed.utils.zero_to_fp32")
    except ImportError as error:
        raise MissingDependencyError(
            "reading a DeepSpeed folder needs deepspeed", why=str(error), fix=install_line("deepspeed")
        ) from error
    try:
        # DeepSpeed loads with weights_only=False, against which torch has a switch; and it prints, to both streams.
        out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with allowed(trust, where="--trust"), _weights_only(), out, err:
            weights = zero.get_fp32_state_dict_from_zero_checkpoint(str(base), tag)
            saved = torch.load(min((base / tag).glob("*_model_states.pt")), map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        refused = _GLOBAL.search(str(error))  # in a file of torch before 1.6, which has no table of contents
        raise CheckpointError(
            "DeepSpeed cannot put this folder together",
            where=str(base / tag),
            why=f"it holds {refused[1]}, which could run any code" if refused else f"{type(error).__name__}: {error}",
            fix="is the file of every rank there? Use another checkpoint",
        ) from error
    state = {key: value for key, value in saved.items() if key not in _OF_THE_ENGINE}
    # DeepSpeed forgets frozen weights of stage 1, though they are there in full; stage 3 has empty ones instead.
    for name, tensor in saved.get("module", {}).items():
        if name not in weights and isinstance(tensor, torch.Tensor) and tensor.numel() > 0:
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    # Lightning before 2.1 wrapped the module.
    state["state_dict"] = {name.removeprefix("_forward_module."): value for name, value in weights.items()}
    return state


def _tag(folder: Path) -> tuple[Path, str]:
    latest = folder / "latest"
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if Path(tag).name == tag and (folder / tag).is_dir():
            return folder, tag
        raise CheckpointError("the newest part of this DeepSpeed folder is not there", where=str(latest), why=tag)
    return folder.parent, folder.name


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


_NUMPY: Final = (
    *("_core.multiarray._reconstruct", "core.multiarray._reconstruct"),
    *("ndarray", "dtype", "dtypes.UInt32DType"),
)
"""What the state of numpy's generator is pickled with; the Trainer trusts the same."""
_PARTS: Final = {"optimizer.pt": "optimizer_states", "scheduler.pt": "lr_schedulers", "scaler.pt": "scalers"}


def read_transformers(folder: Path, trust: Sequence[str] = ()) -> dict[str, Any]:
    """Weights, optimizer, schedule and where the Trainer was; the random generators of each rank as `rank-00000.rng`.

    Raises:
        CheckpointError: A file is damaged, or there are no weights.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError("the checkpoint has no weights", where=str(folder), fix="use another checkpoint")
    parts = [read_safetensors(shard) for shard in shards]
    trainer = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    state: dict[str, Any] = {
        **parts[0],
        "state_dict": {name: tensor for part in parts for name, tensor in part["state_dict"].items()},
        "epoch": int(trainer.get("epoch") or 0),
        "global_step": trainer.get("global_step"),
        "trainer_state": trainer,
    }
    for file, name in _PARTS.items():
        if (folder / file).is_file():
            state[name] = [read_file(folder / file, trust)]
    for rank, path in enumerate(sorted(folder.glob("rng_state*.pth"))):
        found = read_file(path, [*trust, *(f"numpy.{name}" for name in _NUMPY if _there(name))])
        state[f"rank-{rank:05d}.rng"] = _tensors(found)
    return state


def _there(name: str) -> bool:
    """Whether this numpy has it: the module with the arrays was renamed."""
    return not name.startswith("core.") if hasattr(np, "_core") else not name.startswith("_core.")


def _tensors(value: Any) -> Any:
    """With numpy's arrays as tensors, which are compared bit by bit."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64))
    if isinstance(value, dict):
        return {name: _tensors(item) for name, item in value.items()}
    return type(value)(map(_tensors, value)) if isinstance(value, (list, tuple)) else value
