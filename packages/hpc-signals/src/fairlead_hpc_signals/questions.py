"""Asks a scheduler's command one question, with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlead_hpc_signals.commands import find_command

__all__ = ["Output", "ask"]


@dataclass(frozen=True, slots=True)
class Output:
    """What a command answered.

    Args:
        text: Its standard output; empty when there is no answer.
        problem: Why there is none; empty when there is one.
    """

    text: str
    problem: str = ""


def ask(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> Output:
    """Runs a command once, without a shell; what goes wrong is part of the answer, as the caller has a default.

    Args:
        argv: The program, found on the PATH of `environ`, and its arguments.
        timeout_s: Seconds after which it is killed.
        environ: The environment of the command.
    """
    program = find_command(argv[0], environ)
    if program is None:
        return Output("", f"{argv[0]} is not on the PATH")
    # Files, not pipes: a grandchild that survives the kill would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environ),
                start_new_session=True,  # signals to our group are not for it; and it is killed whole
            )
        except OSError as error:
            return Output("", f"{argv[0]}: {error.strerror}")
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Output("", f"{argv[0]} did not answer within {timeout_s:.1f} s")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        text, complaint = out.read(1 << 20).decode(errors="replace"), err.read(500).decode(errors="replace").strip()
    if code != 0:
        return Output("", f"{argv[0]} ended with exit code {code}: {complaint or text.strip()[:500]}")
    return Output(text)
