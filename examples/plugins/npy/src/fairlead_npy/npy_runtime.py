"""Reading and writing; imported only when a run is built or a checkpoint is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO

from fairlead import BuildContext
from fairlead.errors import CheckpointError
from fairlead_npy.npy import NpyCheckpointIOConfig
from fairlead_npy.npy_format import INDEX


def write(state: Mapping[str, Any], folder: Path, origin: Path) -> list[str]:
    """Fills an empty folder; NumPy has no bfloat16, so its tensors are written as integers."""
    digests: dict[str, str] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name, content = f"{len(digests)}.npy", io.BytesIO()
            array = value.detach().cpu().contiguous()
            np.save(content, (array.view(torch.int16) if value.dtype == torch.bfloat16 else array).numpy())
            _write(folder / name, content.getvalue())
            digests[name] = hashlib.sha256(content.getvalue()).hexdigest()
            return {"tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, dict):
            return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [plain(item) for item in value]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise CheckpointError(
            "this format holds tensors and plain data only",
            where=str(origin),
            why=f"the state has a {type(value).__module__}.{type(value).__qualname__}",
            fix="checkpoint_io: torch",
        )

    index = {"state": plain(dict(state)), "sha256": digests}
    _write(folder / INDEX, json.dumps(index).encode())
    return []


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, trust: Sequence[str] = ()) -> dict[str, Any]:
    """What `write` was given; nothing in it is code."""

    def made(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            array = np.load(folder / Path(value["tensor"]).name, allow_pickle=False)
            return torch.from_numpy(array).view(getattr(torch, value["dtype"]))
        if "dict" in value:
            return {made(key): made(item) for key, item in value["dict"]}
        return tuple(map(made, value["tuple"])) if "tuple" in value else [made(item) for item in value["list"]]

    try:
        state: dict[str, Any] = made(json.loads((folder / INDEX).read_bytes())["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "this is no folder of .npy files, or it is damaged", where=str(folder), why=str(error)
        ) from error
    return state


class NpyCheckpointIO(CheckpointIO):
    """A hidden folder beside the path is filled and renamed, so that half a checkpoint is never at the path."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Durable when it returns."""
        target = Path(path)
        staged = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        write(checkpoint, staged, target)
        self.remove_checkpoint(target)
        staged.rename(target)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Into host memory; Lightning moves what belongs on a device. A run's checkpoint is named by its folder."""
        folder = Path(path)
        return read(folder if (folder / INDEX).exists() else folder / "state.ckpt")

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes the folder, if it is there."""
        if Path(path).exists():
            shutil.rmtree(path)


def build(config: NpyCheckpointIOConfig, context: BuildContext) -> NpyCheckpointIO:
    """The checkpoint IO that a config describes."""
    return NpyCheckpointIO()
