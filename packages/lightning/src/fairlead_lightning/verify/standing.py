"""Where the ranks stand when nothing progresses: each writes it down, and the process that the user started reads it.

Torch-free.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final

REPORTED_AFTER: Final = 10.0
"""Seconds at one line after which it is reported."""
ENDED_AFTER: Final = 60.0
"""Seconds after which ranks that do not compute either are taken for a deadlock."""
_IDLE: Final = 0.2
"""The share of a core below which a process waits."""
_PREFIX: Final = "standing-"


def write_where_it_stands(folder: Path, rank: int) -> None:
    """A thread that keeps a file while the main thread of this process stays at one line."""
    file = folder / f"{_PREFIX}{rank:05d}.json"

    def watch() -> None:
        main = threading.main_thread().ident
        stack: list[str] = []
        since, computed = time.monotonic(), time.process_time()
        while True:
            time.sleep(1.0)
            frame = sys._current_frames().get(main or 0)
            now = _frames(frame)
            if now != stack:
                stack, since, computed = now, time.monotonic(), time.process_time()
                file.unlink(missing_ok=True)
                continue
            seconds = time.monotonic() - since
            if seconds < REPORTED_AFTER - 2:
                continue
            idle = time.process_time() - computed < _IDLE * seconds
            text = json.dumps({"rank": rank, "seconds": seconds, "idle": idle, "at": _line_of(frame)})
            written = file.with_suffix(".new")
            written.write_text(text)
            written.replace(file)

    threading.Thread(target=watch, name="fairlead-standing", daemon=True).start()


def standing(folder: Path) -> list[dict[str, Any]]:
    """What ranks have written, by rank: those that have been at one line for a while."""
    found = []
    for file in sorted(folder.glob(f"{_PREFIX}*.json")):
        try:
            found.append(json.loads(file.read_text()))
        except FileNotFoundError:  # it has just moved on
            continue
    return found


def _frames(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _line_of(frame: FrameType | None) -> str:
    """`mine.py, line 12, in training_step (barrier)`: the user's innermost line, and the function that it waits in."""
    inner = frame.f_code.co_name if frame is not None else ""
    inner = "in the backward pass" if inner == "_engine_run_backward" else inner
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _NOT_USERS):
            return f"{name}, line {frame.f_lineno}, in {frame.f_code.co_name} ({inner})"
        frame = frame.f_back
    return inner


_NOT_USERS: Final = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    "/src/fairlead",
    "<",
    "multiprocessing",
)
