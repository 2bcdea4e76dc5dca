"""Starts ranks without their imports: a process that has imported everything, and forks when it is asked to.

What runs in a fork is `fairlead.cli.main`, with the variables of `torchrun` when there are several ranks. It is there
because the imports are most of the time of a short job; `fairlead fit` as a user starts it is tried as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["Forks", "members"]

# One thread: a process with several must not be forked.
_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_IMPORTS = (
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.utils.tensorboard",
    "torchmetrics",
    "lightning.pytorch",
    "fairlead.cli.main",
    "fairlead.checks",
    "fairlead_lightning.commands.local",
    "fairlead_lightning.commands.run",
    "fairlead_hpc_signals.stopping",
    "fairlead_hpc_signals.agreement",
    "fairlead_strategies.ddp_runtime",
    "fairlead_environments.runtime",
)


class Forks:
    """The process that forks; use it as a context."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_QUIET},
            process_group=0,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()  # it ends what still runs, and itself
        self._server.wait(30)
        self._server.stdout.close()

    def start(self, words: Sequence[str], environ: Mapping[str, str], cwd: Path, out: Path) -> int:
        """Forks one process that is `fairlead WORDS`; its id, which is that of its process group too."""
        request = {"words": list(words), "environ": dict(environ), "cwd": str(cwd), "out": str(out)}
        return int(self._ask("start", **request))

    def poll(self, pid: int) -> int | None:
        """Its exit code (negative: the signal), or None while it runs."""
        code = self._ask("poll", pid=pid)
        return None if code is None else int(code)

    def _ask(self, do: str, **fields: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


def members(group: int) -> list[int]:
    """The living processes of a process group; one that has ended and was not waited for is not living."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended while we looked
                state, _parent, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _serve(requests: IO[str]) -> dict[str, Any] | None:
    """Answers until the requests end (None), or until this is a child: then, what it is to run."""
    codes: dict[int, int | None] = {}
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                return request
            codes[pid] = None
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)  # the child does it too: whoever is first
            print(json.dumps(pid), flush=True)
            continue
        pid = request["pid"]
        if codes[pid] is None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(codes[pid]), flush=True)
    for pid, code in codes.items():
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return None


def _become(request: Mapping[str, Any]) -> None:
    """Makes this child what a fresh process would be."""
    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    sys.argv = ["fairlead", *request["words"]]


def _main() -> int:
    import importlib

    for name in _IMPORTS:
        importlib.import_module(name)
    from fairlead.plugins import PluginManager

    PluginManager().records(load=True)
    request = _serve(sys.stdin)
    if request is None:
        return 0
    _become(request)
    from fairlead.cli.main import main

    return main(request["words"])


if __name__ == "__main__":
    sys.exit(_main())
