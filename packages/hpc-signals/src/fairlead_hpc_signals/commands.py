"""Runs the command of a scheduler: with a deadline, again after a failure, and with an answer when it fails."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fairlead.errors import RunFailedError
from fairlead_hpc_signals.base import CommandSettings

__all__ = ["Attempt", "attempt", "find_command", "run_command"]

_SHOWN = 500
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a command ended.

    Args:
        code: Its exit code; None when it was killed after its time.
        output: What it printed, at most a megabyte.
        complaint: What it printed on its standard error.
    """

    code: int | None
    output: str
    complaint: str = ""

    @property
    def said(self) -> str:
        """Both, cut to what a person reads."""
        return f"{self.output}\n{self.complaint}".strip()[:_SHOWN]


def find_command(name: str, environ: Mapping[str, str]) -> str | None:
    """The path of a program on the PATH of the job, or None."""
    return shutil.which(name, path=environ.get("PATH", os.defpath))


def run_command(
    argv: Sequence[str],
    settings: CommandSettings,
    environ: Mapping[str, str],
    *,
    missing: str,
    refusals: Mapping[str, str] | None = None,
    done_before: Sequence[str] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Runs a command until it succeeds, without a shell.

    Args:
        argv: The program and its arguments.
        settings: Deadline and retries.
        environ: The environment of the command; its PATH finds the program.
        missing: What to do when the program is not there.
        refusals: Words in its output after which trying again is of no use, each with what to do.
        done_before: Words of a refusal that says that it is done: an attempt before may have been ended with the job.
        sleep: For tests.

    Returns:
        What was run, and its first line of output, for the history.

    Raises:
        RunFailedError: It is not there, or no attempt succeeded.
    """
    shown = shlex.join(argv)
    program = find_command(argv[0], environ)
    if program is None:
        raise RunFailedError(
            f"the job is not requeued: {argv[0]} was not found",
            where=shown,
            why=f"PATH is {environ.get('PATH', os.defpath)}",
            fix=missing,
        )
    attempts: list[Attempt] = []
    for number in range(1 + settings.retries):
        if number:
            sleep(settings.retry_wait_s)
        done = attempt([program, *argv[1:]], settings.timeout_s, environ)
        attempts.append(done)
        if done.code == 0:
            head = done.said.splitlines()[0] if done.said else ""
            return f"{shown}: {head}" if head else shown
        if any(words in done.said for words in done_before):
            return f"{shown}: {done.said.splitlines()[0]}"
        fix = next((fix for words, fix in (refusals or {}).items() if words in done.said), None)
        if fix is not None:
            raise RunFailedError("the job is not requeued: it was refused", where=shown, why=done.said, fix=fix)
    raise RunFailedError(
        f"the job is not requeued after {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}",
        where=shown,
        why=_story(attempts, settings.timeout_s),
        fix="start the job again by hand; it goes on from its last checkpoint",
    )


def attempt(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> Attempt:
    """Runs a program once, without a shell, and kills it with all that it started when its time is over.

    Args:
        argv: The path of the program and its arguments.
        timeout_s: Seconds after which it is killed.
        environ: Its environment.
    """
    # Files, not pipes: a grandchild that survives the kill would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=complaint,
                env=dict(environ),
                start_new_session=True,  # signals to our group must not end it half-way; and it is killed whole
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
            file.read(size).decode(errors="replace").strip() for file, size in ((output, _MOST), (complaint, _SHOWN))
        )
        return Attempt(code, *texts)


def _story(attempts: Sequence[Attempt], timeout_s: float) -> str:
    lines = []
    for one in attempts:
        if one.code is None:
            lines.append(f"no answer within {timeout_s:g} s (it may have arrived all the same) {one.said}".strip())
        else:
            lines.append(f"exit code {one.code}: {one.said or 'no output'}")
    return "\n".join(dict.fromkeys(lines))
