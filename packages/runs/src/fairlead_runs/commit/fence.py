"""The fence around a run: a start that was replaced while it was frozen changes nothing any more.

Taking a lock is not enough: its owner may be suspended, or cut off with its node, for so long that another start takes
the run over, and then continue. So the owner looks at the lock immediately before each change; and as it may be frozen
between that look and the change, too, no change of the checkpoints can come later than a takeover:

- each is one rename, of a stage or temporary file, or into a folder of trash. The next owner takes all of these away
  before it looks at what is there (`discard_incomplete`), so that a rename which comes too late finds nothing;
- each line of the history names its start, whose number rises with each owner: readers do not believe one that stands
  behind a later start. Manifests have the number as well, and order checkpoints by it.
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fairlead.errors import FairleadError, RunFailedError, RunLockedError
from fairlead.interfaces import Job


class Fence:
    """Tells whether a start still owns its run; whoever changes the run calls `check` immediately before.

    Args:
        path: The lock file.
        nonce: That of the owner.

    Attributes:
        lost: Why the start owns the run no longer, once that is known; it does not change back.
    """

    def __init__(self, path: Path, nonce: str) -> None:
        self.path = path
        self.nonce = nonce
        self.lost: FairleadError | None = None

    def check(self) -> None:
        """Returns if the lock file names this owner.

        Raises:
            RunLockedError: Another start has taken the run over, or somebody deleted the file.
            OSError: The file cannot be read.
        """
        if self.lost is None:
            self._read()
        if self.lost is not None:
            raise self.lost

    def why_lost(self) -> FairleadError | None:
        """Why the start owns the run no longer; None as long as it does, and where the file cannot be read.

        For who has failed to write: the next owner has deleted what this start was writing.
        """
        with contextlib.suppress(OSError):
            if self.lost is None:
                self._read()
        return self.lost

    def _read(self) -> None:
        try:
            owner = LockOwner.load(self.path.read_bytes())  # opening has a network file system ask its server
        except (FileNotFoundError, NotADirectoryError):
            self.lost = self._replaced("its lock file is gone: deleted, or the start that took it over has ended")
        else:
            if owner is None or owner.nonce != self.nonce:
                self.lost = self._replaced(f"it is held by {owner or 'another process'}")

    def _replaced(self, why: str) -> RunLockedError:
        error = RunLockedError(
            "this start was replaced: another one has taken the run over while it gave no sign of life",
            where=str(self.path.parent),
            why=why,
            fix="nothing: this start ends here, and has written nothing since; the other one continues from the newest "
            "checkpoint",
        )
        error.exit_code = RunFailedError.exit_code  # 2 says that nothing was started
        return error


@dataclass(frozen=True)
class LockOwner:
    """The holder of a lock, as its file names it.

    Attributes:
        job: The scheduler's id of the job (`slurm:4711`), or None.
        attempt: How often the scheduler has restarted this job; a job never runs twice at a time, so a
            higher attempt of the same job proves the lower one dead.
        since: When the lock was taken, UTC, ISO 8601.
        nonce: Random; tells two owners apart whatever else they share.
        pid_start: The process's start in clock ticks since boot (a pid alone is reused), or None.
        boot: The kernel's boot id and pid namespace: only inside both does a pid mean something; empty: not known.
        cancel: The command line that ends the job, or None.
        start: The number of its start of the run, which rises with each owner; 0: not begun yet.
    """

    host: str
    pid: int
    user: str
    job: str | None
    attempt: int
    since: str
    nonce: str
    pid_start: int | None
    boot: str
    cancel: str | None = None
    start: int = 0

    @classmethod
    def here(cls, job: Job | None = None) -> LockOwner:
        """This process as an owner, in the scheduler's job if there is one."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            pid=pid,
            user=_user(),
            job=job.id if job is not None else None,
            attempt=job.attempt if job is not None else 0,
            since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            nonce=secrets.token_hex(8),
            pid_start=_pid_start(pid),
            boot=_boot(),
            cancel=job.cancel if job is not None else None,
        )

    def dump(self) -> bytes:
        """The text of a lock file."""
        return (json.dumps(asdict(self)) + "\n").encode()

    @classmethod
    def load(cls, data: bytes) -> LockOwner | None:
        """The owner in a lock file's text; None when that is torn."""
        try:
            body = json.loads(data)
            return cls(**{field.name: body[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None

    def is_gone(self, other: LockOwner) -> str | None:
        """Why this owner is certainly dead, as far as the process `other` can know; None when it cannot."""
        if self.job is not None and self.job == other.job and self.attempt < other.attempt:
            return f"job {self.job} was restarted by its scheduler"
        if not self.boot or (self.host, self.boot) != (other.host, other.boot):
            return None
        if not _alive(self.pid):
            return f"process {self.pid} on this host has ended"
        start = _pid_start(self.pid)
        if self.pid_start is not None and start is not None and start != self.pid_start:
            return f"process {self.pid} on this host is another one by now"
        return None

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.user} on {self.host}, process {self.pid}{job}, since {self.since}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return str(os.getuid())


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` after the command, which may hold spaces: state first."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _pid_start(pid: int) -> int | None:
    found = _stat(pid)
    return int(found[19]) if found else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    found = _stat(pid)
    return not (found and found[0] in "ZX")  # a zombie writes nothing any more
