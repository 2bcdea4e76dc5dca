"""Switch files: `SAVE` and `STOP` in a run directory ask for a checkpoint, or for a stop with one.

For those who may write into the directory but not signal the job: other users of the group, and people in containers.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SAVE: Final = "SAVE"
"""Requests a checkpoint; the training continues."""
STOP: Final = "STOP"
"""Requests a stop with a checkpoint, after which the job is not restarted."""


@dataclass(frozen=True)
class Switch:
    """A switch file that somebody has made.

    Attributes:
        path: The file.
        by: Its owner, who requested it, or a number where the user has no name here.
        time: When it was made, in seconds since the epoch, by the file system's clock.
        identity: Tells this file from the next of its name.
    """

    path: Path
    by: str
    time: float
    identity: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.by} requested it by the file {self.path.name}"


def find_switch(run: Path, name: str) -> Switch | None:
    """The switch file of a run, if it is there; `OSError` where the directory cannot be read."""
    path = run / name
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return Switch(path, _user(found.st_uid), found.st_mtime, (found.st_ino, found.st_mtime_ns))


def take_switch(switch: Switch) -> str | None:
    """Removes the file, so that it asks once; why it could not be, or None."""
    try:
        switch.path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # of another machine or container
        return f"user {number}"
