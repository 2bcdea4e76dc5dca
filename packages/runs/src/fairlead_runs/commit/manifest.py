"""The manifest of a checkpoint: which files it has, how large, with which checksums, and what it is of."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from fairlead.errors import CheckpointError
from fairlead_runs.commit.files import FileHash, Syscalls, hash_file
from fairlead_runs.describe import plain

MANIFEST = "manifest.json"
FORMAT = 1
_DIGEST = "manifest_sha256"


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a checkpoint."""

    path: Path
    file: str | None
    problem: str

    def __str__(self) -> str:
        return f"{self.path.name}{'/' + self.file if self.file else ''}: {self.problem}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        files: Checksum and size of each file by its path inside the checkpoint, with `/`.
        metadata: The caller's: step, epoch, start, metrics, config hash, world size; primitives only.
        created: When it was written, UTC, ISO 8601.  For people; nothing is ordered by it.
    """

    files: Mapping[str, FileHash]
    metadata: Mapping[str, Any]
    created: str

    @classmethod
    def now(cls, files: Mapping[str, FileHash], metadata: Mapping[str, Any]) -> Manifest:
        """A manifest of this moment; `CheckpointError` where the metadata holds something other than primitives."""
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return cls(dict(sorted(files.items())), plain(metadata, _refuse), created)

    @property
    def size(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(file.size for file in self.files.values())

    def dump(self) -> bytes:
        """The text of `manifest.json`; its own digest is in it, so that a flipped bit is found."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "created": self.created,
            "metadata": dict(self.metadata),
            "files": {name: {"size": f.size, f.algorithm: f.digest} for name, f in self.files.items()},
        }
        body[_DIGEST] = json_digest(body)
        return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        """Reads the text of a manifest; `ValueError` says whether it is torn, damaged, or of a newer format."""
        try:
            body = json.loads(data)
        except ValueError:
            raise ValueError("the manifest is not JSON: it was cut off or overwritten") from None
        if not isinstance(body, dict) or not isinstance(body.get("format"), int):
            raise ValueError("the manifest is not one of Fairlead")
        if body["format"] > FORMAT:
            raise ValueError(f"the manifest has format {body['format']}, this version of Fairlead knows {FORMAT}")
        if body.pop(_DIGEST, None) != json_digest(body):
            raise ValueError("the manifest's own checksum is wrong: it was changed after it was written")
        files = {name: _file_hash(entry) for name, entry in body["files"].items()}
        return cls(files, body["metadata"], body["created"])


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory; `CheckpointError` where there is none, or a damaged one."""
    try:
        return Manifest.load((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        why = "it has no manifest: it was not written to its end" if path.is_dir() else "there is no such directory"
        raise CheckpointError("not a complete checkpoint", where=str(path), why=why) from None
    except OSError as error:
        raise CheckpointError("cannot read a checkpoint", where=str(path), why=error.strerror) from error
    except ValueError as error:
        raise CheckpointError("a checkpoint is damaged", where=str(path / MANIFEST), why=str(error)) from None


def verify(
    path: Path,
    *,
    deep: bool = False,
    only: Collection[str] | None = None,
    threads: int | None = None,
    syscalls: Syscalls | None = None,
) -> list[Damage]:
    """What is wrong with a checkpoint; an empty list when nothing is.

    Args:
        path: The checkpoint's directory.
        deep: Also read all files and compare their checksums; otherwise only sizes.
        only: The files to look at, by name in the manifest; None: all.
        threads: How many files are read at a time; None: one per core, at most 16.

    Raises:
        MissingDependencyError: Its checksums need a package that is not installed.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [Damage(path, MANIFEST, error.why or error.what)]

    def check(item: tuple[str, FileHash]) -> str | None:
        return file_problem(path / item[0], item[1], deep=deep, syscalls=syscalls)

    files = [item for item in manifest.files.items() if only is None or item[0] in only]
    if deep and len(files) > 1:  # hashing and reading release the GIL
        with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
            found = list(pool.map(check, files))
    else:
        found = [check(item) for item in files]
    return [Damage(path, name, problem) for (name, _), problem in zip(files, found, strict=True) if problem]


def file_problem(path: Path, expected: FileHash, *, deep: bool, syscalls: Syscalls | None = None) -> str | None:
    """How a file differs from what its manifest says, by its size and, with `deep`, its checksum; None: it does not."""
    try:
        size = os.stat(path).st_size
        if size != expected.size:
            return f"{size} bytes, should be {expected.size}"
        if deep and hash_file(path, expected.algorithm, syscalls=syscalls) != expected:
            return wrong_checksum(expected)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def wrong_checksum(expected: FileHash) -> str:
    """The problem of a file whose checksum is not this one."""
    return f"its {expected.algorithm} checksum is wrong: the content has changed"


def is_inside(name: str) -> bool:
    """Whether a file's name stays inside its checkpoint; a manifest may be anybody's."""
    pure = PurePosixPath(name)
    inside = bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts
    return inside and str(pure) == name and "\0" not in name


def json_digest(body: Any) -> str:
    """The sha256 of plain data, as canonical JSON, in hexadecimal."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hash(entry: Mapping[str, Any]) -> FileHash:
    (algorithm,) = (key for key in entry if key != "size")
    return FileHash(algorithm, entry[algorithm], entry["size"])


def _refuse(value: object, where: str) -> NoReturn:
    raise CheckpointError(
        f"a checkpoint's metadata holds a {type(value).__name__}",
        where=where,
        why="a manifest is read without unpickling anything, so it holds text, numbers, lists and mappings only",
        fix="convert it, for a tensor with .item()",
    )
