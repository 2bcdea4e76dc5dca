"""`fairlead checkpoint verify`: reads every byte of checkpoints and compares it with what was recorded."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, MissingDependencyError
from fairlead_checkpoint_io.commands.file_checks import (
    ProgressReader,
    archive_problem,
    file_problem,
    safetensors_problem,
)
from fairlead_checkpoint_io.commands.sources import checkpoints_folder, existing, is_stored, size_text, stored_run
from fairlead_checkpoint_io.files.formats import format_of, names_in
from fairlead_runs.commit import list_checkpoints, read_latest, read_manifest
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.hashing import FileHash, new_hasher
from fairlead_runs.commit.manifest import MANIFEST
from fairlead_runs.remote import RemoteCheckpoint, Store
from fairlead_runs.remote.listing import changed

__all__ = ["run"]


@dataclass
class Checked:
    """What was found out of one checkpoint; of one on a store, `path` is its name only."""

    path: Path
    url: str | None = None
    files: int = 0
    size: int = 0
    damage: list[dict[str, str]] = field(default_factory=list)
    note: str = ""

    def add_damage(self, file: str, problem: str) -> None:
        """Notes what is wrong with a file."""
        self.damage.append({"file": file, "problem": problem})

    def expect(self, files: Mapping[str, FileHash]) -> None:
        """Counts the files of a manifest.

        Raises:
            MissingDependencyError: The package of a checksum is missing: one error, not one a file.
        """
        for algorithm in {expected.algorithm for expected in files.values()}:
            new_hasher(algorithm)
        self.files, self.size = len(files), sum(expected.size for expected in files.values())


Task = tuple[Checked, Callable[[ProgressReader], str | None], str]
"""What is read: of which checkpoint, the call that gives the problem, the file's name."""


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Verifies one checkpoint, the newest, or all of a run; 1 when something is damaged."""
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"{arguments.threads} threads", where="--threads", fix="give a number from 1")
    if is_stored(arguments.path):
        checked, tasks, unfinished = _plan_on_store(arguments.path, newest=arguments.newest)
        for name in unfinished:
            session.warn(f"{name}: not uploaded to its end, so it is no checkpoint; nothing was compared")
    else:
        checked, tasks = _plan_on_disk(existing(arguments.path, session), newest=arguments.newest)
    bar = session.stderr if session.stderr.isatty() and not arguments.json else None
    reader = ProgressReader(sum(each.size for each in checked), bar)
    try:
        with ThreadPoolExecutor(arguments.threads or min(16, os.cpu_count() or 1)) as pool:
            problems = list(pool.map(lambda task: task[1](reader), tasks))
    finally:
        reader.close_bar()
    for (one, _, name), problem in zip(tasks, problems, strict=True):
        if problem is not None:
            one.add_damage(name, problem)
    damaged = [one for one in checked if one.damage]
    if arguments.json:
        session.print_json({"ok": not damaged, "checkpoints": [_document(one) for one in checked]})
    else:
        for one in checked:
            session.print(_line(one))
            for damage in one.damage:
                session.print(f"  {damage['file']}: {damage['problem']}")
    return 1 if damaged else 0


def _line(one: Checked) -> str:
    files = f"{one.files} files" if one.files != 1 else "1 file"
    state, note = "DAMAGED" if one.damage else "ok", f"; {one.note}" if one.note else ""
    return f"{one.path.name}: {state} ({files}, {size_text(one.size)}{note})"


def _document(one: Checked) -> dict[str, Any]:
    return {
        "path": one.url or str(one.path),
        "ok": not one.damage,
        "files": one.files,
        "size": one.size,
        "note": one.note,
        "damage": one.damage,
    }


# -- what is to be read: one task a file, so that many small checkpoints and one large one are parallel alike


def _plan_on_store(url: str, *, newest: bool) -> tuple[list[Checked], list[Task], list[str]]:
    """The checkpoints, the tasks, and what is no checkpoint because its upload has not ended.

    Raises:
        FairleadError: There is nothing to verify; the store refuses, or does not answer.
    """
    run = stored_run(url)
    chosen, unfinished = run.found.checkpoints, run.found.unfinished
    if newest:
        if run.name is not None:
            raise _one_only(url)
        chosen, unfinished = sorted(chosen, key=lambda item: item.order)[-1:], []
    if not chosen and run.name is None:
        why = f"not uploaded to their end: {', '.join(unfinished)}" if unfinished else None
        raise ConfigError("there are no checkpoints to verify", where=run.store.url, why=why, fix="name another run")
    checked: list[Checked] = []
    tasks: list[Task] = []
    for item in chosen:
        one = Checked(Path(item.name), item.url)
        checked.append(one)
        tasks += _on_store(one, item, run.store)
    if run.name is not None and not chosen:
        one = Checked(Path(run.name), f"{run.store.url}/{run.name}")
        one.add_damage(MANIFEST, "missing: it was not uploaded to its end")
        checked.append(one)
        unfinished = []
    elif run.lacks(latest := run.latest):
        one = Checked(Path(run.store.url.rpartition("/")[2]), run.store.url)
        one.add_damage("latest", f"it names {latest}, which is not there")
        checked.append(one)
    return checked, tasks, unfinished


def _on_store(one: Checked, item: RemoteCheckpoint, store: Store) -> Iterable[Task]:
    for damage in item.damages():
        one.add_damage(damage.file or item.name, damage.problem)
    if item.manifest is None:
        return
    one.expect(item.manifest.files)
    wrong = {damage["file"] for damage in one.damage}
    for name, expected in item.manifest.files.items():
        if name not in wrong:
            yield one, partial(_stored_problem, store, item.name, name, expected), name


def _stored_problem(store: Store, checkpoint: str, name: str, expected: FileHash, reader: ProgressReader) -> str | None:
    damage = changed(store, checkpoint, name, expected, reader.add)
    return damage.problem if damage is not None else None


def _plan_on_disk(path: Path, *, newest: bool) -> tuple[list[Checked], list[Task]]:
    folder = checkpoints_folder(path)
    if folder is None and newest:
        raise _one_only(str(path))
    checked: list[Checked] = []
    tasks: list[Task] = []
    for root in [path] if folder is None else _checkpoints_in(folder, newest=newest):
        one = Checked(root)
        checked.append(one)
        tasks += _on_disk(one, single=folder is None)
    latest = read_latest(folder) if folder is not None else None
    if folder is not None and latest is not None and not (folder / latest).is_dir():
        one = Checked(folder)
        one.add_damage("latest", f"it names {latest}, which is not there")
        checked.append(one)
    return checked, tasks


def _one_only(where: str) -> ConfigError:
    return ConfigError("--newest is about a run, this is one checkpoint", where=where, fix="leave it out")


def _checkpoints_in(folder: Path, *, newest: bool) -> list[Path]:
    """The checkpoints in a folder, also those whose manifest is gone, and files of plain Lightning."""
    if newest:
        ordered = []
        for checkpoint in list_checkpoints(folder):
            try:
                ordered.append((checkpoint.order, checkpoint.path))
            except CheckpointError:
                ordered.append(((-1, checkpoint.step, checkpoint.version), checkpoint.path))
        roots = [max(ordered)[1]] if ordered else []
    else:
        names = sorted(names_in(folder)) if folder.exists() else []
        roots = [folder / name for name in names if NAME.fullmatch(name) and (folder / name).is_dir()]
        roots += [folder / name for name in names if name.endswith(".ckpt")]
    if not roots:
        raise ConfigError(
            "there are no checkpoints to verify", where=str(folder), fix="name a run directory or a checkpoint"
        )
    return roots


def _on_disk(one: Checked, *, single: bool) -> Iterable[Task]:
    path = one.path
    if path.is_dir() and ((path / MANIFEST).exists() or NAME.fullmatch(path.name)):
        try:
            files = read_manifest(path).files
        except CheckpointError as error:
            one.add_damage(MANIFEST, error.why or error.what)
            return
        one.expect(files)
        for name, expected in files.items():
            yield one, partial(file_problem, path / name, expected), name
        return
    try:
        kind = format_of(path)
    except CheckpointError as error:
        if single and not (path.is_file() and path.stat().st_size == 0):
            raise  # a wrong path is a wrong call; among checkpoints, or empty, it is damage
        one.add_damage(path.name, error.why or error.what)
        return
    if kind == "deepspeed":
        raise ConfigError(
            "this DeepSpeed folder has nothing to compare with",
            where=str(path),
            why="DeepSpeed writes no checksums, and the folder is in no checkpoint of Fairlead's",
        )
    if kind == "distributed":
        one.note = "sizes only: without a manifest there are no checksums"
        _compare_sizes(one)
    elif kind == "safetensors":
        one.files, one.size = 1, path.stat().st_size
        one.note = "its size against its header; it holds no checksums"
        yield one, lambda reader: safetensors_problem(path), path.name
    else:
        one.files, one.size = 1, path.stat().st_size
        with path.open("rb") as file:
            is_archive = file.read(2) == b"PK"
        if zipfile.is_zipfile(path):
            one.note = "the checksums inside the file"
            yield one, partial(archive_problem, path), path.name
        elif is_archive:
            one.add_damage(path.name, "its end is missing: it was cut off")
        else:
            one.note = "nothing was compared: files of torch before 1.6 hold no checksums"


def _compare_sizes(one: Checked) -> None:
    try:
        from fairlead_checkpoint_io.files.shards import Shards
    except ImportError as error:
        raise MissingDependencyError(
            "verifying a distributed checkpoint without a manifest needs torch",
            where=str(one.path),
            why="which files it has is in torch's own .metadata",
            fix="pip install 'fairlead[lightning]'",
        ) from error
    names = [name for name in names_in(one.path) if (one.path / name).is_file()]
    one.files, one.size = len(names), sum((one.path / name).stat().st_size for name in names)
    try:
        for name, problem in Shards(one.path).wrong_files():
            one.add_damage(name, problem)
    except CheckpointError as error:
        one.add_damage(".metadata", error.why or error.what)
