"""Starts processes without their imports: a server imports once, while it has a single thread, and forks on request.

A forked process is as good as a fresh one, but for what an interpreter reads when it starts, which it shares with the
others of its server: the hash seed, and the variables in `AT_START`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead_launch.forked_child import Request, become
from fairlead_launch.preloading import preload

AT_START = (
    *("PYTHON", "LD_", "LANG", "LC_", "MKL_", "KMP_", "GOMP_", "MPL", "HF_"),
    *("PYTORCH_", "TORCH_LOGS", "TORCH_SHOW_", "TORCH_CPP_", "TORCH_COMPILE", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
"""Prefixes of variables that Python or a library reads when it starts or is imported."""

_PRELOADED = ("numpy", "torch", "torchmetrics", "lightning", "matplotlib", "tensorboard", "transformers", "yaml")
"""Libraries that the server imports if its caller has: each takes longer than a fork."""
CAN_FORK = sys.platform == "linux"
"""Elsewhere a fork of what has imported much does not work, and there is no /proc to look at."""
SERVER_FD = "FAIRLEAD_FORKSERVER_FD"
"""In a process that was lent a server: its connection (`ForkServer.lend`)."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_HEADER = struct.Struct("!q")
_PADDING = "FAIRLEAD_FORKSERVER_PADDING"
_PADDING_BYTES = 100_000  # for the environments of forked processes; one variable may have 128 KiB
_START_S = 300.0  # seconds to start an interpreter and import torch, on a machine that is busy


class ForkedProcess:
    """A forked process, with what `subprocess.Popen` has."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)  # of no other process: only the server waits for it, on request

    def fileno(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit code (negative: the signal; 1 where the server is gone, too), or None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            try:
                self.returncode = self._server.code(self.pid)
            except RuntimeError:  # only the server could have known
                self.returncode = 1
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code at the end, for which it waits; a `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self.returncode is None:
            select.select([self._pidfd], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """Sends SIGKILL to it and to what it has started, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._pidfd)


class ForkServer:
    """A process that imports and forks; what cannot be imported is left to the forked processes.

    It ends with its caller; what it has forked does not, unless it notices by itself.

    Args:
        imports: Libraries, by the names of modules.
        modules: Modules of the user's, which may do at import what no fork survives: see `obstacles`.
        path: Where both are looked for; None: `sys.path`.
        environ: All variables of the server; None: those of this process.
        title: Words that `ps` shows for it and what it forks.
        connection: A server that runs already, by what `lend` returned; the other arguments are then ignored.
    """

    def __init__(
        self,
        imports: Sequence[str] = (),
        modules: Sequence[str] = (),
        *,
        path: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        title: Sequence[str] = (),
        connection: socket.socket | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._obstacles: list[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        variables = dict(os.environ if environ is None else environ)
        self._connection = self._start(variables, title) if connection is None else connection
        self._connection.settimeout(_START_S)
        search_path = list(sys.path if path is None else path)
        _send(self._connection, _Preload(list(imports), list(modules), search_path, variables))

    def _start(self, environ: Mapping[str, str], title: Sequence[str]) -> socket.socket:
        connection, server_end = socket.socketpair()
        variables = {**environ, _PADDING: " " * _PADDING_BYTES}
        code = f"from fairlead_launch.forkserver import main; main({server_end.fileno()})"
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *title],
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[server_end.fileno()],
                process_group=0,  # Ctrl-C is for the caller
            )
        return connection

    def obstacles(self, timeout_s: float = _START_S) -> list[str] | None:
        """Why what it has imported cannot be forked, a line each; None when it has not imported all in this time.

        A RuntimeError says that the server has ended.
        """
        with self._lock:
            if self._obstacles is None:
                ended = self._connection.fileno() < 0  # by `close`
                if ended or select.select([self._connection], [], [], timeout_s)[0]:
                    self._obstacles = self._answer()
            return self._obstacles

    def lend(self) -> socket.socket:
        """A connection to another server, forked from this one, which ends when the connection is closed."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._ask(_Another(), [theirs.fileno()])
        return ours

    def start(
        self,
        function: Callable[..., object],
        *args: object,
        environ: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        path: Sequence[str] | None = None,
        fds: Mapping[int, int] | None = None,
    ) -> ForkedProcess:
        """Forks a process that calls `function(*args)`, all of which are pickled, and exits.

        `environ` is all of its variables; `fds` are the caller's open files by their numbers there: without 0, standard
        input is empty. Without `path` it has a fresh interpreter's. A RuntimeError says that the server has ended.
        """
        given = {1: 1, 2: 2, **(fds or {})}
        request = Request(
            pickle.dumps((function, args)),
            dict(os.environ if environ is None else environ),
            os.fspath(cwd) if cwd is not None else os.getcwd(),
            None if path is None else list(path),
            list(given),
        )
        return ForkedProcess(self, int(self._ask(request, list(given.values()))))

    def code(self, pid: int) -> int:
        """The exit code of a forked process that has ended; call it once."""
        return int(self._ask(pid))

    def alive(self) -> bool:
        """Whether it can still fork."""
        if self._connection.fileno() < 0:
            return False
        try:
            answers = select.select([self._connection], [], [], 0)[0]
            return not answers or bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def close(self) -> None:
        """Ends the server, whatever it is doing."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: object, fds: Sequence[int] = ()) -> Any:
        self.obstacles()
        with self._lock:
            with contextlib.suppress(OSError):  # there is no answer then
                _send(self._connection, what, fds)
            return self._answer()

    def _answer(self) -> Any:
        try:
            answer, _ = _receive(self._connection)
        except OSError:
            answer = None
        if answer is None:
            raise RuntimeError("the fork server has ended; its own error is above")
        return answer


@dataclass
class _Preload:
    """What a server is to import first."""

    imports: list[str]
    modules: list[str]
    path: list[str]
    environ: dict[str, str]


@dataclass
class _Another:
    """Asks for a server on the connection that comes with it."""

    received: list[int] = field(default_factory=list)


_servers: dict[tuple[int, tuple[str, ...], frozenset[tuple[str, str]]], ForkServer] = {}
"""Those that this process has started."""


def start_variables(environ: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The variables that a process must have had when it started."""
    late = {"MKL_NUM_THREADS", "PYTHONFAULTHANDLER"}  # a forked process sees to them
    return frozenset((name, value) for name, value in environ.items() if name.startswith(AT_START) and name not in late)


def shared(environ: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> ForkServer:
    """This process's server for those of these variables that are in `AT_START`; it is started when it is first needed.

    Without `imports` it has what this process has imported of torch, other large libraries and Fairlead.
    """
    environ = os.environ if environ is None else environ
    # A fork of this process does not share its connection.
    key = (os.getpid(), tuple(imports), start_variables(environ))
    server = _servers.get(key)
    if server is None or not server.alive():
        tops = {name: name.partition(".")[0] for name in list(sys.modules)}
        ours = [name for name, top in tops.items() if top in _PRELOADED or top.startswith("fairlead")]
        rest = {name: value for name, value in os.environ.items() if not name.startswith(AT_START)}
        variables = {**rest, **dict(key[2])}
        variables.pop("OMP_NUM_THREADS", None)  # a forked process sets its own number, or torch's default
        server = _servers[key] = ForkServer(imports or ours, environ=variables)
        atexit.register(server.close)
    return server


def thaw_for_nanobind() -> None:
    """To be called at exit where `gc.freeze` was: what stays frozen is never freed, and nanobind reports it as leaked.

    Triton's bindings are made with it from torch 2.15 on; each process would print thirty lines. Elsewhere everything
    stays frozen, for to free it takes a process of torch a third of a second.
    """
    builder = getattr(getattr(sys.modules.get("triton._C.libtriton"), "ir", None), "builder", None)
    if type(builder).__module__ == "nanobind":
        gc.unfreeze()


def main(fd: int) -> None:
    """The life of a server, and of what it forks; that ends as an interpreter does, by leaving this."""
    connection, pristine = socket.socket(fileno=fd), sys.path[:]
    gc.disable()  # what it imports stays; collecting it repeatedly takes a sixth of the time
    atexit.register(thaw_for_nanobind)
    os.setpgid(0, 0)  # Ctrl-C is for the caller, with whom this ends
    while True:
        what, _ = _receive(connection)
        if what is None:
            return
        sys.path[:] = what.path
        os.environ.clear()
        os.environ.update(what.environ)
        obstacles = preload(what.imports, what.modules)
        sys.path[:] = pristine
        gc.freeze()  # nothing of this is garbage, and looking at it would copy it
        try:
            _send(connection, obstacles)
        except BrokenPipeError:  # the caller has not waited for it
            return
        # A scheduler signals all processes of a job: without this one the exit codes of its children would be lost.
        # It ends with its caller; forked processes unblock the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        request = _serve(connection)
        connection.close()
        if isinstance(request, Request):
            become(request)
            gc.enable()
            function, args = pickle.loads(request.call)
            function(*args)
        if not isinstance(request, _Another):
            return
        connection = socket.socket(fileno=request.received[0])


def _serve(connection: socket.socket) -> Request | _Another | None:
    """Answers until the caller is gone (None), or until this is a child: then, what it is to be."""
    servers: list[int] = []
    while True:
        what, fds = _receive(connection)
        if what is None:
            return None
        if isinstance(what, int):
            _send(connection, os.waitstatus_to_exitcode(os.waitpid(what, 0)[1]))
            continue
        servers = [pid for pid in servers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        pid = os.fork()
        if pid == 0:
            what.received = fds
            return what if isinstance(what, (Request, _Another)) else None
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the child does it too: whoever is first
        if isinstance(what, _Another):
            servers.append(pid)
        _send(connection, pid)


def _send(connection: socket.socket, what: object, fds: Sequence[int] = ()) -> None:
    data = pickle.dumps(what)
    socket.send_fds(connection, [_HEADER.pack(len(data))], fds)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """What was sent, and the files that came with it; None when the other side is gone."""
    header, fds, _, _ = socket.recv_fds(connection, _HEADER.size, 250)
    if not header:
        return None, []
    (left,) = _HEADER.unpack(header)
    parts = []
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            return None, fds
        parts.append(part)
        left -= len(part)
    return pickle.loads(b"".join(parts)), fds
