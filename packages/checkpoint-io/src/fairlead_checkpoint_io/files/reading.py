"""From a file to a state, with an answer for each way in which that fails."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io.files.archive_reader import ArchiveReader
from fairlead_checkpoint_io.files.formats import (
    CONTENTS,
    LEGACY_MAGIC,
    REST,
    STATE,
    damaged,
    first_line,
    is_deepspeed,
    names_text,
    no_such,
    unreadable,
)
from fairlead_checkpoint_io.files.shards import read_shards
from fairlead_checkpoint_io.files.trust import allowed, holds_objects, unsafe_globals
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.manifest import MANIFEST


def read_state(
    path: Path,
    *,
    map_location: Any = None,
    weights_only: bool | None = None,
    safe_globals: Sequence[str] = (),
    verify: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint file, a directory of shards, or the `state.ckpt` of a checkpoint directory, which is either.

    Into host memory, unless `map_location` says where; only `weights_only=False` runs what the file says.
    """
    path = _file_of(path)
    if path.is_dir():
        options = {"weights_only": weights_only, "safe_globals": safe_globals, "verify": verify}
        return read_sharded(path, map_location=map_location, **options)
    strict = weights_only is not False
    location = "cpu" if map_location is None else map_location
    failure: Exception | None = None
    state: Any = None
    try:
        with _opened(path, verify) or nullcontext() as archive:
            source: Any = archive or path
            try:
                with allowed(safe_globals):
                    state = torch.load(source, map_location=location, weights_only=strict)
            except (ConfigError, OSError):
                raise
            except Exception as error:  # damaged bytes are executed as pickle opcodes: they raise anything
                failure = error
            record = archive.damaged_record() if archive is not None else None
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", path) from error
    if record is not None:
        raise damaged(path, f"{record} does not match its checksum")
    if failure is not None:
        raise _explained(path, failure, strict, archive is None, safe_globals) from failure
    if not isinstance(state, dict):
        raise _no_checkpoint(path, f"it holds a {type(state).__name__}, not a dict")
    return state


def read_sharded(path: Path, **options: Any) -> dict[str, Any]:
    """Loads a directory of shards, of Fairlead's or Lightning's; the options are those of `read_shards`."""
    for name in (CONTENTS, REST):
        if not (path / name).is_file():
            raise damaged(path, f"{name} is missing: it was not written to its end")
    passed = {key: value for key, value in options.items() if key in ("weights_only", "safe_globals", "verify")}
    return read_shards(path, read_state(path / REST, **passed), **options)


def _file_of(path: Path) -> Path:
    if (path / CONTENTS).is_file() or (path / REST).is_file():
        return path
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return _file_of(path / STATE)
        if is_deepspeed(path):
            raise CheckpointError(
                "this is a folder of DeepSpeed's, which only its own strategy reads",
                where=str(path),
                fix="take strategy: deepspeed of the same stage, or make one file of the weights: "
                "fairlead checkpoint consolidate",
            )
        raise CheckpointError(
            "this is a directory, not a checkpoint",
            where=str(path),
            why=names_text(path),
            fix="name a checkpoint inside it; one in a directory has a manifest.json",
        )
    if not path.exists():
        raise no_such(path)
    return path


def _opened(path: Path, verify: bool) -> ArchiveReader | None:
    """The file; None: it is of torch's old format. Raises when it cannot be a checkpoint at all."""
    with path.open("rb") as file:
        head = file.read(len(LEGACY_MAGIC))
    if not head:
        raise damaged(path, "the file is empty")
    if head.startswith(LEGACY_MAGIC):
        return None
    if not head.startswith(b"PK"):
        raise _no_checkpoint(path, "it does not begin as a file of torch.save does")
    try:
        if not zipfile.is_zipfile(path):
            raise damaged(path, "its end is missing: it was cut off")
        archive = ArchiveReader(path, verify=verify)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged table of contents may hold any text and any number
        raise damaged(path, f"its table of contents cannot be read: {error}") from error
    if not any(name.count("/") == 1 and name.endswith("/data.pkl") for name in archive.names):
        archive.close()
        raise _no_checkpoint(path, "it is a ZIP archive, but not one of torch.save")
    return archive


def _explained(
    path: Path, error: Exception, strict: bool, legacy: bool, safe_globals: Sequence[str]
) -> CheckpointError:
    if strict and isinstance(error, pickle.UnpicklingError):
        # The old format has no table of contents to look the names up in.
        names = unsafe_globals(path, safe_globals)
        if names or legacy:
            listed = ", ".join(names)
            ask = f"checkpoint_io: {{name: torch, safe_globals: [{listed}]}}; or " if names else ""
            why = f"besides tensors and plain data it holds: {listed}" if names else first_line(error)
            return holds_objects(path, why, f"if you trust the file: {ask}trainer.fit(..., weights_only=False)")
    return unreadable(path, error)


def _no_checkpoint(path: Path, why: str) -> CheckpointError:
    return CheckpointError("this is not a checkpoint", where=str(path), why=why, fix="give the path of a checkpoint")
