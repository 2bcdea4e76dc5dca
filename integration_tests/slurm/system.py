"""Small things that the parts of the test cluster share: processes, ports, waiting."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "MissingProgramError",
    "alive",
    "become_reaper",
    "descendants",
    "die_with_parent",
    "find",
    "free_ports",
    "run",
    "started_at",
    "succeeds",
    "wait_until",
]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"


class MissingProgramError(Exception):
    """A program of the cluster is not installed."""


def find(program: str) -> str:
    """The path of a program, also where a user's PATH has no sbin.

    Raises:
        MissingProgramError: It is not installed.
    """
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}")
    if path is None:
        raise MissingProgramError(
            f"{program} is not installed: apt-get install slurmctld slurmd slurm-client munge iproute2"
        )
    return path


def run(*command: str, check: bool = True) -> str:
    """What a short command prints, on both streams."""
    done = subprocess.run(
        command, check=check, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    return done.stdout


def succeeds(*command: str) -> bool:
    """Whether a command ends with 0."""
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def die_with_parent() -> None:
    """Called in a new process: the kernel kills it when its parent ends, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_reaper() -> None:
    """Orphans below this process become its children; in a container, PID 1 often does not reap."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie counts as gone."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def started_at(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: tells it from a later one with the same PID."""
    try:
        return _stat(pid)[19]
    except OSError:
        return None


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def free_ports(count: int) -> list[int]:
    """TCP ports that are free now, below the range from which the kernel gives ports to clients."""
    found: list[int] = []
    port = 20_000 + int.from_bytes(os.urandom(2), "big") % 10_000
    while len(found) < count:
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
                found.append(port)
            except OSError:
                pass
        port += 1
    return found


def wait_until(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Waits.

    Raises:
        TimeoutError: It did not happen in time.
    """
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
