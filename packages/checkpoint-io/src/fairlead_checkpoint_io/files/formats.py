"""Names in checkpoints, and the errors of those that cannot be read. Imports no torch."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Final

from fairlead.errors import CheckpointError, FairleadError, did_you_mean
from fairlead_runs.commit.files import disk_error

STATE: Final = "state.ckpt"
"""The state in a checkpoint of a run: a file of torch.save, or a directory of shards."""
CONTENTS: Final = ".metadata"
"""The table of contents of a directory of shards; the name is torch's."""
REST: Final = "meta.pt"
"""In a directory of shards: everything of the state that is neither weights nor optimizers; the name is Lightning's."""
WEIGHTS_FILE: Final = "weights.safetensors"
"""The weights in a folder of `fairlead checkpoint export`."""
TRAINER_STATE: Final = "trainer_state.json"
"""In a checkpoint of Hugging Face's Trainer: where the training is; the name is theirs."""
LEGACY_MAGIC: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)[:-1]
"""The first bytes of what torch.save wrote before 1.6: a pickle that starts with this number."""
_SHOWN: Final = 8


def names_in(folder: Path) -> list[str]:
    """What a folder holds; `CheckpointError` when it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise disk_error(error, "cannot read a folder", folder) from error


def is_deepspeed(path: Path) -> bool:
    """Whether it is a folder that DeepSpeed wrote."""
    if not path.is_dir() or (path / CONTENTS).exists():
        return False
    names = set(names_in(path))
    if "latest" in names:  # DeepSpeed's file names a folder
        tag = (path / "latest").read_bytes()[:200].decode(errors="replace").strip()
        if tag in names and (path / tag).is_dir():
            names.update(names_in(path / tag))
    return any(name.endswith(("_optim_states.pt", "_model_states.pt")) for name in names)


def names_text(folder: Path) -> str:
    """What a folder holds, for an error message."""
    names = sorted(name for name in names_in(folder) if not name.startswith("."))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{folder} has: {', '.join(names[-_SHOWN:])}{more}" if names else f"{folder} is empty"


def no_such(path: Path) -> CheckpointError:
    """The error of a path that does not exist, with the nearest name that does."""
    folder = next(parent for parent in path.parents if parent.is_dir())
    near = did_you_mean(path.relative_to(folder).parts[0], names_in(folder))
    fix = f"did you mean {str(folder / near)!r}?" if near else "name a run directory, a checkpoint's folder or a file"
    return CheckpointError("there is no such checkpoint", where=str(path), why=names_text(folder), fix=fix)


def damaged(path: Path, why: str) -> CheckpointError:
    """The error of a checkpoint that is not as it was written."""
    return CheckpointError("the checkpoint is damaged", where=str(path), why=why, fix="use another checkpoint")


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error of a checkpoint that torch cannot load for an unknown reason."""
    why, fix = first_line(error), "resume from another checkpoint"
    return CheckpointError("the checkpoint cannot be loaded", where=str(path), why=why, fix=fix)


def reason(error: BaseException) -> str:
    """An error in one line, for a list of several."""
    if isinstance(error, FairleadError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """An error of an engine, whose text may be a page, in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
