"""Runs a scheduler's programs: with a deadline, again after a failure, and with an answer when they fail."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import Field

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import RunFailedError
from fairlead.findings import Finding

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

COMMAND_MISSING: Final[Mapping[str, str]] = {
    "requeue-command-missing": "The command that requeues the job is not on the PATH, as in many containers."
}
"""The code of `check_command`."""
NOT_IN_CONTAINER: Final = (
    "set `requeue: script` and let the job script run what it writes: that is outside the container"
)
"""What to do where a scheduler's command is not there."""
_SHOWN: Final = 500  # characters of a program's output that a message shows
_MOST: Final = 1 << 20  # bytes of it that are read


class CommandSettings(RequeueConfigBase):
    """The settings of the requeuers that run a command: how patiently."""

    timeout_s: float = Field(default=30.0, gt=0, strict=False)
    """Seconds after which one attempt is killed. Default 30: a scheduler that is busy answers within that, and a
    preempted job has seldom more than a minute left."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after one that failed or took too long."""
    retry_wait_s: float = Field(default=2.0, ge=0, strict=False)
    """Seconds between two attempts."""


def check_command(name: str, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the command will be found."""
    if _find(name, environ) is None:
        yield Finding(
            # Inside a job it will happen; on a login node the job's environment is not there yet.
            "warning" if resolution.inside_job else "info",
            "requeue-command-missing",
            f"{name} is not on the PATH; the job could not be requeued from here",
            where="trainer.requeue",
            why="containers often lack the scheduler's commands",
            fix="requeue: script, and let the job script run what it writes; or make the command available",
        )


class UnansweredError(RunFailedError):
    """No attempt of a command was answered in its time; the scheduler may answer later."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How a command ended: its exit code (None: killed after its time), output and standard error."""

    code: int | None
    output: str
    complaint: str = ""

    @property
    def said(self) -> str:
        """Both, cut to what a person reads."""
        return f"{self.output}\n{self.complaint}".strip()[:_SHOWN]


def run_command(
    argv: Sequence[str],
    settings: CommandSettings,
    environ: Mapping[str, str],
    *,
    missing: str,
    refusals: Mapping[str, str] | None = None,
    done_before: Sequence[str] = (),
) -> str:
    """Runs a command until it succeeds, without a shell; what was run and its first line of output, for the history.

    `missing` is what to do when the program is not there. `refusals` are words in its output after which trying again
    is of no use, each with what to do; `done_before` words of a refusal that says that it is done: an attempt before
    may have been ended with the job. `RunFailedError`: it is not there, or no attempt succeeded.
    """
    shown = shlex.join(argv)
    program = _find(argv[0], environ)
    if program is None:
        raise RunFailedError(
            f"the job is not requeued: {argv[0]} was not found",
            where=shown,
            why=f"PATH is {environ.get('PATH', os.defpath)}",
            fix=missing,
        )
    attempts: list[_Attempt] = []
    for number in range(1 + settings.retries):
        if number:
            time.sleep(settings.retry_wait_s)
        done = _attempt([program, *argv[1:]], settings.timeout_s, environ)
        attempts.append(done)
        if done.code == 0:
            head = done.said.splitlines()[0] if done.said else ""
            return f"{shown}: {head}" if head else shown
        if any(words in done.said for words in done_before):
            return f"{shown}: {done.said.splitlines()[0]}"
        fix = next((fix for words, fix in (refusals or {}).items() if words in done.said), None)
        if fix is not None:
            raise RunFailedError("the job is not requeued: it was refused", where=shown, why=done.said, fix=fix)
    kind = UnansweredError if all(one.code is None for one in attempts) else RunFailedError
    raise kind(
        f"the job is not requeued after {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}",
        where=shown,
        why=_story(attempts, settings.timeout_s),
        fix="start the job again by hand; it resumes from its last checkpoint",
    )


def ask(argv: Sequence[str], deadline: float, environ: Mapping[str, str]) -> tuple[str, str]:
    """Asks a program one question, until a deadline on the monotonic clock: its output, and why there is none."""
    program = _find(argv[0], environ)
    if program is None:
        return "", f"{argv[0]} is not on the PATH"
    timeout_s = max(0.1, deadline - time.monotonic())
    done = _attempt([program, *argv[1:]], timeout_s, environ)
    if done.code is None:
        return "", f"{argv[0]} did not answer within {timeout_s:.1f} s"
    if done.code != 0:
        return "", f"{argv[0]} ended with exit code {done.code}: {done.said}"
    return done.output, ""


def _find(name: str, environ: Mapping[str, str]) -> str | None:
    """The path of a program on the PATH of the job, or None."""
    return shutil.which(name, path=environ.get("PATH", os.defpath))


def _attempt(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> _Attempt:
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
                start_new_session=True,  # signals to our group must not end it half-way; and it is killed whole
            )
        except OSError as error:
            return _Attempt(127, "", f"{argv[0]}: {error.strerror}")
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
        return _Attempt(code, *texts)


def _story(attempts: Sequence[_Attempt], timeout_s: float) -> str:
    lines = []
    for one in attempts:
        if one.code is None:
            lines.append(f"no answer within {timeout_s:g} s (it may have arrived all the same) {one.said}".strip())
        else:
            lines.append(f"exit code {one.code}: {one.said or 'no output'}")
    return "\n".join(dict.fromkeys(lines))
