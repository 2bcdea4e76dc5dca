"""A run as it is kept on a store: which start owns it, and what is there besides the checkpoints."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fairlead.errors import FingerprintError, RunDirectoryError, RunLockedError
from fairlead_runs import Fingerprint
from fairlead_runs.commit import newest_complete
from fairlead_runs.remote import RemoteCheckpoint, Store, list_checkpoints, list_run
from fairlead_runs.remote.checkpoints import newest_sound

_GIB: Final = 1 << 30
_OWNER: Final = "owner.json"
_ENDED: Final = "ended"  # the nonce of the owner, if its start has ended before its first step
_FINGERPRINT: Final = "fingerprint.json"
_RECORDS: Final = ("job.yaml", "metrics.csv", "history.jsonl")  # the fingerprint only at a start: a start reads it
_ELSEWHERE: Final = "set another run.name, or another trainer.checkpoint_io.url"


class RunOnStore:
    """A run at its URL, which belongs to the start that claimed it last."""

    def __init__(self, store: Store) -> None:
        self._url = store.url
        self._store = store
        self._nonce = secrets.token_hex(8)

    def check(self, fingerprint: Fingerprint, *, new: bool) -> None:
        """Refuses a run of another fingerprint, unless it owns nothing; with `new`, any that is there already."""
        content = self._store.read(_FINGERPRINT)
        if content is None:
            return
        try:
            body = json.loads(content)
            stored = Fingerprint(body["digest"], body["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                "a run's fingerprint on the store is damaged", where=self._url, why=str(error), fix=_ELSEWHERE
            ) from None
        if new:
            raise FingerprintError("the URL holds a run already", where=self._url, why="--resume never", fix=_ELSEWHERE)
        if not fingerprint.continues(stored) and not self._owns_nothing():
            raise FingerprintError(
                "the URL belongs to a run with other settings",
                where=self._url,
                why="\n".join(str(difference) for difference in fingerprint.refused(stored)[:20]),
                fix=f"undo the changes to continue it; {_ELSEWHERE}",
            )

    def _owns_nothing(self) -> bool:
        """Whether nothing would be lost with the run that is there: it ended before its first step.

        That its start has ended is known where it says so: one without a checkpoint may be training elsewhere.
        """
        found = list_run(self._store)
        nonce = self._owner(self._store).get("nonce")
        ended = self._store.read(_ENDED)
        return not found.checkpoints and not found.unfinished and ended is not None and ended.decode() == nonce

    def end(self) -> None:
        """This start ends, and leaves nothing: the next one may have other settings."""
        if self.lost(self._store) is None:
            self._store.write(_ENDED, self._nonce.encode())  # not into the owner's, whom another may be by now

    def last_start(self) -> int:
        """The number of the start that claimed the run last, 0 if none: that of the next owner must be higher."""
        start = self._owner(self._store).get("start")
        return start if isinstance(start, int) else 0

    def fetch(self, run: Path) -> list[str]:
        """Downloads the records and the newest sound checkpoint, if newer than any here; gives what to say of it."""
        root = run / "checkpoints"
        here = newest_complete(root).checkpoint
        began = time.monotonic()
        found, skipped = newest_sound(self._store, root, after=here.order if here is not None else None)
        messages = [f"warning: {text}; the checkpoint before it is used" for text in skipped]
        if found is not None:
            seconds = time.monotonic() - began
            gib = found.manifest.size / _GIB
            messages.append(f"downloaded {found.name} from {self._url} ({gib:.2f} GiB in {seconds:.1f} s)")
        for name in ("metrics.csv", "history.jsonl"):
            if found is not None and not (run / name).exists() and (content := self._store.read(name)) is not None:
                (run / name).write_bytes(content)
        return messages

    def claim(self, run: Path, start: int) -> list[RemoteCheckpoint]:
        """Makes this start its owner; gives the complete checkpoints that are there.

        Raises:
            RunLockedError: A start with as high a number has claimed it since this one began.
        """
        if self.last_start() >= start:
            raise self._replaced(self._owner(self._store))
        owner = {"nonce": self._nonce, "start": start, "host": socket.gethostname(), "pid": os.getpid()}
        self._store.write(_OWNER, json.dumps(owner).encode())
        self._store.write(_FINGERPRINT, (run / _FINGERPRINT).read_bytes())
        return [item for item in list_checkpoints(self._store) if item.complete]

    def lost(self, store: Store) -> RunLockedError | None:
        """Why nothing of this start may be written any more: another one has begun, perhaps on another machine."""
        owner = self._owner(store)
        return None if owner.get("nonce") == self._nonce else self._replaced(owner)

    def _replaced(self, owner: Mapping[str, Any]) -> RunLockedError:
        who = f"start {owner['start']} on {owner.get('host')}, process {owner.get('pid')}" if "start" in owner else None
        return RunLockedError(
            "this start was replaced: another one of this run writes to the store now",
            where=self._url,
            why=who or f"{_OWNER} there is gone or damaged",
            fix="nothing, if it took the place of this one: this one ends here, and uploads nothing more; otherwise "
            "give each run a name or a URL of its own",
        )

    def _owner(self, store: Store) -> dict[str, Any]:
        """What the start that claimed the run last says of itself; nothing where that cannot be read."""
        content = store.read(_OWNER)
        try:
            owner = json.loads(content) if content is not None else {}
        except ValueError:
            owner = {}
        return owner if isinstance(owner, dict) else {}


def save_records(run: Path, store: Store) -> None:
    """Writes what a start elsewhere wants besides the checkpoint: the metrics so far, the history, the job."""
    for name in _RECORDS:
        if (run / name).is_file():
            store.write(name, (run / name).read_bytes())
