"""`fairlead checkpoint verify`: reads every byte of checkpoints and compares it with what was recorded."""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, MissingDependencyError
from fairlead_checkpoint_io.commands.checked import Bytes, Checked, Task
from fairlead_checkpoint_io.commands.places import checkpoints_folder, existing, format_of
from fairlead_checkpoint_io.commands.rows import size_text
from fairlead_checkpoint_io.commands.stored import is_stored
from fairlead_checkpoint_io.commands.stored_views import planned
from fairlead_runs.commit import hash_file, list_checkpoints, read_latest, read_manifest
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.hashing import FileHash, new_hasher
from fairlead_runs.commit.manifest import MANIFEST

__all__ = ["run"]

_CHUNK: Final = 4 << 20


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Verifies one checkpoint, the newest, or all of a run; 1 when something is damaged."""
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"{arguments.threads} threads", where="--threads", fix="give a number from 1")
    if is_stored(arguments.path):
        checked, tasks, unfinished = planned(arguments.path, newest=arguments.newest)
        for name in unfinished:
            session.warn(f"{name}: not uploaded to its end, so it is no checkpoint; nothing was compared")
    else:
        checked, tasks = _plan(existing(arguments.path, session), newest=arguments.newest)
    bar = session.stderr if session.stderr.isatty() and not arguments.json else None
    reader = Bytes(sum(each.size for each in checked), bar)
    try:
        with ThreadPoolExecutor(arguments.threads or min(16, os.cpu_count() or 1)) as pool:
            problems = list(pool.map(lambda task: task[1](reader), tasks))
    finally:
        reader.close_bar()
    for (one, _, name), problem in zip(tasks, problems, strict=True):
        if problem is not None:
            one.damage.append({"file": name, "problem": problem})
    damaged = [one for one in checked if one.damage]
    if arguments.json:
        session.print_json({"ok": not damaged, "checkpoints": [_document(one) for one in checked]})
    else:
        for one in checked:
            session.print(_line(one))
            for damage in one.damage:
                session.print(f"  {damage['file']}: {damage['problem']}")
    return 1 if damaged else 0


def _plan(path: Path, *, newest: bool) -> tuple[list[Checked], list[Task]]:
    """What is to be read: one task a file, so that many small checkpoints and one large one are parallel alike."""
    folder = checkpoints_folder(path)
    if folder is None:
        if newest:
            raise ConfigError("--newest is about a run, this is one checkpoint", where=str(path), fix="leave it out")
        roots = [path]
    else:
        roots = _of_folder(folder, newest=newest)
    checked: list[Checked] = []
    tasks: list[Task] = []
    for root in roots:
        one = Checked(root)
        checked.append(one)
        tasks += _tasks(one, alone=folder is None)
    latest = read_latest(folder) if folder is not None else None
    if folder is not None and latest is not None and not (folder / latest).is_dir():
        problem = {"file": "latest", "problem": f"it names {latest}, which is not there"}
        checked.append(Checked(folder, damage=[problem]))
    return checked, tasks


def _of_folder(folder: Path, *, newest: bool) -> list[Path]:
    """The checkpoints in a folder, also those whose manifest is gone, and files of plain Lightning."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        names = []
    roots = [folder / name for name in names if NAME.fullmatch(name) and (folder / name).is_dir()]
    if newest:
        ordered = []
        for checkpoint in list_checkpoints(folder):
            try:
                ordered.append((checkpoint.order, checkpoint.path))
            except CheckpointError:
                ordered.append(((-1, checkpoint.step, checkpoint.version), checkpoint.path))
        roots = [max(ordered)[1]] if ordered else []
    else:
        roots += [folder / name for name in names if name.endswith(".ckpt")]
    if not roots:
        raise ConfigError(
            "there are no checkpoints to verify", where=str(folder), fix="name a run directory or a checkpoint"
        )
    return roots


def _tasks(one: Checked, *, alone: bool) -> Iterable[Task]:
    if one.path.is_dir() and ((one.path / MANIFEST).exists() or NAME.fullmatch(one.path.name)):
        return _by_manifest(one)
    try:
        kind = format_of(one.path)
    except CheckpointError as error:
        if alone and not (one.path.is_file() and one.path.stat().st_size == 0):
            raise  # a wrong path is a wrong call; among checkpoints, or empty, it is damage
        one.damage.append({"file": one.path.name, "problem": error.why or error.what})
        return []
    if kind == "torch":
        one.files, one.size = 1, one.path.stat().st_size
        if zipfile.is_zipfile(one.path):
            one.note = "the checksums inside the file"
            return [(one, lambda reader: _archive_problem(one.path, reader), one.path.name)]
        with one.path.open("rb") as file:
            cut_off = file.read(2) == b"PK"
        if cut_off:
            return [(one, lambda reader: "its end is missing: it was cut off", one.path.name)]
        one.note = "nothing was compared: files of torch before 1.6 hold no checksums"
        return []
    if kind == "safetensors":
        one.files, one.size = 1, one.path.stat().st_size
        one.note = "its size against its header; it holds no checksums"
        return [(one, lambda reader: _safetensors_problem(one.path), one.path.name)]
    if kind == "distributed":
        one.note = "sizes only: without a manifest there are no checksums"
        return _distributed(one)
    raise ConfigError(
        "this DeepSpeed folder has nothing to compare with",
        where=str(one.path),
        why="DeepSpeed writes no checksums, and the folder is in no checkpoint of Fairlead's",
    )


def _by_manifest(one: Checked) -> list[Task]:
    try:
        files = read_manifest(one.path).files
    except CheckpointError as error:
        one.damage.append({"file": MANIFEST, "problem": error.why or error.what})
        return []
    for algorithm in {expected.algorithm for expected in files.values()}:
        new_hasher(algorithm)  # a missing package is one error, not one a file
    one.files, one.size = len(files), sum(expected.size for expected in files.values())
    return [(one, _compare(one.path / name, expected), name) for name, expected in files.items()]


def _compare(path: Path, expected: FileHash) -> Callable[[Bytes], str | None]:
    def problem(reader: Bytes) -> str | None:
        try:
            size = path.stat().st_size
            if size != expected.size:
                reader.add(expected.size)
                return f"{size} bytes, should be {expected.size}"
            if hash_file(path, expected.algorithm, syscalls=reader) != expected:
                return f"its {expected.algorithm} checksum is wrong: the content has changed"
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None

    return problem


def _archive_problem(path: Path, reader: Bytes) -> str | None:
    """The first record of a file of torch.save whose checksum is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                try:
                    with archive.open(info) as record:
                        while chunk := record.read(_CHUNK):
                            reader.add(len(chunk))
                except (zipfile.BadZipFile, NotImplementedError, EOFError):
                    return f"its record {info.filename} does not match its checksum"
    except (zipfile.BadZipFile, NotImplementedError) as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def _safetensors_problem(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError):
            return "its header is damaged"
    return None if size == wanted else f"{size} bytes, should be {wanted}"


def _distributed(one: Checked) -> list[Task]:
    try:
        from fairlead_checkpoint_io.files.dcp_reading import missing_files
    except ImportError as error:
        raise MissingDependencyError(
            "verifying a distributed checkpoint without a manifest needs torch",
            where=str(one.path),
            why="which files it has is in torch's own .metadata",
            fix="pip install 'fairlead[lightning]'",
        ) from error
    names = [name for name in os.listdir(one.path) if (one.path / name).is_file()]
    one.files, one.size = len(names), sum((one.path / name).stat().st_size for name in names)
    try:
        wrong = missing_files(one.path)
    except CheckpointError as error:
        wrong = [f".metadata: {error.why or error.what}"]
    for text in wrong:
        name, _, problem = text.partition(": ")
        one.damage.append({"file": name, "problem": problem})
    return []


def _line(one: Checked) -> str:
    said = f"{one.files} files, {size_text(one.size)}" if one.files != 1 else f"1 file, {size_text(one.size)}"
    state = "DAMAGED" if one.damage else "ok"
    return f"{one.path.name}: {state} ({said}{f'; {one.note}' if one.note else ''})"


def _document(one: Checked) -> dict[str, Any]:
    return {
        "path": one.url or str(one.path),
        "ok": not one.damage,
        "files": one.files,
        "size": one.size,
        "note": one.note,
        "damage": one.damage,
    }
