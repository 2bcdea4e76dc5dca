"""Reads what torch.distributed.checkpoint (DCP) has written, in one process, without running anything from it.

torch unpickles DCP's `.metadata` and its entries of plain data without restriction.  Here the first goes through
`read_contents`, the others through `weights_only=True`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.layout import put
from fairlead_checkpoint_io.files.metadata import CONTENTS, is_sharded, read_contents

__all__ = ["SafeLoadPlanner", "SafeReader", "missing_files", "nested", "read_flat"]

# What weights_only=True says of a name that it does not load.
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


class SafeReader(FileSystemReader):
    """torch's reader of a folder, with metadata read safely, once, and files only from inside the folder.

    Args:
        path: The folder with `.metadata`.

    Raises:
        CheckpointError: (by every method) The metadata or a file is missing or damaged.

    Example:
        >>> reader = SafeReader(Path("step-00000200/state.ckpt"))                    # doctest: +SKIP
        >>> dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner())        # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata: names, shapes and dtypes of everything, and where it is stored."""
        if self._read is None:
            self._read = _read_metadata(Path(self.path))
        return self._read

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for, each file's error with its name."""
        try:
            done: Future[None] = super().read_data(plan, planner)
        except CheckpointError:
            raise
        except Exception as error:  # damaged bytes raise anything
            names = sorted({str(self.storage_data[item.storage_index].relative_path) for item in plan.items})
            raise _damaged(Path(self.path), f"{', '.join(names[:4])}: {_first_line(error)}") from error
        return done


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner; entries of plain data are loaded with `weights_only=True`.

    What else may be in them is named with `torch.serialization.safe_globals`.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes one entry that is no tensor."""
        name = str(read_item.dest_index.fqn)
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            refused = _GLOBAL.search(str(error))
            raise CheckpointError(
                "the checkpoint holds pickled objects, which could run any code on loading",
                where=name,
                why=f"it holds {refused[1]}" if refused else _first_line(error),
                fix="allow by name what you trust: checkpoint_io.safe_globals, or --trust of `fairlead checkpoint`",
            ) from error
        self._take(name, loaded)

    def _take(self, name: str, loaded: Any) -> None:
        place: Any = self.original_state_dict
        *way, last = self.mappings[name] if self.flatten_state_dict else (name,)
        for key in way:
            place = place[key]
        place[last] = loaded


def read_flat(reader: SafeReader, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Entries by their flat names (`optimizer_0.state.layer.weight.exp_avg`), each whole, in host memory.

    Args:
        reader: The folder's reader.
        names: Which; None: all.

    Raises:
        CheckpointError: Something is missing, damaged, or an object that is not allowed.
    """
    known = reader.read_metadata().state_dict_metadata
    wanted = known if names is None else {name: known[name] for name in names}
    state: dict[str, Any] = {}
    for name, stored in wanted.items():
        state[name] = None
        if isinstance(stored, TensorStorageMetadata):
            state[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = SafeLoadPlanner(flatten_state_dict=False)
        try:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's parcel of every rank's error
            inner = next((one for one, _ in error.failures.values() if isinstance(one, CheckpointError)), None)
            raise inner or _damaged(Path(reader.path), _first_line(error)) from error
    return state


def nested(reader: SafeReader, flat: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it was before DCP made its names flat.  Empty mappings are not stored and do not come back."""
    places = reader.read_metadata().planner_data or {}
    state: dict[str, Any] = {}
    for name, value in flat.items():
        put(state, places.get(name, (name,)), value)
    return state


def missing_files(folder: Path) -> list[str]:
    """What is wrong with a folder's files by their sizes: DCP stores no checksums."""
    reader = SafeReader(folder)
    ends: dict[str, int] = {}
    for info in (reader.read_metadata().storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    wrong = []
    for name, end in sorted(ends.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            wrong.append(f"{name}: missing")
        elif size < end:
            wrong.append(f"{name}: {size} bytes, should be {end} at least")
    return wrong


def _read_metadata(folder: Path) -> Metadata:
    if not is_sharded(folder):
        raise CheckpointError("this is not a distributed checkpoint", where=str(folder), why=f"it has no {CONTENTS}")
    return read_contents(folder)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError("the checkpoint is damaged", where=str(path), why=why, fix="use another checkpoint")
