"""`history.jsonl`: what happened to a run, one event a line, in order; it survives crashes in mid-line."""

from __future__ import annotations

import datetime
import json
import os
import socket
from pathlib import Path
from typing import Any

from fairlead.errors import RunDirectoryError
from fairlead_runs.commit import Fence, Syscalls
from fairlead_runs.commit.files import disk_error, write_all
from fairlead_runs.describe import plain
from fairlead_runs.redaction import redact


class History:
    """Appends events to `history.jsonl`; one process (rank 0) writes, anyone may read at any time.

    Each names its `start`, where there is one.  With the `fence` of the run's lock, nothing is written once another
    start owns the run.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        start: int = 0,
        fence: Fence | None = None,
        syscalls: Syscalls | None = None,
    ) -> None:
        self.path = path
        self.start = start
        self._rank = rank
        self._fence = fence
        self._system = syscalls or Syscalls()

    def append(self, event: str, /, *, durable: bool = True, **fields: Any) -> None:
        """Writes one event, as `start`, `stop`, `requeue`, with its time (UTC), rank, host and pid.

        Texts of secret names in `fields` are redacted.  Not `durable` is what is frequent and unimportant.
        """
        body = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "event": event,
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **({"start": self.start} if self.start else {}),
            **plain(redact(fields), lambda value, _: str(value)),
        }
        line = json.dumps(body, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"
        try:
            if self._fence is not None:
                self._fence.check()
            self._write(line, durable)
        except OSError as error:
            raise disk_error(error, "cannot write the run's history", self.path, RunDirectoryError) from error

    def read(self) -> list[dict[str, Any]]:
        """All events so far, oldest first."""
        return read_history(self.path)

    def _write(self, line: bytes, durable: bool) -> None:
        new = not self.path.exists()
        fd = self._system.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line  # an earlier writer died in mid-line: its rest must not swallow this event
            write_all(self._system, fd, line)
            if durable:
                self._system.fsync(fd)
        finally:
            self._system.close(fd)
        if new and durable:
            self._system.fsync_dir(self.path.parent)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The events in a history file, oldest first; torn lines are left out, a missing file has none.

    Left out is also what a start has written behind a later one: it was replaced, and did not know it yet.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, "cannot read the run's history", path, RunDirectoryError) from error
    events, newest = [], 0
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # written by a process that died in it
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            continue
        start = event.get("start")
        if isinstance(start, int):
            if start < newest:
                continue
            newest = start
        events.append(event)
    return events
