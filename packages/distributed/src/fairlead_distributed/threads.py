"""The threads of this rank, the line that a fit begins with, and a thread for a call that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import torch

from fairlead.resolution import Resolution
from fairlead_runs.describe import counted

T = TypeVar("T")


def use_threads(resolution: Resolution, environ: Mapping[str, str]) -> None:
    """Has torch compute with as many threads as was resolved.

    torch heeds OMP_NUM_THREADS, and a script may have set fewer; else each rank would take all CPUs of a node.
    """
    count = int(resolution.value("threads"))
    requested = resolution.trainer.threads != "auto"
    if requested or ("OMP_NUM_THREADS" not in environ and count < torch.get_num_threads()):
        torch.set_num_threads(count)


def start_line(resolution: Resolution) -> str:
    """What runs where: `start       2 ranks on 1 node, ddp on cpu, 32-true, 1 thread each, gloo, Master: n1:29500`."""
    topology = resolution.topology
    ranks, nodes = resolution.world_size, resolution.num_nodes
    driven = f" with {resolution.devices_per_rank} devices" if resolution.devices_per_rank > 1 else ""
    parts = [
        f"{counted(ranks, 'rank')}{driven} on {counted(nodes, 'node')}",
        f"{resolution.strategy.name} on {resolution.accelerator.name}",
        resolution.precision.name,
        counted(torch.get_num_threads(), "thread") + (" each" if ranks > 1 else ""),
    ]
    if ranks > 1:
        parts.append(resolution.backend)
        if topology.main_address is not None:
            # Where the ranks agree on a port, only they know it.
            given = topology.main_port if topology.start is None or not topology.start.ports else None
            port = f":{given.value}" if given is not None else ""
            parts.append(f"Master: {topology.main_address.value}{port}")
    return f"start       {', '.join(parts)}"


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns or raises; after so many seconds a TimeoutError, and the call continues in its thread."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # it belongs to the thread that waits
            answer.set_exception(error)

    threading.Thread(target=run, name="fairlead-within", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {seconds:g} s") from error
