"""The table of contents of a directory of shards: a pickle, read without running anything that is in it."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.formats import CONTENTS, damaged
from fairlead_runs.commit.files import disk_error

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
