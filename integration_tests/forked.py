"""`fairlead` without its imports: a server that has done them forks the command."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fairlead_launch.forked_child import run_python
from fairlead_launch.forkserver import SERVER_FD, ForkedProcess, shared

__all__ = ["fork"]


def fork(command: Sequence[str], environ: Mapping[str, str], cwd: Path, out: IO[str], err: IO[str]) -> ForkedProcess:
    """Forks a process that is `python COMMAND`; its ranks are forked, too, from a server that it is lent.

    Args:
        command: The script and its words.
        environ: All of its variables.
        cwd: Where it runs.
        out: Its standard output.
        err: Its standard error.
    """
    server = shared(environ, ("integration_tests.preloaded", "integration_tests.forked"))
    with server.lend() as lent:  # for its ranks
        number = 3
        return server.start(
            _run,
            *command,
            environ={**environ, SERVER_FD: str(number)},
            cwd=cwd,
            fds={1: out.fileno(), 2: err.fileno(), number: lent.fileno()},
        )


def _run(*command: str) -> None:
    """In the forked process: the modules of the tests are not its user's."""
    for name in [name for name in sys.modules if name.startswith("integration_tests")]:
        del sys.modules[name]
    run_python(*command)
