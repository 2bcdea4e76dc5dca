"""Who writes what, and how: planned once by torch's planner, then reused for every save.

The ranks talk about a save over separate groups, so that nothing of the training comes in between.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.archive_writer import ArchiveWriter
from fairlead_checkpoint_io.files.formats import CONTENTS, REST, first_line, reason
from fairlead_checkpoint_io.files.layout import Layout, Leaf
from fairlead_checkpoint_io.files.writing import replace_with
from fairlead_runs.commit import FileHash, FileWriter, Syscalls, write_file
from fairlead_runs.commit.files import disk_error, ensure_dir, remove_tree

log = logging.getLogger("fairlead.checkpoint_io")

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """A gloo group of all ranks; nothing where there is one rank, or this one does it all (`single`).

    An error of one rank is raised on all of them, and so is the loss of a rank.  With `overlapping` the thread that
    trains may talk while the one that writes does: each gets a separate group, at a socket for every other rank.
    """

    def __init__(self, timeout: timedelta, *, single: bool = False, overlapping: bool = False) -> None:
        grouped = not single and dist.is_initialized()
        self._world = dist.group.WORLD if grouped else None
        self.rank = dist.get_rank() if grouped else 0
        self.size = dist.get_world_size() if grouped else 1
        self._timeout = timeout
        self._front = self._back = None
        if self.size > 1:
            self._front = self._back = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        if self.size > 1 and overlapping:
            self._back = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints-writing")

    @property
    def usable(self) -> bool:
        """Whether the ranks are those for which this was made: a process may leave its group and join another."""
        return self._world is (dist.group.WORLD if dist.is_initialized() else None)

    def all_gather(self, mine: Callable[[], T], what: str) -> list[T]:
        """What each rank makes, by rank; in the thread that trains."""
        value = _caught(mine)
        found = [value] * self.size
        if self._front is not None:
            self._talk(lambda: dist.all_gather_object(found, value, group=self._front), what)
        return _checked(found, what)

    def scatter(
        self, mine: Callable[[], T], make: Callable[[Sequence[T]], Sequence[R]], what: str, *, writing: bool = False
    ) -> R:
        """What rank 0 makes for this rank out of what all ranks made; in the thread that trains, or that writes."""
        group = self._back if writing else self._front
        value = _caught(mine)
        made: Any = None
        gathered: list[Any] | None = [value] * self.size if self.rank == 0 else None
        if group is not None:
            self._talk(lambda: dist.gather_object(value, gathered, group=group), what)
        if gathered is not None:  # rank 0
            made = _caught(lambda: list(make(_checked(gathered, what))))
            made = [made] * self.size if isinstance(made, _Failure) else made
        box: list[Any] = list(made) if group is None else [None]
        if group is not None:
            self._talk(lambda: dist.scatter_object_list(box, made, group=group), what)
        found: R = _checked(box, what)[0]
        return found

    def _talk(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo: a peer is gone, or did not answer in time
            waited = f"waited for them longer than {self._timeout}: {first_line(error)}"
            raise CheckpointError(
                what,
                why=f"rank {self.rank} lost the others, or {waited}",
                fix="see what became of the other ranks; with a slow disk, raise checkpoint_io.timeout",
            ) from error


class _Failure:
    """What a rank ran into, on its way to the others."""

    def __init__(self, error: BaseException) -> None:
        # Errors travel as text: another rank may not be able to unpickle an exception of the user's.
        plain = CheckpointError(f"{type(error).__name__}: {error}")
        self.error = error if isinstance(error, FairleadError) else plain


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # sent to the other ranks and raised there
        log.debug("a save failed on this rank", exc_info=True)
        return _Failure(error)


def _checked(values: list[Any], what: str) -> list[Any]:
    """The values, unless some ranks failed: that is raised as one error, with their numbers."""
    failures = {rank: value.error for rank, value in enumerate(values) if isinstance(value, _Failure)}
    if not failures:
        return values
    for error in failures.values():
        if isinstance(error, CheckpointError) and error.what == what:  # rank 0 has put it together already
            raise error
    lines = [
        f"rank {rank}: {reason(error)}{f' ({error.where})' if error.where else ''}" for rank, error in failures.items()
    ]
    raise CheckpointError(what, why="\n".join(lines), fix=failures[min(failures)].fix)


@contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of each error which checkpoint it is about."""
    try:
        yield
    except CheckpointError as error:
        error.where = os.fspath(path)
        raise


Then = Callable[[Mapping[str, FileHash]], None]
"""What follows a save: takes the checksum of each file by its name."""

_WHAT: Final = "the ranks could not agree on what each writes"


class Agreed(NamedTuple):
    """What was agreed on for states of one form; rank 0 has the table of contents, but for where each part will be."""

    form: tuple[object, ...]
    plan: SavePlan
    contents: Metadata | None


class Written(NamedTuple):
    """What one rank has written: where each part of a tensor is, and the checksum of each file by its name."""

    parts: Mapping[MetadataIndex, _StorageInfo]
    hashes: Mapping[str, FileHash]


def agree(make: Callable[[], Layout], ranks: Ranks, before: Agreed | None) -> tuple[Layout, Agreed]:
    """Takes this rank's checkpoint apart, and says who writes what: each part once, by the rank with least to write.

    The plan of the save before is reused while no rank's state has changed its form; then it costs one small message.
    """
    made: list[tuple[Layout, tuple[object, ...]]] = []

    def unchanged() -> bool:
        layout = make()
        made.append((layout, _form(layout)))
        return before is not None and before.form == made[0][1]

    same = all(ranks.all_gather(unchanged, _WHAT))
    layout, form = made[0]
    if same and before is not None:
        return layout, before
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(layout.values), None, ranks.rank == 0)

    def local() -> SavePlan:
        return dataclasses.replace(planner.create_local_plan(), planner_data=layout.paths)

    def together(plans: Sequence[SavePlan]) -> list[tuple[SavePlan, Metadata | None]]:
        paths: dict[str, Any] = {}
        for plan in plans:
            for name, path in plan.planner_data.items():
                paths.setdefault(name, path)
        shared, contents = planner.create_global_plan([dataclasses.replace(p, planner_data=None) for p in plans])
        contents = dataclasses.replace(contents, planner_data=paths)
        return [(plan, None if rank else contents) for rank, plan in enumerate(shared)]

    plan, contents = ranks.scatter(local, together, _WHAT)
    return layout, Agreed(form, plan, contents)


def _form(layout: Layout) -> tuple[object, ...]:
    form: list[object] = []
    for name, value in layout.values.items():
        placed = (value.placements, value.device_mesh) if isinstance(value, DTensor) else ()
        form.append(name if isinstance(value, Leaf) else (name, value.shape, value.dtype, *placed))
    return tuple(form)


def part(layout: Layout, agreed: Agreed, ranks: Ranks) -> dict[str, Any]:
    """What this rank writes: `values`, its shards of DTensors and other tensors and objects as they are, and `rest`."""
    found: dict[str, Any] = {}
    for item in agreed.plan.items:
        value = layout.values[item.index.fqn]
        if isinstance(value, Leaf):
            found[item.index.fqn] = value.value
        else:
            found[item.index.fqn] = value.to_local().detach() if isinstance(value, DTensor) else value
    return {"values": found, "rest": layout.rest if ranks.rank == 0 else {}}


def save(folder: Path, ranks: Ranks, agreed: Agreed, state: Callable[[], dict[str, Any]], then: Then) -> None:
    """Every rank writes its part; once all are durable rank 0 renames the directory and calls `then`.

    When a rank fails or is gone, that is raised on all ranks, and `folder` is as before.
    """
    staged, system = folder.with_name(f".tmp-{folder.name}"), Syscalls()
    rest: dict[str, Any] = {}

    def write() -> Written:
        ensure_dir(staged, system)
        mine = state()
        rest.update(mine["rest"])
        with torch.inference_mode(False), torch.no_grad():
            return _write(staged, ranks.rank, agreed.plan, mine["values"])

    def end(written: Sequence[Written]) -> list[None]:
        assert agreed.contents is not None
        hashes = _finish(staged, agreed.contents, rest, written)
        try:
            for left in set(os.listdir(staged)) - set(hashes):  # of a save that was killed
                remove_tree(staged / left, system)
            system.fsync_dir(staged)
            replace_with(staged, folder, system)
        except OSError as error:
            raise disk_error(error, "cannot rename a checkpoint to its path", folder) from error
        then(hashes)
        return [None] * ranks.size

    try:
        ranks.scatter(write, end, "a checkpoint was not written", writing=True)
    except CheckpointError as error:
        if ranks.rank == 0:
            try:
                remove_tree(staged, system)
            except OSError as second:
                error.add_note(f"its remains could not be deleted either: {staged}: {second.strerror}")
        raise


def _write(folder: Path, rank: int, plan: SavePlan, values: Mapping[str, Any]) -> Written:
    """Writes this rank's file, durably; a rank without a part writes none."""
    if not plan.items:
        return Written({}, {})
    name = f"__{rank}_0.distcp"
    parts: dict[MetadataIndex, _StorageInfo] = {}

    def content(file: FileWriter) -> None:
        archives = ArchiveWriter(file)
        for item in plan.items:
            start = file.tell()
            value = values[item.index.fqn]
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # torch.save writes the full storage of a view
            archives.add(value)
            parts[item.index] = _StorageInfo(name, start, file.tell() - start)

    return Written(parts, {name: write_file(folder / name, content)})


def _finish(
    folder: Path, contents: Metadata, rest: Mapping[str, Any], written: Sequence[Written]
) -> dict[str, FileHash]:
    """On rank 0, after all ranks: the table of contents, and what is no tensor; gives the checksums of all files."""
    parts = {index: stored for one in written for index, stored in one.parts.items()}
    # Neither a path nor a random number: equal states give equal bytes.
    contents = dataclasses.replace(
        contents, storage_data=parts, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )
    hashes = {name: digest for one in written for name, digest in one.hashes.items()}
    hashes[REST] = write_file(folder / REST, lambda file: ArchiveWriter(file).add(dict(rest)))
    hashes[CONTENTS] = write_file(folder / CONTENTS, pickle.dumps(contents, protocol=4))
    return hashes
