"""Asks a scheduler's command one question, with a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlead_hpc_signals.commands import attempt, find_command

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
    done = attempt([program, *argv[1:]], timeout_s, environ)
    if done.code is None:
        return Output("", f"{argv[0]} did not answer within {timeout_s:.1f} s")
    if done.code != 0:
        return Output("", f"{argv[0]} ended with exit code {done.code}: {done.said}")
    return Output(done.output)
