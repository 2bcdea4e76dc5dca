"""Reads a directory of shards, of Fairlead's or any that torch.distributed.checkpoint (DCP) has written.

torch unpickles DCP's `.metadata` and its entries of plain data without restriction.  Here the first goes through
`read_contents`, the others through `weights_only=True`.  No rank waits for another.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.formats import CONTENTS, REST, damaged, first_line, unreadable
from fairlead_checkpoint_io.files.layout import KeyPath, from_layout
from fairlead_checkpoint_io.files.trust import allowed, holds_objects
from fairlead_runs.checkpoint_io import PlaceTensor
from fairlead_runs.commit import hash_file, read_manifest
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.manifest import MANIFEST

_MemoryFormat: Any = dcp._MEM_FORMAT_ENCODING
_CLASSES: Final = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorProperties,
        dcp.TensorStorageMetadata,
        _MemoryFormat,
        filesystem._StorageInfo,
    )
}
_DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def read_contents(path: Path) -> dcp.Metadata:
    """What the directory `path` holds; raises when it is damaged, or asks for anything a table does not consist of."""
    file = path / CONTENTS
    try:
        data = file.read_bytes()
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", file) from error
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(found, dcp.Metadata) or not isinstance(found.state_dict_metadata, dict):
            raise damaged(file, f"it holds a {type(found).__name__}")
        if not isinstance(found.storage_data, dict):
            raise damaged(file, "it does not say where the tensors are")
        for info in found.storage_data.values():
            name = info.relative_path if isinstance(info, _StorageInfo) else None
            if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise damaged(file, f"it names a file outside of its folder: {name!r}")
    except CheckpointError as error:
        error.where = str(file)
        raise
    except Exception as error:  # damaged bytes are executed as pickle opcodes: they raise, and leave, anything
        raise damaged(file, f"{type(error).__name__}: {error}") from error
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        # `pathlib._local` in Python 3.13
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath", "Path", "PurePosixPath"):
            return pathlib.PurePosixPath
        raise CheckpointError(
            "the checkpoint asks for code to be run",
            why=f"its table of contents names {module}.{name}, which no such table consists of",
            fix="do not use it; torch itself would have run this",
        )


def _memory_format(kind: Any, name: str) -> Any:
    """Python 3.11 writes the members of an enum as `getattr(kind, name)`."""
    if kind is not _MemoryFormat:
        raise CheckpointError("the checkpoint asks for code to be run", why=f"getattr of {kind!r}")
    return _MemoryFormat[name]


_STAND_INS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    ("builtins", "getattr"): _memory_format,
}


_THREADS: Final = 4
# What weights_only=True says of a name that it does not load.
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


def read_shards(
    path: Path,
    rest: dict[str, Any],
    *,
    place: PlaceTensor = lambda *_: None,
    map_location: Any = None,
    weights_only: bool | None = None,
    safe_globals: Iterable[str] = (),
    verify: bool = True,
) -> dict[str, Any]:
    """The checkpoint in a directory of shards, with `rest` for what its `meta.pt` holds; otherwise as `read_state`.

    With `verify` the files that are read are compared with the manifest, where there is one.
    """
    if verify:
        try:
            changed = _changed(path, CONTENTS)
        except OSError as error:
            raise disk_error(error, "cannot read a checkpoint", path / CONTENTS) from error
        if changed is not None:
            raise damaged(path, changed)
    shards = Shards(path)
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    failure: Exception | None = None
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fairlead-verify") as pool:
        checks: list[Future[str | None]] = []

        def check(names: Iterable[str]) -> None:
            if verify:
                checks.extend(pool.submit(_changed, path, name) for name in (REST, *sorted(names)))

        try:
            with allowed(tuple(safe_globals)):
                values = shards.read(place=place, device=device, strict=weights_only is not False, check=check)
        except Exception as error:  # damaged bytes are executed as pickle opcodes: they raise anything
            failure = error
        try:
            found = [text for one in checks if (text := one.result()) is not None]
        except OSError as error:
            failure, found = failure or error, []
    if found:
        raise damaged(path, "\n".join(found))
    if isinstance(failure, FileNotFoundError):
        raise damaged(path, f"{Path(failure.filename or '').name} is missing") from failure
    if isinstance(failure, OSError):
        raise disk_error(failure, "cannot read a checkpoint", failure.filename or path) from failure
    if isinstance(failure, FairleadError):
        raise failure
    if failure is not None:
        raise unreadable(path, failure) from failure
    return shards.checkpoint(values, rest)


class Shards:
    """A directory of shards; entries are read by their flat names (`optimizer_0.state.layer.weight.exp_avg`)."""

    def __init__(self, path: Path) -> None:
        if not (path / CONTENTS).is_file():
            raise CheckpointError("this is not a distributed checkpoint", where=str(path), why=f"it has no {CONTENTS}")
        self.path = path
        self.contents = read_contents(path)
        self.paths: Mapping[str, KeyPath] = self.contents.planner_data or {}

    def read(
        self,
        names: Iterable[str] | None = None,
        *,
        place: PlaceTensor = lambda *_: None,
        device: str | torch.device = "cpu",
        strict: bool = True,
        check: Callable[[set[str]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Entries by their names (None: all), each in full unless `place` gives a tensor for a part of it.

        `check` is called with the names of the files before they are read.  Damaged bytes raise anything.
        """
        stored = self.contents.state_dict_metadata
        values: dict[str, Any] = {}
        for name in stored if names is None else names:
            values[name], entry = None, stored[name]
            if isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                target = place(tuple(self.paths.get(name, (name,))), entry.size, dtype)
                values[name] = torch.empty(entry.size, dtype=dtype, device=device) if target is None else target
        planner, reader = _Planner(self.path, strict), FileSystemReader(self.path)
        with torch.no_grad():
            planner.set_up_planner(values, self.contents, True)
            reader.set_up_storage_reader(self.contents, True)
            plan = planner.create_local_plan()
            check({self.contents.storage_data[item.storage_index].relative_path for item in plan.items})
            reader.read_data(plan, planner).wait()
        found: dict[str, Any] = planner.state_dict
        return found

    def read_host(self, names: Iterable[str]) -> dict[str, Any]:
        """As `read`, with an error that says which directory is damaged."""
        try:
            return self.read(names)
        except FairleadError:
            raise
        except Exception as error:  # damaged bytes raise anything
            raise damaged(self.path, first_line(error)) from error

    def checkpoint(self, values: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint of which these are the entries.  Empty mappings are not stored and do not come back."""
        try:
            ordered = {tuple(where): values[name] for name, where in self.paths.items() if name in values}
            ordered |= {(name,): value for name, value in values.items() if name not in self.paths}
            return from_layout(ordered, rest)
        except FairleadError:
            raise
        except Exception as error:  # the table of contents may name any paths
            raise damaged(self.path, f"{CONTENTS}: {type(error).__name__}: {error}") from error

    def wrong_files(self) -> dict[str, str]:
        """What is wrong with the files by their sizes, by name: DCP stores no checksums."""
        ends: dict[str, int] = {}
        for info in self.contents.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        wrong = {}
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                wrong[name] = "missing"
            elif (size := file.stat().st_size) < end:
                wrong[name] = f"{size} bytes, should be {end} at least"
        return wrong


def _changed(path: Path, name: str) -> str | None:
    """What is wrong with a file, as far as a manifest says."""
    root = next((folder for folder in (path, path.parent) if (folder / MANIFEST).is_file()), None)
    if root is None:
        return None
    expected = read_manifest(root).files.get((path / name).relative_to(root).as_posix())
    if expected is not None and hash_file(path / name, expected.algorithm) != expected:
        return f"{name} does not match its checksum"
    return None


class _Planner(DefaultLoadPlanner):
    """Torch's, for a flat state, which does not unpickle just anything."""

    def __init__(self, path: Path, strict: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path
        self._strict = strict

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes an entry that is no tensor."""
        name = str(read_item.dest_index.fqn)
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=self._strict)
        except pickle.UnpicklingError as error:
            if not self._strict:
                raise
            refused = _GLOBAL.search(str(error))
            why = f"{name} holds {refused[1]}" if refused else f"{name}: {first_line(error)}"
            fix = (
                "allow by name what you trust: checkpoint_io.safe_globals, or --trust of `fairlead checkpoint`;\n"
                "or trainer.fit(..., weights_only=False)"
            )
            raise holds_objects(self._path, why, fix) from error
