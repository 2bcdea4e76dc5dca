"""What makes a forked process as good as a fresh one: variables, files, signals, random numbers, `__main__`."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

_RANKS = {
    "lightning.fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"),
    "torchmetrics.utilities.prints": ("LOCAL_RANK",),
}
"""Where a library keeps the rank that it found in the environment when it was imported; others than 0 are silent."""


@dataclass
class Request:
    """What a forked process is to be."""

    call: bytes
    environ: dict[str, str]
    cwd: str
    path: list[str] | None
    fds: list[int]
    received: list[int] = field(default_factory=list)


def become(request: Request) -> None:
    """Makes this child what a fresh process would be."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    _show(request.environ)
    if request.path is not None:
        sys.path[:] = request.path
    # Out of the way first: one may have come with the number that another is to get.
    above = max(request.fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in request.received]
    for fd in request.received:
        os.close(fd)
    for fd, number in zip(moved, request.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    if request.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    time.tzset()
    tempfile.tempdir = None
    _repeat_at_import(request.environ)


def _repeat_at_import(environ: Mapping[str, str]) -> None:
    """Repeats what libraries do on import that depends on the process."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    for name, variables in _RANKS.items():
        if name in sys.modules:
            rank = next((environ[variable] for variable in variables if variable in environ), "0")
            sys.modules[name].rank_zero_only.rank = int(rank)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # a fresh one has another seed too
    if environ.get("OMP_NUM_THREADS", "").isdecimal():
        threads = int(environ["OMP_NUM_THREADS"])
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        if "numpy" in sys.modules and threads > 1:
            _set_blas_threads(int(environ.get("OPENBLAS_NUM_THREADS", threads)))


def _set_blas_threads(threads: int) -> None:
    """OpenBLAS, numpy's own, reads its number when it is loaded, and a server has it start no threads."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in libraries:
        library = ctypes.CDLL(path)
        for prefix in ("", "scipy_"):
            for suffix in ("", "64_"):
                function = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if function is not None:
                    function(ctypes.c_int(threads))


def _show(environ: Mapping[str, str]) -> None:
    """Has `/proc/PID/environ` show these variables: the kernel reads them where the server got its own."""
    with open("/proc/self/stat", "rb") as stat:
        start, end = (int(word) for word in stat.read().rpartition(b")")[2].split()[47:49])
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    if len(block) > end - start:
        raise OSError(7, f"the environment has {len(block)} bytes, and there is room for {end - start}")
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def run_python(*words: str) -> None:
    """Does in a forked process what `python SCRIPT WORDS` does."""
    sys.orig_argv = [sys.executable, *words]
    main = ModuleType("__main__")
    main.__file__ = words[0]
    sys.modules["__main__"] = main
    sys.argv = list(words)
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    with open(words[0], "rb") as script:
        code = compile(script.read(), words[0], "exec")
    exec(code, main.__dict__)
