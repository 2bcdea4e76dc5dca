"""Runs a scheduler's commands: without a shell, with a deadline, killed with all that they started when it is over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_SHOWN: Final = 500  # characters of a program's output that a message shows
_MOST: Final = 1 << 20  # bytes of it that are read
_PAUSE: Final = 0.1  # seconds before a program that a signal has ended is retried


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a command ended: its exit code (None: killed after its time), output and standard error."""

    code: int | None
    output: str
    complaint: str = ""

    @property
    def message(self) -> str:
        """Both, cut to what a person reads."""
        return f"{self.output}\n{self.complaint}".strip()[:_SHOWN]


def ask(argv: Sequence[str], deadline: float, environ: Mapping[str, str]) -> tuple[str, str]:
    """Asks a program one question, until a deadline on the monotonic clock: its output, and why there is none."""
    program = find(argv[0], environ)
    if program is None:
        return "", f"{argv[0]} is not on the PATH"
    while True:
        timeout_s = max(0.1, deadline - time.monotonic())
        done = attempt([program, *argv[1:]], timeout_s, environ)
        # What ends all processes of the job, as the signal of a stop, ends this one, too.
        if done.code is None or done.code >= 0 or time.monotonic() + _PAUSE > deadline:
            break
        time.sleep(_PAUSE)
    if done.code is None:
        return "", f"{argv[0]} did not answer within {timeout_s:.1f} s"
    if done.code != 0:
        return "", f"{argv[0]} ended with exit code {done.code}: {done.message}"
    return done.output, ""


def find(name: str, environ: Mapping[str, str]) -> str | None:
    """The path of a program on the PATH of the job, or None."""
    return shutil.which(name, path=environ.get("PATH", os.defpath))


def attempt(
    argv: Sequence[str], timeout_s: float, environ: Mapping[str, str], *, complaint_bytes: int = _SHOWN
) -> Attempt:
    """Runs a program once, without a shell, and kills it with all that it started when its time is over."""
    # Files, not pipes: a grandchild that survives the kill would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=complaint,
                env=dict(environ),
                start_new_session=True,  # signals to our group must not end it half-way; it is killed with its children
            )
        except OSError as error:
            return Attempt(127, "", f"{argv[0]}: {error.strerror}")
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        complaint.seek(0)
        texts = (
            file.read(size).decode(errors="replace").strip()
            for file, size in ((output, _MOST), (complaint, complaint_bytes))
        )
        return Attempt(code, *texts)
