"""What a fork server imports, and why a process that has imported it must not be forked.

A thread is not in the copy, though the locks that it holds are; a driver's context does not work in it; and a module
that asks for its rank when it is imported would get the same answer in every rank.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

RANK_VARIABLES: Final = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "NNODES"}
    | {"MASTER_ADDR", "MASTER_PORT"}
)
"""The variables that only a rank has."""
_DRIVERS: Final = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}
"""The device files that a process opens when it makes a context on a GPU; asking how many there are opens others."""


def preload(libraries: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Imports in this process, and says what forbids to fork it, a line each; none: it can be forked.

    What cannot be imported is left to the ranks, which say why. The user's `modules` come behind the libraries; the
    first one with an obstacle is the last that is imported.
    """
    # Lightning asks for GPUs when it is imported, and the driver would be started for the answer.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it would start its threads at once; a rank has its own number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in libraries:
            with contextlib.suppress(ImportError, OSError):  # whoever needs it will hear of it
                importlib.import_module(name)
    found = _obstacles("the libraries")
    for name in modules:
        if found:
            break
        with _watched() as wanted:
            imported = _import(name)
        found = _obstacles(name)
        if wanted:
            found.append(f"{name} reads {', '.join(sorted(wanted))} when it is imported")
        if not imported:
            break
    return found


def _import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except BaseException:  # whatever it is, `SystemExit` too: a rank imports it too, and reports the error
        return False
    return True


def _obstacles(what: str) -> list[str]:
    """What forking this process would break."""
    found = []
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        found.append(f"importing {what} starts {threads - 1} thread{'s'[: threads != 2]}")
    if _has_children():
        found.append(f"importing {what} starts a process")
    opened = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found += [f"importing {what} starts {driver}" for device, driver in _DRIVERS.items() if device in opened]
    return found


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")  # the listing's own is closed by now


@contextlib.contextmanager
def _watched() -> Iterator[set[str]]:
    """Notes which of the rank's variables are read."""
    wanted: set[str] = set()

    class Watched(type(os.environ)):  # type: ignore[misc]
        """The environment, which notes what is looked for."""

        def __getitem__(self, name: str) -> str:
            if name in RANK_VARIABLES:
                wanted.add(name)
            return super().__getitem__(name)  # type: ignore[no-any-return]

    earlier: Any = os.environ
    codec: tuple[Callable[[Any], Any], ...] = (
        earlier.encodekey,
        earlier.decodekey,
        earlier.encodevalue,
        earlier.decodevalue,
    )
    os.environ = Watched(earlier._data, *codec)  # noqa: B003 - it has the same variables
    try:
        yield wanted
    finally:
        os.environ = earlier  # noqa: B003


def head_imports(path: Path) -> list[str]:
    """The modules that a script imports before it does anything else, in their order.

    What comes behind the first other statement may depend on it, as on `os.environ[...] = ...`. A script that cannot be
    read or parsed has none: Python says why when it runs.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        ...     _ = file.write("import os, torch\\nfrom torch import nn\\nos.nice(1)\\nimport mine\\n")
        ...     file.flush()
        ...     head_imports(Path(file.name))
        ['os', 'torch']
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for index, statement in enumerate(body):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module is not None:
            names.append(statement.module)
        elif index > 0 or not isinstance(statement, ast.Expr):  # the first one may be a docstring
            break
    return [name for name in dict.fromkeys(names) if name != "__future__"]


def module_file(name: str, folder: str) -> Path | None:
    """The file that `python -m NAME` runs, found without importing it: below `folder`, or among what is installed."""
    parts = name.split(".")
    for candidate in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__main__.py")):
        if candidate.is_file():
            return candidate
    if len(parts) > 1:
        return None  # finding it would import its package
    spec = importlib.util.find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.has_location else None
