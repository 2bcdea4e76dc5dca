"""What a PATH of `fairlead checkpoint` stands for, by looking at names and first bytes only; torch-free."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, did_you_mean
from fairlead_runs import is_run
from fairlead_runs.commit import Checkpoint, newest_complete
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.manifest import MANIFEST

__all__ = [
    "WEIGHTS_FILE",
    "Format",
    "Source",
    "checkpoints_folder",
    "existing",
    "format_of",
    "kind_of_folder",
    "one_checkpoint",
]

Format = Literal["torch", "distributed", "deepspeed", "safetensors"]

WEIGHTS_FILE: Final = "weights.safetensors"
"""The weights in a folder of `fairlead checkpoint export`."""
_STATE: Final = "state.ckpt"
_SHOWN: Final = 8
# What torch.save wrote before 1.6: a pickle that starts with this number.
_LEGACY: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)[:10]


@dataclass(frozen=True)
class Source:
    """One checkpoint to read.

    Attributes:
        path: The checkpoint as it was named or found: a folder of Fairlead's, or a bare file or folder.
        content: The file or folder with the state.
        format: How that is written.
        own: The checkpoint of Fairlead's that it is; None: a bare one.
        url: Where it is, if `path` is a copy of one on a store.
    """

    path: Path
    content: Path
    format: Format
    own: Checkpoint | None = None
    url: str | None = None

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self.url or str(self.path)

    @property
    def name(self) -> str:
        """Names files made of it: `gpt-step-00000200`."""
        folder = self.path.parent
        run = folder.parent.name if folder.name == "checkpoints" else ""
        stem = self.path.stem if self.path.suffix in (".ckpt", ".pt", ".pth", ".safetensors") else self.path.name
        return f"{run}-{stem}" if run else stem


def existing(text: str, session: Session) -> Path:
    """The path as it was meant: from the working directory, or the name of a run in `runs/`.

    Raises:
        ConfigError: There is nothing of that name.
    """
    asked = Path(session.cwd, text.removeprefix("file://")).expanduser()
    for path in (asked, session.cwd / "runs" / text):
        if os.path.lexists(path):
            return Path(os.path.abspath(path))
    folder = next(parent for parent in asked.parents if parent.is_dir())
    missing = asked.relative_to(folder).parts[0]
    near = did_you_mean(missing, _names(folder))
    raise ConfigError(
        "there is no such checkpoint or run",
        where=str(asked),
        why=_listing(folder),
        fix=f"did you mean {str(folder / near)!r}?"
        if near
        else "name a run directory, a checkpoint's folder or a file",
    )


def checkpoints_folder(path: Path) -> Path | None:
    """The folder that holds several checkpoints: of a run directory its `checkpoints`; None: `path` is a single one."""
    if not path.is_dir() or kind_of_folder(path) is not None:
        return None
    inner = path / "checkpoints"
    if _has_checkpoints(path):  # also a run as it is kept on a store
        return path
    return inner if is_run(path) or inner.is_dir() else path


def one_checkpoint(path: Path) -> Source:
    """The checkpoint at `path`; of a run or a folder of checkpoints, the newest complete one.

    Raises:
        CheckpointError: There is none, or it is no checkpoint.
    """
    folder = checkpoints_folder(path)
    if folder is not None:
        newest = newest_complete(folder)
        if newest.checkpoint is None:
            damaged = "\n".join(str(damage) for damage in newest.skipped[:_SHOWN])
            raise CheckpointError(
                "there is no complete checkpoint here",
                where=str(folder),
                why=damaged or _listing(folder),
                fix="`fairlead checkpoint ls` shows what is there; name one checkpoint's folder or file",
            )
        path = newest.checkpoint.path
    if path.is_dir() and (path / MANIFEST).is_file() and NAME.fullmatch(path.name):
        return Source(path, path / _STATE, format_of(path / _STATE), Checkpoint.at(path))
    if (path / WEIGHTS_FILE).is_file():
        return Source(path, path / WEIGHTS_FILE, "safetensors")
    return Source(path, path, format_of(path))


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
            why=_listing(path),
            fix="name one that has a manifest.json, a .metadata (torch.distributed.checkpoint), or DeepSpeed's files",
        )
    try:
        with path.open("rb") as file:
            head = file.read(10)
    except FileNotFoundError:
        raise CheckpointError("the checkpoint has no state", where=str(path), why=_listing(path.parent)) from None
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", path) from error
    fits = int.from_bytes(head[:8], "little") <= path.stat().st_size or path.suffix == ".safetensors"
    if head[8:9] == b"{" and fits:
        return "safetensors"
    if head.startswith((b"PK", _LEGACY)):
        return "torch"
    why = "the file is empty" if not head else "it begins neither as a file of torch.save nor of safetensors"
    raise CheckpointError(
        "this is not a checkpoint", where=str(path), why=why, fix="name a checkpoint's folder, or a .ckpt file"
    )


def kind_of_folder(path: Path) -> Literal["own", "exported", "distributed", "deepspeed"] | None:
    """What kind of one checkpoint a folder is; None: it is none."""
    names = set(_names(path))
    if MANIFEST in names:
        return "exported" if WEIGHTS_FILE in names else "own"
    if NAME.fullmatch(path.name):
        return "own"  # damaged: it has no manifest
    if ".metadata" in names:
        return "distributed"
    if any(_of_deepspeed(name) for name in (*names, *_names_below(path, names))):
        return "deepspeed"
    return None


def _of_deepspeed(name: str) -> bool:
    return name.endswith(("_optim_states.pt", "_model_states.pt"))


def _names_below(path: Path, names: set[str]) -> Iterator[str]:
    """The names in the tag folder that DeepSpeed's file `latest` names."""
    if "latest" in names:
        tag = (path / "latest").read_bytes()[:200].decode(errors="replace").strip()
        if tag in names and (path / tag).is_dir():
            yield from _names(path / tag)


def _has_checkpoints(path: Path) -> bool:
    return any(NAME.fullmatch(name) or name.endswith(".ckpt") for name in _names(path))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise disk_error(error, "cannot read a folder", folder) from error


def _listing(folder: Path) -> str:
    names = sorted(name for name in _names(folder) if not name.startswith("."))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{folder} has: {', '.join(names[-_SHOWN:])}{more}" if names else f"{folder} is empty"
