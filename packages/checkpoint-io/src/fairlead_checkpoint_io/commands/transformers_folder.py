"""A checkpoint folder of Hugging Face's Trainer as one plain Lightning state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.commands.states import read_file, read_safetensors
from fairlead_checkpoint_io.files.formats import TRAINER_STATE

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
