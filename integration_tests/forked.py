"""`fairlead` without its imports: the command, and the ranks that it starts, are forked by a server that has them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from fairlead_distributed.forked_child import run_python
from fairlead_distributed.forkserver import ForkedProcess, own_server, shared, start_variables

__all__ = ["fork"]

_of_tests: dict[str, ModuleType] = {}


def fork(
    command: Sequence[str], environ: Mapping[str, str], cwd: Path, out: IO[str], err: IO[str], *, nested: bool = True
) -> ForkedProcess:
    """Forks a process that is `python COMMAND`.

    Args:
        command: The script and its words.
        environ: All of its variables.
        cwd: Where it runs.
        out: Its standard output.
        err: Its standard error.
        nested: What it starts by `sys.executable` is forked too.
    """
    server = shared(environ, ("integration_tests.preloaded", "integration_tests.forked"))
    fds = {1: out.fileno(), 2: err.fileno()}
    return server.start(_run, *command, environ=environ, cwd=cwd, fds=fds, nested=nested)


def _run(*command: str) -> None:
    """In the forked process: the modules of the tests are not its user's."""
    _Popen.variables = start_variables(os.environ)
    if own_server() is not None:
        vars(subprocess)["Popen"] = _Popen
    _of_tests.update({name: module for name, module in sys.modules.items() if name.startswith("integration_tests")})
    for name in _of_tests:
        del sys.modules[name]
    run_python(*command)


class _Popen(subprocess.Popen[Any]):
    """Forks a Python that is to be the leader of a process group, as ranks are; starts everything else."""

    variables: frozenset[tuple[str, str]] = frozenset()

    def __new__(cls, args: Any, **options: Any) -> Any:
        server = own_server()
        environ = options.get("env")
        known = {"env", "stdin", "stdout", "stderr", "pass_fds", "process_group"}
        if (
            server is None
            or isinstance(args, str)
            or list(args[:3]) != [sys.executable, "-P", "-m"]
            or options.keys() > known
            or options.get("process_group") != 0
            or environ is None
            or start_variables(environ) != cls.variables
        ):
            return super().__new__(cls)
        out, err = options.get("stdout"), options.get("stderr")
        fds = {fd: fd for fd in options.get("pass_fds", ())}
        fds[1] = 1 if out is None else out.fileno()
        fds[2] = fds[1] if err == subprocess.STDOUT else 2 if err is None else err.fileno()
        sys.modules.update(_of_tests)  # where pickle looks for `_run`
        try:
            return server.start(_run, *args[1:], environ=environ, fds=fds)
        finally:
            for name in _of_tests:
                del sys.modules[name]
