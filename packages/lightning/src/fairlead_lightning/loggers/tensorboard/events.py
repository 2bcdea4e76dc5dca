"""TensorBoard's event files, cut back to where they stood when a checkpoint was saved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from fairlead.errors import RunDirectoryError
from fairlead_runs.commit import FileWriter, Syscalls, atomic_write


def event_files(folder: Path) -> dict[str, int]:
    """The size in bytes of each event file, by its path in the folder; `add_scalars` has folders of its own in it."""
    found = (path for path in sorted(folder.rglob("*tfevents*")) if path.is_file())  # as TensorBoard finds them
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def make_durable(folder: Path, names: Iterable[str]) -> None:
    """Waits until these files, and their names, are on the disk."""
    paths = [folder / name for name in names]
    for path in paths:
        _fsync(path)
    for parent in {parent for path in paths for parent in path.parents if parent.is_relative_to(folder.parent)}:
        Syscalls().fsync_dir(parent)


def cut_to(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Cuts files to the `sizes` of `event_files`, deletes those begun later, and returns those that have less.

    Files that stay are not rewritten: after a kill in the middle the next start continues to cut.
    """
    found = event_files(folder)
    gone: set[Path] = set()
    for name, size in found.items():
        path, stays = folder / name, sizes.get(name, 0)
        if stays <= 0:
            path.unlink()
            gone.add(path.parent)
        elif size > stays:
            os.truncate(path, stays)
            _fsync(path)
    for parent in gone:
        Syscalls().fsync_dir(parent)
    return [name for name, stays in sizes.items() if found.get(name, 0) < stays]


def cut_steps(folder: Path, resume_step: int) -> None:
    """Drops what was logged for this step and later ones, where no position is known; the rest stays, graphs too.

    It costs about half a second for each MB that is cut: TensorBoard's checksum is computed in Python.
    """
    for name in event_files(folder):
        path = folder / name
        if not all(stays for _, stays in _records(path, resume_step)):
            atomic_write(path, partial(_write_shortened, path, resume_step), error=RunDirectoryError)


def _records(path: Path, resume_step: int) -> Iterator[tuple[bytes, bool]]:
    """Each record with whether it stays; a torn one ends the file, as it does for TensorBoard."""
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        RawEventFileLoader,
    )
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    for record in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(record)
        later = event.WhichOneof("what") == "summary" and event.step >= resume_step
        # Hyperparameters are written without a step, which reads as 0.
        plugins = {value.metadata.plugin_data.plugin_name for value in event.summary.value}
        yield record, not later or plugins == {"hparams"}


def _write_shortened(path: Path, resume_step: int, file: FileWriter) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    writer = RecordWriter(file)
    for record, stays in _records(path, resume_step):
        if stays:
            writer.write(record)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
