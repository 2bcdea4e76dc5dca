"""Where every thread of this process stands, and what torch's flight recorder knows of its collectives, as files.

A rank leaves them after an alarm.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from fairlead_distributed.alarms import Alarm, trouble_of
from fairlead_runs.states import REQUESTED, dump_folder, stacks_request

_STACK_SIGNAL: Final = signal.SIGQUIT
"""`kill -QUIT <pid>` shows a rank's stacks: what Java and Go do, and no scheduler's signal for a stop."""

_RECORDERS: Final = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
"""NCCL's collectives have a recorder of their own; the other one is for all other backends."""


def dump_stacks(path: Path, why: str = "") -> None:
    """Appends the Python frames of all threads of this process to a file, whose folder is made when missing.

    It works from any thread while the main one is blocked in C code that has released the interpreter's lock; for the
    case that it has not, see `show_stacks_on_signal`. `why` becomes a part of the first line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    names = [f"  0x{thread.ident or 0:016x} {thread.name}" for thread in threading.enumerate()]
    head = [f"== {now}  {os.uname().nodename}  process {os.getpid()}", why, "threads:", *names, ""]
    with open(path, "a", encoding="utf-8", errors="replace") as file:
        file.write("\n".join(head) + "\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write("\n")


class StacksOnRequest:
    """Dumps the stacks of a rank that stands still, when `fairlead doctor --run` has requested it since the last time.

    A rank whose steps advance does not even look for a request.
    """

    def __init__(self, run: Path, start: int, rank: int) -> None:
        self._request = stacks_request(run)
        self._path = dump_folder(run, "stacks", start) / f"rank-{rank:05d}.txt"
        self._answered = 0.0

    def __call__(self) -> None:
        """Is called from a thread that does not train."""
        with suppress(OSError):  # no request; or a disk that the doctor sees does not answer
            requested = self._request.stat().st_mtime
            if requested > self._answered:
                self._answered = requested
                dump_stacks(self._path, REQUESTED)


def dump_flight_recorder(folder: Path, rank: int, *, frames: bool = True) -> list[Path]:
    """Writes what torch has recorded of this process's last collectives, for `torchfrtrace <folder>/gloo`.

    torch 2.13 records the last 2000, for gloo as for NCCL; TORCH_FR_BUFFER_SIZE sets another number, 0 for none.

    Args:
        folder: Gets a folder for each recorder that has something, `gloo` or `nccl`, with the file `rank_<rank>`.
        rank: The global rank.
        frames: With the lines of code that called the collectives; finding them takes seconds the first time.

    Returns:
        The files; empty when nothing was recorded.
    """
    written = []
    for name, function in _RECORDERS.items():
        dump = getattr(torch._C._distributed_c10d, function, None)  # a CPU build has no NCCL
        recorded = pickle.loads(dump(includeStackTraces=frames)) if dump is not None else {}
        if not recorded.get("entries"):
            continue
        recorded["entries"] = [{"frames": [], **entry} for entry in recorded["entries"]]
        recorded["pg_config"] = {**_groups(), **recorded["pg_config"]}
        path = folder / name / f"rank_{rank}"
        path.parent.mkdir(parents=True, exist_ok=True)
        stage = path.with_name(f".{path.name}")
        stage.write_bytes(pickle.dumps(recorded))
        stage.replace(path)  # this process may be killed at any moment, and what is there is good
        written.append(path)
    return written


def _groups() -> dict[str, dict[str, str]]:
    """The process groups by name. torch 2.13 records those of gloo without one, and `torchfrtrace` fails of it."""
    world = dist.distributed_c10d._world
    return {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in world.pg_names.items()
    }


def flight_recorder_variables(folder: Path) -> dict[str, str]:
    """Variables that let NCCL's own dump, when its watchdog sees a time-out, go to the same folder, and torch record.

    They are to be set before the process group is made. That torch dumps then is its default
    (TORCH_NCCL_DUMP_ON_TIMEOUT); that it records is the default of newer ones, for gloo.

    Example:
        >>> flight_recorder_variables(Path("/run/flight-recorder/start-1"))["TORCH_FR_DUMP_TEMP_FILE"]
        '/run/flight-recorder/start-1/nccl/rank_'
    """
    prefix = str(folder / "nccl" / "rank_")
    files = {"TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix}
    return {**files, "TORCH_FR_BUFFER_SIZE": "2000"}


def show_stacks_on_signal() -> bool:
    """From now on SIGQUIT makes this process show the stacks of all threads on stderr, and continue.

    That works also while C code holds the interpreter's lock. Returns whether it is installed: a handler that
    the user has installed stays.
    """
    if signal.getsignal(_STACK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return False
    faulthandler.register(_STACK_SIGNAL, file=2, all_threads=True, chain=False)
    return True


_PATIENCE_S = 8.0  # the run may hang in a file system


class StackDump:
    """The dump of one rank into its file; `say` gets why there is none."""

    def __init__(self, path: Path, rank: int, flight_recorder: Path | None, say: Callable[[str], None]) -> None:
        self._path = path
        self._rank = rank
        self._flight_recorder = flight_recorder
        self._say = say
        self._writing = threading.Lock()
        self._written = False

    def write(self, alarm: Alarm) -> None:
        """Writes it: once after a failure, and each time that nothing moves."""
        if (trouble := trouble_of(_PATIENCE_S, self._write, alarm)) is not None:
            self._say(f"the stacks of rank {self._rank} are not in {self._path}: {trouble}")

    def _write(self, alarm: Alarm) -> None:
        with self._writing:
            if self._written:  # what a rank raises of another's absence has nothing to add
                return
            self._written = alarm.kind != "hang"
            dump_stacks(self._path, f"{alarm}\n{alarm.text}" if alarm.rank == self._rank else str(alarm))
            if self._flight_recorder is not None:
                dump_flight_recorder(self._flight_recorder, self._rank, frames=False)

    def detail(self, alarm: Alarm) -> None:
        """Once the others need not wait for this rank any more: torch takes seconds to find the lines of code."""
        if alarm.of_waiting and self._flight_recorder is not None:  # where it fails, what was dumped before is there
            trouble_of(_PATIENCE_S, dump_flight_recorder, self._flight_recorder, self._rank)
