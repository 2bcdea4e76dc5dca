"""One start of a job, as several processes that can be killed: all at once, or one rank.

`Cold` is `fairlead fit` as a user types it; it starts its ranks itself. `Warm` are ranks that were forked
(`integration_tests.forked`) with the variables of `torchrun`, each rank a process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairlead_launch.forkserver import ForkedProcess
from integration_tests.forked import fork
from integration_tests.jobs import FAIRLEAD, MARKER, marked, start

__all__ = ["Attempt", "Cold", "Ended", "Warm"]

LIMIT_S = 240.0  # only against a start that would hang for ever
_PEERS_S = 5.0
"""How long the other ranks may run when one was killed: what an elastic agent or a scheduler would do."""
_LEFT_S = 20.0

_THREADS = {"OMP_NUM_THREADS": "1"}
_DROPPED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Ended:
    """How a start ended: `code` is that of the first rank, `text` what all wrote."""

    code: int
    text: str


class Attempt(ABC):
    """One start."""

    @abstractmethod
    def ranks(self) -> dict[int, int]:
        """The process of each rank that runs."""

    @abstractmethod
    def running(self) -> bool:
        """Whether it has not ended."""

    @abstractmethod
    def processes(self) -> list[int]:
        """All processes that run, the workers of loaders too."""

    @abstractmethod
    def end(self) -> Ended:
        """Waits for the end; nothing may be left then.

        Raises:
            AssertionError: It hangs, or something is left; all is killed then.
        """

    def kill_all(self) -> None:
        """SIGKILL to everything at once, as when a node loses its power."""
        _kill(self.processes())

    def kill_rank(self, rank: int) -> bool:
        """SIGKILL to one rank; False when it is not there (yet, or any more)."""
        pid = self.ranks().get(rank)
        if pid is not None:
            _kill([pid])
        return pid is not None


class Cold(Attempt):
    """`fairlead fit` in a process of its own."""

    def __init__(self, words: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> None:
        self._running = start(*words, cwd=cwd, environ={**_THREADS, **environ}, fresh=True)

    def ranks(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                environ = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
                rank = next((int(v[5:]) for v in environ if v.startswith(b"RANK=")), None)
                # The workers of a loader have the same environment, and are not leaders of their group.
                if rank is not None and os.getpgid(pid) == pid:
                    found[rank] = pid
        if not found and self.running():
            return {0: self._running.process.pid}  # one rank runs in the command itself, as do the imports of several
        return found

    def running(self) -> bool:
        return self._running.process.poll() is None

    def processes(self) -> list[int]:
        return marked(self._running.marker)

    def end(self) -> Ended:
        call = self._running.end()
        return Ended(call.code, call.text)


class Warm(Attempt):
    """One forked process a rank."""

    def __init__(self, words: Sequence[str], ranks: int, cwd: Path, environ: Mapping[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in {*_DROPPED, MARKER}}
        port = _free_port()
        self._codes: dict[int, int] = {}
        self._processes: list[ForkedProcess] = []
        self._out = [cwd / f".rank-{rank}.out" for rank in range(ranks)]
        for rank, out in enumerate(self._out):
            out.unlink(missing_ok=True)
            own = _elastic(rank, ranks, port) if ranks > 1 else {}
            variables = {**kept, **_THREADS, **environ, **own}
            with out.open("a") as file:
                self._processes.append(fork([FAIRLEAD, *words], variables, cwd, file, file))

    def ranks(self) -> dict[int, int]:
        self._look()
        return {rank: one.pid for rank, one in enumerate(self._processes) if rank not in self._codes}

    def running(self) -> bool:
        return bool(self.ranks())

    def processes(self) -> list[int]:
        return [pid for one in self._processes for pid in members(one.pid)]

    def end(self) -> Ended:
        deadline, peers = time.monotonic() + LIMIT_S, None
        try:
            while self.ranks():
                now = time.monotonic()
                assert now < deadline, f"hangs: {self.text()}"
                if peers is None and any(code != 0 for code in self._codes.values()):
                    peers = now + _PEERS_S
                if peers is not None and now > peers:
                    _kill(self.ranks().values())
                time.sleep(0.02)
            deadline = time.monotonic() + _LEFT_S
            while left := self.processes():
                assert time.monotonic() < deadline, f"left behind: {left}"
                time.sleep(0.02)
        finally:
            _kill(self.processes())
        code = next((code for code in self._codes.values() if code != 0), 0)
        return Ended(code, self.text())

    def text(self) -> str:
        """What the ranks wrote."""
        return "".join(path.read_text() for path in self._out if path.exists())

    def _look(self) -> None:
        for rank, one in enumerate(self._processes):
            if rank not in self._codes and (code := one.poll()) is not None:
                self._codes[rank] = code


def members(group: int) -> list[int]:
    """The living processes of a process group; one that has ended and was not waited for is not living."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended while we looked
                state, _parent, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _elastic(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "exact",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
