"""The clock of one machine, against that of the file server."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from fairlead_diagnostics.checking import Bench, Result
from fairlead_diagnostics.checks.disk import existing

SKEW_S: Final = 2.0
"""Seconds by which a clock may differ: times in logs and the ages of files and heartbeats are compared."""


def with_files(bench: Bench) -> Result:
    """The time that a new file gets where runs go, against this machine's."""
    folder = existing(str(bench.requested.folder))
    file = folder / f".tmp-doctor-clock-{socket.gethostname()}-{os.getpid()}"
    before = time.time()
    try:
        file.touch()
        written = file.stat().st_mtime
        file.unlink()
    except OSError as error:
        return Result(None, f"{folder} cannot be written: {error.strerror}")
    after = time.time()
    skew = max(0.0, before - written - 0.01, written - after)  # times of files are rounded down to the kernel's tick
    return Result(True, f"{skew:.1f} s from that of the file system of {folder}", warns=skew > SKEW_S)
