"""Which format a file or folder has, by names and first bytes only. Imports no torch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from fairlead.errors import CheckpointError
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.manifest import MANIFEST

Format = Literal["torch", "distributed", "deepspeed", "safetensors"]

STATE: Final = "state.ckpt"
"""The state in a checkpoint of a run: a file of torch.save, or a directory of shards."""
CONTENTS: Final = ".metadata"
"""The table of contents of a directory of shards; the name is torch's."""
REST: Final = "meta.pt"
"""In a directory of shards: everything of the state that is neither weights nor optimizers; the name is Lightning's."""
WEIGHTS_FILE: Final = "weights.safetensors"
"""The weights in a folder of `fairlead checkpoint export`."""
LEGACY_MAGIC: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)[:-1]
"""The first bytes of what torch.save wrote before 1.6: a pickle that starts with this number."""
_SHOWN: Final = 8


def format_of(path: Path) -> Format:
    """How a file or folder is written, by its first bytes or the names in it.

    Raises:
        CheckpointError: It cannot be read, or is no checkpoint of a kind that is known here.
    """
    if path.is_dir():
        found = kind_of_folder(path)
        if found in ("distributed", "deepspeed"):
            return found
        raise CheckpointError(
            "this folder is not a checkpoint",
            where=str(path),
            why=names_text(path),
            fix="name one that has a manifest.json, a .metadata (torch.distributed.checkpoint), or DeepSpeed's files",
        )
    try:
        with path.open("rb") as file:
            head = file.read(len(LEGACY_MAGIC))
    except FileNotFoundError:
        raise CheckpointError("the checkpoint has no state", where=str(path), why=names_text(path.parent)) from None
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", path) from error
    fits = int.from_bytes(head[:8], "little") <= path.stat().st_size or path.suffix == ".safetensors"
    if head[8:9] == b"{" and fits:
        return "safetensors"
    if head.startswith((b"PK", LEGACY_MAGIC)):
        return "torch"
    why = "the file is empty" if not head else "it begins neither as a file of torch.save nor of safetensors"
    raise CheckpointError(
        "this is not a checkpoint", where=str(path), why=why, fix="name a checkpoint's folder, or a .ckpt file"
    )


def kind_of_folder(path: Path) -> Literal["own", "exported", "distributed", "deepspeed"] | None:
    """What kind of one checkpoint a folder is; None: it is none."""
    names = set(names_in(path))
    if MANIFEST in names:
        return "exported" if WEIGHTS_FILE in names else "own"
    if NAME.fullmatch(path.name):
        return "own"  # damaged: it has no manifest
    if CONTENTS in names:
        return "distributed"
    of_deepspeed = ("_optim_states.pt", "_model_states.pt")
    return "deepspeed" if any(name.endswith(of_deepspeed) for name in (*names, *_names_below(path, names))) else None


def _names_below(path: Path, names: set[str]) -> Iterator[str]:
    """The names in the tag folder that DeepSpeed's file `latest` names."""
    if "latest" in names:
        tag = (path / "latest").read_bytes()[:200].decode(errors="replace").strip()
        if tag in names and (path / tag).is_dir():
            yield from names_in(path / tag)


def names_in(folder: Path) -> list[str]:
    """What a folder holds.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return os.listdir(folder)
    except OSError as error:
        raise disk_error(error, "cannot read a folder", folder) from error


def names_text(folder: Path) -> str:
    """What a folder holds, for an error message."""
    names = sorted(name for name in names_in(folder) if not name.startswith("."))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{folder} has: {', '.join(names[-_SHOWN:])}{more}" if names else f"{folder} is empty"


def damaged(path: Path, why: str) -> CheckpointError:
    """The error of a checkpoint that is not as it was written."""
    return CheckpointError("the checkpoint is damaged", where=str(path), why=why, fix="use another checkpoint")


def first_line(error: BaseException) -> str:
    """An error of an engine, whose text may be a page, in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
