"""`fairlead checkpoint verify`: reads every byte of checkpoints and compares it with what was recorded."""

from __future__ import annotations

import argparse
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, MissingDependencyError
from fairlead.install import install_line
from fairlead_checkpoint_io.checkpoint_format import CheckpointFormat, Verified, format_of, known_formats
from fairlead_checkpoint_io.commands.sources import checkpoints_folder, existing, is_stored, size_text, stored_run
from fairlead_checkpoint_io.files.formats import names_in
from fairlead_runs.commit import list_checkpoints, read_latest, read_manifest
from fairlead_runs.commit.checkpoints import NAME, readable_checkpoints
from fairlead_runs.commit.files import FileHash, new_hasher
from fairlead_runs.commit.manifest import MANIFEST, file_problem
from fairlead_runs.remote import RemoteCheckpoint, Store
from fairlead_runs.remote.checkpoints import changed

_CHUNK: Final = 4 << 20
_LONGEST_HEADER: Final = 100_000_000  # bytes; safetensors reads no longer one


def verify_archive(path: Path) -> Verified:
    """A file of torch.save: the checksum of each record."""
    if zipfile.is_zipfile(path):
        problem = _archive_problem(path)
        return Verified("the checksums inside the file", {path.name: problem} if problem else {})
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            return Verified("", {path.name: "its end is missing: it was cut off"})
    return Verified("nothing was compared: files of torch before 1.6 hold no checksums", {})


def _archive_problem(path: Path) -> str | None:
    """The first record whose checksum is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                try:
                    with archive.open(info) as record:
                        while record.read(_CHUNK):
                            pass
                except (zipfile.BadZipFile, NotImplementedError, EOFError):
                    return f"its record {info.filename} does not match its checksum"
    except (zipfile.BadZipFile, NotImplementedError) as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def verify_safetensors(path: Path) -> Verified:
    """A file of safetensors: its size, and what its header says of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(min(length, _LONGEST_HEADER)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
            problem = None if size == wanted else f"{size} bytes, should be {wanted}"
        except (ValueError, KeyError, TypeError, IndexError):
            problem = "its header is damaged"
    return Verified("its size against its header; it holds no checksums", {path.name: problem} if problem else {})


def verify_shards(path: Path) -> Verified:
    """A distributed folder without a manifest: the sizes of its files, which torch's own `.metadata` knows."""
    try:
        from fairlead_checkpoint_io.files.shards import Shards
    except ImportError as error:
        raise MissingDependencyError(
            "verifying a distributed checkpoint without a manifest needs torch",
            where=str(path),
            why="which files it has is in torch's own .metadata",
            fix=install_line("lightning"),
        ) from error
    try:
        damage = Shards(path).wrong_files()
    except CheckpointError as error:
        damage = {".metadata": error.why or error.what}
    return Verified("sizes only: without a manifest there are no checksums", damage)


@dataclass
class Checked:
    """What was found out of one checkpoint."""

    path: Path
    url: str | None = None
    files: int = 0
    size: int = 0
    note: str = ""
    damage: dict[str, str] = field(default_factory=dict)
    reads: dict[str, Callable[[], str | None]] = field(default_factory=dict)

    def expect(self, files: Mapping[str, FileHash], read: Callable[[str, FileHash], str | None]) -> None:
        """Notes what the manifest says, and how each file that is not known to be damaged is read."""
        for algorithm in {expected.algorithm for expected in files.values()}:
            new_hasher(algorithm)
        self.files, self.size = len(files), sum(expected.size for expected in files.values())
        self.reads = {name: partial(read, name, files[name]) for name in files if name not in self.damage}

    def ask(self, format_: CheckpointFormat, verify: str) -> None:
        """Has the checkpoint's format read all of it."""
        self.note, self.damage = format_.call(verify, self.path)

    def __str__(self) -> str:
        files = f"{self.files} files" if self.files != 1 else "1 file"
        state, note = "DAMAGED" if self.damage else "ok", f"; {self.note}" if self.note else ""
        return f"{self.path.name}: {state} ({files}, {size_text(self.size)}{note})"

    def document(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {
            "path": self.url or str(self.path),
            "ok": not self.damage,
            "files": self.files,
            "size": self.size,
            "note": self.note,
            "damage": [{"file": file, "problem": problem} for file, problem in self.damage.items()],
        }


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Verifies one checkpoint, the newest, or all of a run; 1 when something is damaged."""
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"{arguments.threads} threads", where="--threads", fix="give a number from 1")
    if is_stored(arguments.path):
        checked = _on_store(arguments.path, session, newest=arguments.newest)
    else:
        checked = _on_disk(existing(arguments.path, session), known_formats(session), newest=arguments.newest)
    tasks = [(one, name, read) for one in checked for name, read in one.reads.items()]
    with ThreadPoolExecutor(arguments.threads or min(16, os.cpu_count() or 1)) as pool:
        problems = list(pool.map(lambda task: task[2](), tasks))
    for (one, name, _), problem in zip(tasks, problems, strict=True):
        if problem is not None:
            one.damage[name] = problem
    damaged = [one for one in checked if one.damage]
    if arguments.json:
        session.print_json({"ok": not damaged, "checkpoints": [one.document() for one in checked]})
    else:
        for one in checked:
            session.print(str(one))
            for file, problem in one.damage.items():
                session.print(f"  {file}: {problem}")
    return 1 if damaged else 0


def _on_store(url: str, session: Session, *, newest: bool) -> list[Checked]:
    """The checkpoints of a run on a store, or the one that was named; warns of those not uploaded to their end."""
    run = stored_run(url)
    chosen, unfinished = run.found.checkpoints, run.found.unfinished
    if newest:
        if run.name is not None:
            raise _one_only(url)
        chosen, unfinished = sorted(chosen, key=lambda item: item.order)[-1:], []
    if not chosen and run.name is not None:
        damage = {MANIFEST: "missing: it was not uploaded to its end"}
        return [Checked(Path(run.name), f"{run.store.url}/{run.name}", damage=damage)]
    if not chosen:
        why = f"not uploaded to their end: {', '.join(unfinished)}" if unfinished else None
        raise ConfigError("there are no checkpoints to verify", where=run.store.url, why=why, fix="name another run")
    for name in unfinished:
        session.warn(f"{name}: not uploaded to its end, so it is no checkpoint; nothing was compared")
    checked = [_copy(item, run.store) for item in chosen]
    if run.lacks(latest := run.latest):
        checked.append(_without_latest(Path(run.store.url.rpartition("/")[2]), latest, run.store.url))
    return checked


def _copy(item: RemoteCheckpoint, store: Store) -> Checked:
    one = Checked(Path(item.name), item.url)
    one.damage = {damage.file or item.name: damage.problem for damage in item.damages()}

    def read(name: str, expected: FileHash) -> str | None:
        damage = changed(store, item.name, name, expected)
        return damage.problem if damage is not None else None

    if item.manifest is not None:
        one.expect(item.manifest.files, read)
    return one


def _on_disk(path: Path, formats: tuple[CheckpointFormat, ...], *, newest: bool) -> list[Checked]:
    folder = checkpoints_folder(path, formats)
    if folder is None:
        if newest:
            raise _one_only(str(path))
        return [_checkpoint(path, formats, single=True)]
    checked = [_checkpoint(root, formats, single=False) for root in _checkpoints_in(folder, newest=newest)]
    latest = read_latest(folder)
    if latest is not None and not (folder / latest).is_dir():
        checked.append(_without_latest(folder, latest))
    return checked


def _without_latest(run: Path, latest: str | None, url: str | None = None) -> Checked:
    return Checked(run, url, damage={"latest": f"it names {latest}, which is not there"})


def _one_only(where: str) -> ConfigError:
    return ConfigError("--newest is about a run, this is one checkpoint", where=where, fix="leave it out")


def _checkpoints_in(folder: Path, *, newest: bool) -> list[Path]:
    """The checkpoints in a folder, also those whose manifest is gone, and files of plain Lightning."""
    if newest:
        roots = [item.path for item in (readable_checkpoints(folder) or list_checkpoints(folder))[-1:]]
    else:
        names = sorted(names_in(folder)) if folder.exists() else []
        roots = [folder / name for name in names if NAME.fullmatch(name) and (folder / name).is_dir()]
        roots += [folder / name for name in names if name.endswith(".ckpt")]
    if not roots:
        raise ConfigError(
            "there are no checkpoints to verify", where=str(folder), fix="name a run directory or a checkpoint"
        )
    return roots


def _checkpoint(path: Path, formats: tuple[CheckpointFormat, ...], *, single: bool) -> Checked:
    one = Checked(path)
    if path.is_dir() and ((path / MANIFEST).exists() or NAME.fullmatch(path.name)):
        try:
            files = read_manifest(path).files
        except CheckpointError as error:
            one.damage[MANIFEST] = error.why or error.what
            return one
        one.expect(files, lambda name, hash_: file_problem(path / name, hash_, deep=True))
        return one
    try:
        kind = format_of(path, formats)
    except CheckpointError as error:
        if single and not (path.is_file() and path.stat().st_size == 0):
            raise  # a wrong path is a wrong call; among checkpoints, or empty, it is damage
        one.damage[path.name] = error.why or error.what
        return one
    if kind.verify is None:
        raise ConfigError(
            f"a checkpoint in the format {kind} has nothing to compare with",
            where=str(path),
            why="it holds no checksums that could be compared, and it is in no checkpoint of Fairlead's",
        )
    inside = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    one.files, one.size = len(inside), sum(item.stat().st_size for item in inside)
    one.reads[path.name] = partial(one.ask, kind, kind.verify)
    return one
