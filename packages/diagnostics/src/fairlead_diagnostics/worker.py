"""Runs checks in a separate process, so that one that hangs or crashes is a failure and not the end of the screen."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from fairlead_diagnostics.checking import Bench, Check, Requested, Result

_START_S = 120.0
"""On a busy node or a slow file system an interpreter starts and imports a check within this; then its limit begins."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Worker:
    """A process that makes checks one after the other; what one leaves, as a store or a device's context, stays.

    Args:
        requested: What the job needs of the node.
        environ: The variables of the process.

    Example:
        >>> with Worker(Requested(), os.environ) as worker:
        ...     worker.run(Check("name", "fairlead_diagnostics.checks.software:python")).ok
        True
    """

    def __init__(self, requested: Requested, environ: Mapping[str, str]) -> None:
        self._requested, self._environ = requested, environ
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, check: Check, *arguments: Any) -> Result:
        """Makes one check; where it hangs or crashes, that is its result, and the next one gets a new process."""
        if check.torch and importlib.util.find_spec("torch") is None:
            return Result(None, "torch is not installed")
        if check.folder and self._requested.folder is None:
            return Result(None, "no run was named, so that there is no folder to look at")
        parts = 0
        try:
            pipe = self._start()
            pipe.send((check.run, arguments))
            if not pipe.poll(_START_S):
                raise TimeoutError(f"its process did not start within {_START_S:g} s")
            answer = pipe.recv()
            if isinstance(answer, Result):
                return answer  # it cannot be imported
            while pipe.poll(check.limit_s):
                answer = pipe.recv()
                if isinstance(answer, Result):
                    return answer
                parts += 1
        except TimeoutError as error:
            self.close()
            return Result(False, str(error))
        except (EOFError, OSError):
            return Result(False, f"its process {self._ended()}")
        self.close()
        done = f"after {parts} parts of it" if parts else "from its beginning"
        return Result(False, f"nothing happened for {check.limit_s:g} s, {done}: it hangs")

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot be killed
                self._process.wait(5.0)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = multiprocessing.Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__ or subprocess.DEVNULL,  # what libraries print is no part of the report
                    env=dict(self._environ),
                    pass_fds=[theirs.fileno()],
                )
            self._pipe.send((sys.path, self._requested))
        return self._pipe

    def _ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def main(pipe: Connection) -> None:
    """Makes the requested checks, until the other end is gone."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)  # whoever started this process ends it
    path, requested = pipe.recv()
    sys.path[:] = path
    bench = Bench(requested, lambda: pipe.send(None))
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(_made(name, bench, arguments))


def _made(name: str, bench: Bench, arguments: tuple[Any, ...]) -> Result:
    try:
        check = pkgutil.resolve_name(name)
        bench.progress()  # its time begins
        result = check(bench, *arguments)
    except Exception as error:  # whatever a library, a driver or a disk raises: the check has failed
        first = str(error).strip().partition("\n")[0]
        return Result(False, f"{type(error).__name__}: {first}" if first else type(error).__name__)
    if not isinstance(result, Result):
        return Result(False, f"{name} gave a {type(result).__name__}, not a Result")
    return result


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # a process group that lost its peer can hang in the interpreter's own shutdown
