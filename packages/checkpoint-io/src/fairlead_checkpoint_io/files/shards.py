"""From a directory of shards to a state: each rank reads what it needs, from any number of writers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.layout import Place, from_layout
from fairlead_checkpoint_io.files.metadata import CONTENTS, REST, read_contents
from fairlead_checkpoint_io.files.safe import allowed
from fairlead_runs.commit import hash_file, read_manifest
from fairlead_runs.commit.files import disk_error

__all__ = ["read_shards"]

_MANIFEST = "manifest.json"
_THREADS = 4


def read_shards(
    path: Path,
    rest: dict[str, Any],
    *,
    place: Callable[[Place, torch.Size, torch.dtype], torch.Tensor | None] = lambda *_: None,
    map_location: Any = None,
    weights_only: bool | None = None,
    safe_globals: Sequence[str] = (),
    verify: bool = True,
) -> dict[str, Any]:
    """Loads a directory of shards; no rank waits for another.

    Args:
        path: The directory.
        rest: What its `meta.pt` holds.
        place: The tensor to read into, by place, whole size and dtype; None: a new one, of the whole.
        map_location: Where new tensors are; None: host memory.
        weights_only: None and True: tensors and plain data only. False runs whatever the files say.
        safe_globals: Names that may be loaded in addition.
        verify: Compare the files that are read with the manifest, where there is one.

    Raises:
        CheckpointError: It is damaged, or holds pickled objects.
        ConfigError: A name in `safe_globals` does not exist.
    """
    if verify:
        try:
            damage = _damage(path, CONTENTS)
        except OSError as error:
            raise disk_error(error, "cannot read a checkpoint", path / CONTENTS) from error
        if damage is not None:
            raise _damaged(path, [damage])
    contents = read_contents(path)
    places = contents.planner_data or {}
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    planner = _Planner(weights_only is not False)
    reader = _Reader(path, contents)
    failure: Exception | None = None
    damages: list[str] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fairlead-verify") as pool:
        checks: list[Future[str | None]] = []
        try:
            with allowed(safe_globals), torch.no_grad():
                planner.set_up_planner(_targets(contents, places, place, device), contents, True)
                reader.set_up_storage_reader(contents, True)
                plan = planner.create_local_plan()
                checks = [pool.submit(_damage, path, name) for name in _files(contents, plan)] if verify else []
                reader.read_data(plan, planner).wait()
        except FairleadError:
            raise
        except Exception as error:  # damaged bytes are executed as pickle opcodes: they raise anything
            failure = error
        try:
            damages = [found for check in checks if (found := check.result()) is not None]
        except OSError as error:
            failure = failure or error
    if damages:
        raise _damaged(path, damages)
    if isinstance(failure, OSError):
        raise disk_error(failure, "cannot read a checkpoint", failure.filename or path) from failure
    if failure is not None:
        raise _explained(path, failure) from failure
    values = planner.state_dict
    try:
        ordered = {tuple(where): values[name] for name, where in places.items() if name in values}
        ordered |= {(name,): value for name, value in values.items() if name not in places}
        return from_layout(ordered, rest)
    except FairleadError:
        raise
    except Exception as error:  # the table of contents may name any places
        raise _damaged(path, [f"{CONTENTS}: {type(error).__name__}: {error}"]) from error


def _targets(
    contents: Metadata,
    places: Mapping[str, Place],
    place: Callable[[Place, torch.Size, torch.dtype], torch.Tensor | None],
    device: str | torch.device,
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, kept in contents.state_dict_metadata.items():
        values[name] = None
        if isinstance(kept, TensorStorageMetadata):
            dtype = kept.properties.dtype
            target = place(tuple(places.get(name, (name,))), kept.size, dtype)
            values[name] = torch.empty(kept.size, dtype=dtype, device=device) if target is None else target
    return values


def _files(contents: Metadata, plan: LoadPlan) -> list[str]:
    """The files that the plan reads, and what everybody reads besides the table of contents."""
    names = {contents.storage_data[item.storage_index].relative_path for item in plan.items}
    return [REST, *sorted(names)]


def _damage(path: Path, name: str) -> str | None:
    """What is wrong with a file, as far as a manifest says."""
    root = next((folder for folder in (path, path.parent) if (folder / _MANIFEST).is_file()), None)
    if root is None:
        return None
    expected = read_manifest(root).files.get((path / name).relative_to(root).as_posix())
    if expected is not None and hash_file(path / name, expected.algorithm) != expected:
        return f"{name} does not match its checksum"
    return None


def _damaged(path: Path, why: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged", where=str(path), why="\n".join(why), fix="resume from another checkpoint"
    )


class _Reader(FileSystemReader):
    """Torch's, with a table of contents that was read already."""

    def __init__(self, path: Path, contents: Metadata) -> None:
        super().__init__(path)
        self._contents = contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The one that was read, without unpickling what it should not hold."""
        return self._contents


class _Planner(DefaultLoadPlanner):
    """Torch's, for a flat state, which does not unpickle just anything."""

    def __init__(self, strict: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._strict = strict

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes a value that is no tensor."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=self._strict)


def _explained(path: Path, error: Exception) -> CheckpointError:
    first = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, pickle.UnpicklingError):
        return CheckpointError(
            "the checkpoint holds pickled objects, which could run any code on loading",
            where=str(path),
            why=first,
            fix="if you trust it: checkpoint_io: {name: distributed, safe_globals: [...]} with their names; or "
            "trainer.fit(..., weights_only=False)",
        )
    return CheckpointError(
        "the checkpoint cannot be loaded",
        where=str(path),
        why=f"{type(error).__name__}: {first}",
        fix="resume from another checkpoint",
    )
