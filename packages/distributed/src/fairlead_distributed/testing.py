"""Run a function on N real processes that form a gloo group: for tests of anything that communicates."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

import torch

from fairlead_distributed.collectives import barrier
from fairlead_distributed.errors import RankFailedError
from fairlead_distributed.process_group import destroy_process_group, init_process_group
from fairlead_distributed.store import tcp_store
from fairlead_launch.forkserver import ForkedProcess, shared
from fairlead_launch.ports import bind_listener
from fairlead_runs.waiting import ranks_text

T = TypeVar("T")
_START = 120.0  # seconds to start an interpreter and import torch, on a machine that is busy
_PIPE = 100  # the number of its pipe in a rank: above what is open there
_GRACE = 2.0  # seconds that the other ranks have to end after one failed; they mostly fail at once, by its absence


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60,
    init: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Calls `fn(rank, *args)` in `world_size` new processes and returns what they return, by rank.

    The processes are forked by one that has imported what the caller has imported of torch, other large libraries
    and Fairlead, and share its hash seed. They have the variables of torchrun's workers set, form a gloo group, use one
    thread each, and have the caller's warning filters. When a rank fails, the others are killed; when the caller dies,
    all end by themselves.

    Args:
        fn: A function at the top level of a module or test file. It, its arguments and its results are pickled.
        world_size: The number of processes. The first call takes some seconds to import torch; the others do not.
        args: Passed on after the rank.
        timeout: Seconds for `fn`, from when all ranks have started; the start has its own limit of two minutes.
        init: False leaves `init_process_group` to `fn`; the variables lead it to the caller's store.
        env: Variables to set in the processes.

    Raises:
        RankFailedError: A rank raised (its traceback comes first), was killed by a signal, or was not done in
            time (with the line where it stood).

    Example:
        >>> def add(rank, offset):
        ...     return all_reduce(torch.tensor(rank + offset)).item()
        >>> run_ranks(add, 2, 10)  # doctest: +SKIP
        [21, 21]
    """
    store = tcp_store(bind_listener([0], "127.0.0.1"))
    shared_variables = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank is to host a store
        **(env or {}),
    }
    payload = _Payload.of(fn, args)
    ranks: list[_Rank[T]] = []
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe()
                stack = Path(folder, str(rank))
                environ = {**os.environ, **shared_variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with theirs:
                    process = shared(environ).start(
                        *(_main, rank, payload, str(stack), init, timeout),
                        environ=environ,
                        path=sys.path,
                        fds={_PIPE: theirs.fileno()},
                    )
                ranks.append(_Rank(rank, process, ours, stack))
            return _collect(ranks, timeout)
        finally:
            for one in ranks:
                one.process.kill_group()
                one.pipe.close()


@dataclass
class _Payload:
    """A call in bytes, and where its modules can be loaded from: those of pytest are not importable by name."""

    files: dict[str, str]
    call: bytes
    filters: bytes

    @classmethod
    def of(cls, fn: Callable[..., object], args: tuple[object, ...]) -> _Payload:
        call = pickle.dumps((fn, args))
        names = [name for name in ("__main__", fn.__module__) if name.encode() in call]
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
        return cls({name: file for name, file in files.items() if file}, call, pickle.dumps(warnings.filters))

    def load(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        for name, file in self.files.items():
            if name == "__main__":
                # Under a name with which `if __name__ == "__main__"` does nothing, as multiprocessing does it.
                sys.modules[name] = self._load_file("__mp_main__", file)
            elif name not in sys.modules:
                try:
                    importlib.import_module(name)
                except ImportError:
                    self._load_file(name, file)
        warnings.resetwarnings()  # what was shown or ignored during the imports is forgotten
        warnings.filters[:] = pickle.loads(self.filters)  # type: ignore[index]
        fn, args = pickle.loads(self.call)
        return fn, args

    @staticmethod
    def _load_file(name: str, file: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {name} from {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


@dataclass
class _Rank(Generic[T]):
    rank: int
    process: ForkedProcess
    pipe: Connection
    stack: Path
    result: T | None = None
    failure: str | None = None
    killed: bool = False
    started: bool = False
    done: bool = False

    def look(self) -> None:
        if self.done:
            return
        ended = bool(wait([self.process.fileno()], timeout=0))  # before the look into the pipe: it may end in between
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                ok, value = pickle.loads(self.pipe.recv_bytes())
                if ok is None:
                    self.started = True
                    return
                self.result, self.failure = (value, None) if ok else (None, value)
                self.done = True
                return
        if ended:
            code = self.process.poll() or 0
            name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.failure = f"the process ended with {name} and returned nothing"
            self.killed = self.done = True


def _collect(ranks: list[_Rank[T]], timeout: float) -> list[T]:
    deadline, running = time.monotonic() + _START, False
    order: list[_Rank[T]] = []
    while len(order) < len(ranks) and time.monotonic() < deadline:
        open_ranks = [one for one in ranks if not one.done]
        wait([x for one in open_ranks for x in (one.pipe, one.process.fileno())], deadline - time.monotonic())
        for one in open_ranks:
            one.look()
            if one.done:
                order.append(one)
                if one.failure is not None:
                    deadline, running = min(deadline, time.monotonic() + _GRACE), True
        if not running and all(one.started or one.done for one in ranks):
            deadline, running = time.monotonic() + timeout, True
    failed = [one for one in order if one.failure is not None]
    if failed:
        # A process that was killed sends nothing: what the others then report is its absence.
        first = next((one for one in failed if one.killed), failed[0])
        raise _error(first, [one for one in failed if one is not first], len(ranks))
    stuck = [one for one in ranks if not one.done]
    if stuck:
        raise _stuck(stuck, len(ranks), timeout if running else _START)
    return [one.result for one in ranks]  # type: ignore[misc]  # all have returned; T may include None


def _error(first: _Rank[T], others: list[_Rank[T]], world_size: int) -> RankFailedError:
    failure = first.failure or ""
    then = [f"rank {one.rank} then failed: {_headline(one.failure or '')}" for one in others]
    error = RankFailedError(
        f"rank {first.rank} of {world_size} failed: {_headline(failure)}",
        why="\n".join([failure.rstrip(), *then]),
    )
    error.rank = first.rank
    return error


def _headline(failure: str) -> str:
    """What was raised, of a traceback: not the last of its lines, where an error has indented ones."""
    return next(line for line in reversed(failure.strip().splitlines()) if line[:1].strip())


def _stuck(stuck: list[_Rank[T]], world_size: int, timeout: float) -> RankFailedError:
    for one in stuck:
        with contextlib.suppress(ProcessLookupError):
            # Before Python code of ours runs there, the signal would end the process: as good, since it is stuck.
            os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    stacks = [
        f"rank {one.rank} stands at:\n{one.stack.read_text() if one.stack.exists() else '(start)'}" for one in stuck
    ]
    error = RankFailedError(
        f"{ranks_text(one.rank for one in stuck)} of {world_size} not done after {timeout:g} s",
        why="\n".join(stacks).rstrip(),
        fix="look for a collective that not all ranks call, or give a longer timeout",
    )
    error.rank = stuck[0].rank
    return error


def _main(rank: int, payload: _Payload, stack: str, init: bool, timeout: float) -> None:
    pipe = Connection(_PIPE)
    with open(stack, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
        torch.set_num_threads(1)
        try:
            fn, args = payload.load()
            if init:
                init_process_group("gloo", timeout=timedelta(seconds=max(timeout, _START)), device="cpu")
                barrier()  # a function that is done at once would leave while others still connect to this rank
            pipe.send_bytes(pickle.dumps((None, None)))
            answer = pickle.dumps((True, fn(rank, *args)))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: whatever ends the function is reported
            answer = pickle.dumps((False, "".join(traceback.format_exception(error))))
        pipe.send_bytes(answer)
        if init and pickle.loads(answer)[0]:
            destroy_process_group()
        # Without the interpreter's own shutdown: a group that lost a peer can hang there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _end_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()  # the parent never writes: this ends when the parent does
    except (EOFError, OSError):
        os._exit(1)


def without_gloo(text: str) -> str:
    """What a script has printed, without the lines of gloo in torch 2.9 on how many ranks have connected."""
    return re.sub(r"(\[rank \d+\] )?\[Gloo\] Rank \d+ is connected .*\n", "", text)
