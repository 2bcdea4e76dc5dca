"""The commands that start a job on several nodes by hand."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_TRAINS: Final = ("fit", "validate", "test", "predict")


def commands_by_hand(nodes: int, *, argv: Sequence[str] | None = None, host: str | None = None) -> list[str]:
    """One command for each node, this one being the first, which has MASTER_PORT free."""
    address, command = host or socket.gethostname(), _command(sys.argv if argv is None else argv)
    meeting = f"MASTER_ADDR={address} MASTER_PORT=29500 NNODES={nodes}"
    return [f"{meeting} NODE_RANK={rank} {command}" for rank in range(nodes)]


def _command(argv: Sequence[str]) -> str:
    """What trains: `check` and `explain` only look at the same job."""
    program, *words = argv or [""]
    if program.endswith(".py") and Path(program).name != "__main__.py":
        return shlex.join(["python", program, *words])
    command, *rest = [word for word in words if word != "--debug"] or [""]
    if command in _TRAINS:
        return shlex.join(["fairlead", command, *rest])
    if command not in ("check", "explain"):
        return "fairlead fit JOB"
    used, options = [], iter(rest)
    for word in options:
        if word == "--set":
            used += [word, next(options, "")]
        elif word == "--for":
            next(options, None)
        elif not word.startswith("-") or word.startswith("--set="):
            used.append(word)
    return shlex.join(["fairlead", "fit", *used])
