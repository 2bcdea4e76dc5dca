"""What thousands of ranks cost before and beside the training: resolution, preflight, agreement, submission.

The ranks are threads of a few processes of this machine, each with the connections that it would have; the store, their
messages and the code are the real ones. Seconds here are those of all ranks on a few cores: on a cluster each has its
own, and what is left is what the store's one thread takes, its CPU time. So far as this machine has files and memory
(`--most`), it is measured; what lies beyond is a line through the two largest.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._stats import Ratio, options, report
from benchmarks.hostlist import PER_NODE, RANKS, environ, timed
from fairlead import TrainerConfig
from fairlead.plugins import PluginManager
from fairlead.resolve import resolve
from fairlead_distributed.opening import Opened
from fairlead_distributed.preflight import RankFacts, differences, own_facts
from fairlead_distributed.rendezvous import meet
from fairlead_distributed.store import tcp_store
from fairlead_hpc_signals.agreement import StopAgreement
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_launch.ports import bind_listener
from fairlead_runs.mailbox import StoreMailbox

TIMEOUT = timedelta(minutes=30)
FULL = 16_384
CONNECTIONS = 3
"""Of each rank: torch's own, the one on which it hears, and the one of the agreement."""
sent: Counter[str] = Counter()
"""Requests to the store of this process, by phase."""
phase = "-"


class Counted:
    """A store that counts its requests; clones count together."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> Counted:
        return Counted(self._store.clone())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def counted(*words: Any) -> Any:
            sent[phase] += 1
            return call(*words)

        return counted


def host(pipe: Connection) -> None:
    """The store's process: what rank 0 hosts."""
    store = tcp_store(bind_listener([0]), timeout=TIMEOUT)
    pipe.send(store.port)
    while pipe.recv() == "cpu":
        pipe.send((time.process_time(), len(os.listdir("/proc/self/fd"))))


def work(pipe: Connection, port: int, ranks: range, world_size: int) -> None:
    """Some of the ranks: meets, agrees on a save and on a stop; sends when the last of them was through."""
    global phase
    threading.stack_size(512 * 1024)
    make = StoreMailbox.__init__

    def counting(self: StoreMailbox, store: Any, *words: Any) -> None:
        make(self, store if isinstance(store, Counted) else Counted(store), *words)

    StoreMailbox.__init__ = counting  # type: ignore[assignment, method-assign]
    stores: dict[int, Any] = {}

    def connect(rank: int) -> None:
        stores[rank] = tcp_store(("127.0.0.1", port), timeout=TIMEOUT)

    def meets(rank: int) -> None:
        facts = own_facts(torch.device("cpu"), config_hash="0" * 16)
        stores[rank] = meet(Opened(stores[rank], "here"), rank, world_size, facts, None, environ={}, timeout=TIMEOUT)

    def each(call: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    agreements: list[StopAgreement] = []
    flags = {rank: SignalFlags([]) for rank in ranks}

    def joins(rank: int) -> None:
        agreements.append(StopAgreement(flags[rank], stores[rank], rank, world_size, answer_timeout=TIMEOUT))

    def until(done: Callable[[StopAgreement], bool]) -> None:
        while not all(map(done, agreements)):
            time.sleep(0.005)

    pipe.send("ready")
    while True:
        match pipe.recv():
            case "connect":
                each(connect)
            case "meet":
                phase = "meet"
                each(meets)
            case "join":
                phase = "join"
                each(joins)
            case "save":
                phase = "save"
                if world_size - 1 in ranks:
                    agreements[-1].ask_save()
                until(lambda one: bool(one._saves))
            case "stop":  # as a scheduler does it: a signal to every rank at once
                phase = "stop"
                for own in flags.values():
                    own.note(15)
                until(lambda one: one.decision is not None)
            case _:
                pipe.send(dict(sent))
                os._exit(0)  # thousands of threads would each end their connections
        pipe.send(time.monotonic())


def played(world_size: int, agree: bool) -> dict[str, Any]:
    """All ranks of one start, phase by phase: seconds, CPU seconds of the store, requests of a rank."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=host, args=(theirs,), daemon=True)
    server.start()
    port = pipe.recv()
    count = min(8, max(2, world_size // 256))
    bounds = [world_size * n // count for n in range(count + 1)]
    pipes = []
    for n in range(count):
        ours, other = context.Pipe()
        job = (other, port, range(bounds[n], bounds[n + 1]), world_size)
        context.Process(target=work, args=job, daemon=True).start()
        pipes.append(ours)

    def cpu() -> tuple[float, int]:
        pipe.send("cpu")
        found: tuple[float, int] = pipe.recv()
        return found

    for one in pipes:
        one.recv()
    found: dict[str, Any] = {"ranks": world_size}
    for name in ("connect", "meet", *(("join", "save", "stop") if agree else ())):
        before = cpu()[0]
        began = time.monotonic()
        for one in pipes:
            one.send(name)
        ended = max(one.recv() for one in pipes)
        after, files = cpu()
        found[name] = {"seconds": ended - began, "store_cpu_s": after - before}
        found["files_of_the_store"] = files
    requests: Counter[str] = Counter()
    for one in pipes:
        one.send("end")
        requests.update(one.recv())
    for name, number in requests.items():
        if name in found:
            found[name]["requests"] = number
    pipe.send("end")
    return found


def irregular(nodes: int) -> str:
    """A list of hosts of which no two are neighbours, so that no bracket makes it short."""
    return ",".join(f"node{(number * 7919) % 999_983:06}" for number in range(nodes))


def before_the_ranks() -> dict[str, Any]:
    """What one process does for 16,384 ranks: finds out who it is, compares what all have said, writes a job."""
    plugins, config, variables = PluginManager(), TrainerConfig(accelerator="cpu"), environ()
    nodes = RANKS // PER_NODE
    names = irregular(nodes)
    lists = {name: names for name in variables if name.endswith("NODELIST")}
    worst = {**variables, **lists, "SLURMD_NODENAME": names.rpartition(",")[2]}

    def seconds(call: Callable[[], object]) -> float:
        return statistics.median(timed(call) for _ in range(5))

    facts = own_facts(torch.device("cpu"), config_hash="0" * 16)
    all_facts = {rank: RankFacts(f"n{rank // PER_NODE:04}", rank, facts.same, f"GPU-{rank}") for rank in range(RANKS)}
    return {
        "resolve_s": seconds(lambda: resolve(config, environ=variables, plugins=plugins)),
        "resolve_irregular_s": seconds(lambda: resolve(config, environ=worst, plugins=plugins)),
        "hostlist_bytes": len(variables["SLURM_JOB_NODELIST"]),
        "hostlist_irregular_bytes": len(names),
        "hostlist_irregular_bytes_of_a_rank_each": len(irregular(RANKS)),
        "preflight_compare_s": seconds(lambda: differences(all_facts)),
        "preflight_bytes": sum(len(one.to_json()) for one in all_facts.values()),
        "submission": {nodes: submission(nodes) for nodes in (8, 2048)},
    }


def submission(nodes: int) -> Mapping[str, float]:
    """Seconds and bytes of what `fairlead submit --dry-run` would hand to SLURM, with 64 nodes left out."""
    import contextlib
    import io

    from fairlead.cli import main

    job = Path(__file__).resolve().parents[1] / "examples" / "gpt" / "job.yaml"
    text = io.StringIO()
    sets = [f"resources.nodes={nodes}", "resources.devices_per_node=8", f"submit.exclude={irregular(64)}"]
    words = ["submit", str(job), "--dry-run", "--to", "slurm", *(word for one in sets for word in ("--set", one))]
    silent = contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(text), silent:
        took = timed(lambda: main(words, environ=dict(os.environ), cwd=Path(folder)))
    return {"seconds": took, "bytes": len(text.getvalue())}


def line(points: list[tuple[float, float]], at: float) -> float:
    """The value at a place, on the line through the last two points."""
    (x, y), (u, v) = points[-2:]
    return max(0.0, v + (v - y) / (u - x) * (at - u))


def main() -> None:
    given = options(__doc__, rounds=1, quick=1, most=1024)
    most = 64 if given.quick else int(given.numbers["most"])
    # torch looks up the names of addresses for its log, where no name server may answer.
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = [size for size in (32, 64, 256, 1024, 4096, FULL) if size <= most]
    rows = [played(size, CONNECTIONS * size + 200 < hard) for size in sizes]
    beyond: dict[str, Any] = {}
    for name in ("connect", "meet", "join", "save", "stop"):
        known = [one for one in rows if name in one]
        at = {key: [(one["ranks"], one[name][key]) for one in known] for key in ("seconds", "store_cpu_s")}
        beyond[name] = {
            "measured": known[-1]["ranks"] == FULL,
            **{key: points[-1][1] if known[-1]["ranks"] == FULL else line(points, FULL) for key, points in at.items()},
        }
    beyond["files_of_the_store"] = CONNECTIONS * FULL
    last = rows[-1]

    def of_a_rank(name: str) -> Ratio:
        known = [one[name]["requests"] / one["ranks"] for one in rows if name in one]
        return Ratio(known[-1], min(known), max(known))

    ratios = {
        "meet_requests_of_a_rank": of_a_rank("meet"),
        "save_requests_of_a_rank": of_a_rank("save"),
        "stop_requests_of_a_rank": of_a_rank("stop"),
    }
    seconds = {name: [last[name]["seconds"]] for name in ("connect", "meet")}
    report("simulated_ranks", ratios, seconds, given, rows=rows, at_16384=beyond, alone=before_the_ranks())


if __name__ == "__main__":
    main()
