"""The folder of a prediction while it is being made: what is there already, the shards that are added, the end.

1. `prediction.json` says of which weights and job it is; a start of another one is refused, with the difference.
2. Each shard appears complete: written under a temporary name, fsynced, renamed. A killed start leaves its shards, and
   the next one does the batches that are in none of them.
3. When all batches are in shards, rank 0 writes `manifest.json`, with the size and checksum of each; before that, the
   folder does not read as predictions.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from fairlead.errors import CheckpointError, FairleadError, FingerprintError, RunDirectoryError, RunLockedError
from fairlead_distributed.objects import broadcast_object, gather_objects, on_rank_0
from fairlead_distributed.predictions.shard_file import Batch, ShardFile, write_shard
from fairlead_runs.commit import FileHash, Lock, Manifest, default_algorithm, hash_file
from fairlead_runs.commit.files import disk_error, replace_file
from fairlead_runs.commit.manifest import MANIFEST, json_digest
from fairlead_runs.fingerprints import Difference, Fingerprint
from fairlead_runs.waiting import ranks_text

T = TypeVar("T")
IDENTITY: Final = "prediction.json"
LOCK: Final = ".lock"
_TEMPORARY: Final = (".tmp-", ".lock")
_SHOWN: Final = 6
_SEEN_AFTER_S: Final = 5.0
"""A network file system shows a new file to other machines by then."""


def _on_rank_0(function: Callable[[], T]) -> T:
    """As `on_rank_0`; an error of the disk says that predictions cannot be written."""

    def said() -> T:
        try:
            return function()
        except OSError as error:
            raise _full(error, Path(error.filename or ".")) from error

    return on_rank_0(said)


@dataclass(frozen=True)
class Done:
    """What shards hold of one loader: the numbers of its batches, ascending, and how many samples these have."""

    numbers: np.ndarray[Any, Any]
    samples: int

    def left(self, total: int) -> np.ndarray[Any, Any]:
        """The numbers that are missing of so many batches."""
        return np.setdiff1d(np.arange(total), self.numbers)


class PredictionFolder:
    """Where the ranks of one prediction write; its methods are collectives where they say so.

    Args:
        requested: The folder; None: the next `predictions-N` in `run`, or the last, where that was interrupted.
        run: The run directory.
        settings: What it is a prediction of, as plain data: weights and job.
    """

    def __init__(self, requested: Path | None, run: Path, settings: Mapping[str, Any]) -> None:
        self._settings: dict[str, Any] = {**settings, "loaders": {}}
        self.fingerprint = json_digest(dict(settings))[:16]
        self._lock: Lock | None = None
        self._hashes: dict[str, FileHash] = {}
        self._totals: dict[int, int | None] = {}
        self._under_way: Future[None] | None = None
        self.complete = False
        self.path: Path = _on_rank_0(lambda: self._opened(requested, run))
        try:
            _require_shared(self.path)
            self.complete = broadcast_object(self.complete)
            self._shards = _on_rank_0(self._scanned)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        """How many shards a start before this one has left."""
        return len(self._shards)

    def add_loader(self, number: int, described: Mapping[str, Any], batches: int | None) -> Done:
        """What is done of a loader already; refuses one that is another than at the first start. A collective.

        `batches` is how many it has in all; None: unknown before its end.
        """
        _on_rank_0(lambda: self._identify(number, described))
        self._totals[number] = batches
        return _done(self._shards.values(), number)

    def write(self, loader: int, batches: Sequence[Batch]) -> None:
        """Adds a shard, behind the caller's back; waits for the one before, and raises what became of it."""
        self.settle()
        # Hashing and writing leave the interpreter to the batches that are predicted meanwhile. The thread ends with
        # the shard: a loader may fork its workers later on.
        thread = ThreadPoolExecutor(1, "fairlead-predictions")
        self._under_way = thread.submit(self._write, loader, batches)
        thread.shutdown(wait=False)

    def settle(self) -> None:
        """Waits until the last shard is durable; raises where it could not be written."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, loader: int, batches: Sequence[Batch]) -> None:
        alike: dict[str, list[Batch]] = {}
        for batch in batches:
            alike.setdefault(json.dumps(batch.structure), []).append(batch)
        for group in alike.values():
            name = f"loader-{loader}-batch-{group[0].number:09d}.safetensors"
            try:
                self._hashes[name] = replace_file(
                    self.path / name,
                    partial(write_shard, loader=loader, fingerprint=self.fingerprint, batches=group),
                    algorithm=default_algorithm(),
                )
            except OSError as error:
                raise _full(error, self.path) from error

    def commit(self) -> None:
        """Makes the folder readable, once all ranks have written. A collective."""
        self.settle()
        if not self.complete:
            hashes = {name: digest for own in gather_objects(self._hashes) for name, digest in own.items()}
            _on_rank_0(lambda: self._committed(hashes))
            self.complete = True

    def close(self) -> None:
        """Gives the folder back, once nothing is written any more."""
        if self._under_way is not None:
            self._under_way.exception()  # its error was raised by `settle`, or is not wanted
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- on rank 0

    def _opened(self, requested: Path | None, run: Path) -> Path:
        path = requested if requested is not None else self._next(run)
        _made(path)
        self._lock = _locked(path)
        try:
            known = self._known(path)
            if known is not None:
                self._refuse(known, self._settings, path, ("weights", "job"))
                self._settings = dict(known)
                self.complete = (path / MANIFEST).exists()
            for name in os.listdir(path):
                if name.startswith(".tmp-"):
                    (path / name).unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise
        return path

    def _next(self, run: Path) -> Path:
        """The last one, where it was interrupted and is of the same; else a new one."""
        last = last_number(run)
        path = run / f"predictions-{last}"
        if last and not (path / MANIFEST).exists() and (path / IDENTITY).exists():
            known = Fingerprint.load(path / IDENTITY).settings
            if all(known.get(part) == self._settings.get(part) for part in ("weights", "job")):
                return path
        return run / f"predictions-{last + 1}"

    def _known(self, path: Path) -> Mapping[str, Any] | None:
        """What the folder says that it is of; None of an empty one."""
        if (path / IDENTITY).exists():
            return Fingerprint.load(path / IDENTITY).settings
        names = sorted(name for name in os.listdir(path) if not name.startswith(_TEMPORARY))
        if names:
            raise RunDirectoryError(
                "the folder for the predictions is not empty",
                where=str(path),
                why=f"it holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}",
                fix="name a new folder",
            )
        return None

    def _refuse(self, known: Mapping[str, Any], now: Mapping[str, Any], path: Path, parts: Sequence[str]) -> None:
        old, new = (Fingerprint("", {part: one.get(part) for part in parts}) for one in (known, now))
        different = old.differences(new)
        if not different:
            return
        raise FingerprintError(
            "the folder holds the predictions of another model, of other data or of another job",
            where=str(path),
            why=_difference_text(different),
            fix="name another folder, or delete this one",
        )

    def _identify(self, number: int, described: Mapping[str, Any]) -> None:
        path, key = self.path, str(number)
        known = self._settings["loaders"].get(key)
        if known is not None or self.complete:
            self._refuse({f"loader {key}": known}, {f"loader {key}": described}, path, (f"loader {key}",))
            return
        self._settings["loaders"] = {**self._settings["loaders"], key: dict(described)}
        content = Fingerprint(json_digest(self._settings), self._settings).dump()
        try:
            replace_file(path / IDENTITY, content)
        except OSError as error:
            raise _full(error, path) from error

    def _committed(self, hashes: Mapping[str, FileHash]) -> None:
        # The ranks have listed what they have written, which this machine may see later.
        names = sorted({*_shard_names(self.path), *(name for name in hashes if _appears(self.path / name))})
        there = [_shard_done(ShardFile(self.path / name)) for name in names]
        for loader, batches in self._totals.items():
            done = _done(there, loader).numbers
            if batches is not None and len(done) != batches:
                raise RunDirectoryError(
                    f"the predictions are not complete: {batches - len(done)} of {batches} batches of loader {loader} "
                    "are missing",
                    where=str(self.path),
                    fix="start the prediction again: it does what is missing",
                )
        loaders = {str(number) for number in self._totals}
        if loaders != self._settings["loaders"].keys():
            now = {**self._settings, "loaders": {key: self._settings["loaders"][key] for key in loaders}}
            self._refuse(self._settings, now, self.path, ("loaders",))
        files = {
            name: hashes[name] if name in hashes else hash_file(self.path / name, default_algorithm(), sync=True)
            for name in (*names, IDENTITY)
        }
        about = {"predictions": 1, "fingerprint": self.fingerprint, "loaders": len(loaders)}
        try:
            replace_file(self.path / MANIFEST, Manifest.now(files, about).dump())
        except OSError as error:
            raise _full(error, self.path) from error

    def _scanned(self) -> dict[str, tuple[int, Done]]:
        """The shards that are there, by name, with their loader."""
        found: dict[str, tuple[int, Done]] = {}
        for name in _shard_names(self.path):
            try:
                shard = ShardFile(self.path / name)
            except CheckpointError as error:
                error.fix = error.fix or "delete this file and start again: its batches are predicted once more"
                raise
            if shard.fingerprint == self.fingerprint:
                found[name] = _shard_done(shard)
        return found


def _shard_done(shard: ShardFile) -> tuple[int, Done]:
    return shard.loader, Done(shard.batches(), len(shard.indices()))


def _done(shards: Iterable[tuple[int, Done]], loader: int) -> Done:
    mine = [done for number, done in shards if number == loader]
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *(done.numbers for done in mine)])
    return Done(np.unique(numbers), sum(done.samples for done in mine))


def last_number(run: Path) -> int:
    """N of the last `predictions-N` in a run directory; 0 where there is none."""
    found = (path.name.removeprefix("predictions-") for path in run.glob("predictions-*"))
    return max((int(number) for number in found if number.isdecimal()), default=0)


def _shard_names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("loader-") and name.endswith(".safetensors"))


def _locked(path: Path) -> Lock:
    lock = Lock(path / LOCK)
    try:
        lock.acquire(wait=True)
    except RunLockedError as error:
        raise RunLockedError(
            "another start is writing predictions into this folder",
            where=str(path),
            why=error.why,
            fix="wait for its end, or name another folder",
        ) from error
    except RunDirectoryError as error:
        if isinstance(error.__cause__, OSError):
            raise _full(error.__cause__, path) from error
        raise
    return lock


def _made(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            "cannot make the folder for the predictions",
            where=str(path),
            why=error.strerror,
            fix="name another one with --out",
        ) from error


def _appears(path: Path) -> bool:
    """Whether a file that another machine has written is seen here, now or within some seconds."""
    deadline = time.monotonic() + _SEEN_AFTER_S
    while not (seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


def _require_shared(path: Path) -> None:
    """Raises on all ranks where one of them does not see the folder, with rank 0's lock in it. A collective."""
    blind = [rank for rank, sees in enumerate(gather_objects(_appears(path / LOCK))) if not sees]
    if blind:
        raise RunDirectoryError(
            f"{ranks_text(blind)} cannot see the folder for the predictions",
            where=str(path),
            why="rank 0 has made it on a file system that their machines do not share",
            fix="name one on a shared file system with --out",
        )


def _full(error: OSError, path: Path) -> FairleadError:
    failure = disk_error(error, "cannot write predictions", path, RunDirectoryError)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        failure.fix = "free some space and start again: the shards that are there are not done again"
    return failure


def _difference_text(different: Sequence[Difference]) -> str:
    more = f"\nand {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return "\n".join(map(str, itertools.islice(different, _SHOWN))) + more
