"""Inside the ranks of `fairlead bench comm`: times collectives by size, and the link of each pair of nodes."""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from fairlead_diagnostics.bench.bandwidth import BUS_FACTORS
from fairlead_diagnostics.pairs import schedule
from fairlead_distributed.collectives import all_gather_single, reduce_scatter_single
from fairlead_distributed.process_group import process_group, rank_device

_TIMING_S: Final = 0.2
"""How long one timing lasts; so many calls of a collective fit into it."""
_MOST_CALLS: Final = 200
_ALL_PAIRS: Final = 32  # of more nodes each meets some others, about log2 of them


def measure(
    names: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    pair_bytes: int | None,
    backend: str,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Times everything between the ranks of this start; each calls it, and rank 0 gets the record.

    Args:
        names: The collectives, of `BUS_FACTORS`.
        sizes: Bytes of a message, as nccl-tests counts them.
        rounds: Timings of each.
        pair_bytes: The message between the two nodes of a pair; None: pairs are left out.
        backend: gloo, nccl, or `auto`.
        environ: Says who this rank is; None: the variables of this process.
    """
    device = torch.device("cpu") if backend == "gloo" else rank_device(environ)
    with process_group(backend, environ=environ, device=device):
        world, rank = dist.get_world_size(), dist.get_rank()
        hosts: list[Any] = [None] * world
        dist.all_gather_object(hosts, socket.gethostname())
        rows = [_timed(name, size, rounds, device) for name in names for size in sizes]
        pairs = _pairs(hosts, pair_bytes, rounds, device) if pair_bytes is not None else []
        if rank:
            return None
        return {
            "backend": dist.get_backend(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "ranks": world,
            "hosts": hosts,
            "rounds": rounds,
            "collectives": rows,
            "pairs": pairs,
        }


def _timed(name: str, size: int, rounds: int, device: torch.device) -> dict[str, Any]:
    world = dist.get_world_size()
    share = max(1, size // 4 // world)  # the elements of a rank's part
    row: dict[str, Any] = {"collective": name, "bytes": share * world * 4}
    try:
        call = _call(name, share, device)
        seconds = _seconds(call, rounds, device)
    except (RuntimeError, NotImplementedError) as error:  # of a backend that lacks it, on all ranks alike
        return {**row, "failed": str(error).splitlines()[0]}
    middle = statistics.median(seconds)
    algorithm = row["bytes"] / middle
    bus = algorithm * BUS_FACTORS[name](world)
    return {**row, "seconds": seconds, "algorithm_bytes_per_s": algorithm, "bus_bytes_per_s": bus}


def _call(name: str, share: int, device: torch.device) -> Callable[[], object]:
    """One call of a collective, over the same memory each time."""
    world, rank = dist.get_world_size(), dist.get_rank()
    full, part = torch.ones(share * world, device=device), torch.ones(share, device=device)
    if name == "all_reduce":
        full.zero_()  # sums of sums stay finite
        return lambda: dist.all_reduce(full)
    if name == "broadcast":
        return lambda: dist.broadcast(full, 0)
    if name == "all_gather":
        return lambda: all_gather_single(full, part)
    if name == "reduce_scatter":
        return lambda: reduce_scatter_single(part, full)
    other = torch.empty_like(full)
    if name == "all_to_all":
        return lambda: dist.all_to_all_single(other, full)
    ahead, behind = (rank + 1) % world, (rank - 1) % world  # send_recv: each to the next, as in nccl-tests
    return lambda: _exchange(full, ahead, other, behind)


def _exchange(ours: torch.Tensor, to: int, theirs: torch.Tensor, of: int) -> None:
    operations = [dist.P2POp(dist.isend, ours, to), dist.P2POp(dist.irecv, theirs, of)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _seconds(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Seconds of a call in each round: the mean of all ranks."""
    for _ in range(2):  # the first one connects
        began = time.perf_counter()
        call()
        _synchronize(device)
        once = time.perf_counter() - began
    calls = int(_agreed(max(1.0, min(_MOST_CALLS, _TIMING_S / max(once, 1e-9))), device, dist.ReduceOp.MIN))
    found = []
    for _ in range(rounds):
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(device)
        own = (time.perf_counter() - began) / calls
        found.append(_agreed(own, device, dist.ReduceOp.SUM) / dist.get_world_size())
    return found


def _agreed(own: float, device: torch.device, how: Any) -> float:
    value = torch.tensor([own], dtype=torch.float64, device=device)
    dist.all_reduce(value, how)
    return float(value.item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pairs(hosts: Sequence[str], size: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Each pair of nodes, by their first ranks, alone on the network; on one machine each pair of ranks.

    Both send at once, so that the slower direction counts.
    """
    rank = dist.get_rank()
    first = {host: hosts.index(host) for host in reversed(hosts)}
    leaders = sorted(first.values()) if len(first) > 1 else list(range(len(hosts)))
    found: list[dict[str, Any]] = []
    ours, theirs = (torch.ones(max(1, size // 4), device=device) for _ in range(2))
    few = len(leaders) <= _ALL_PAIRS
    for one, other in combinations(leaders, 2) if few else chain.from_iterable(schedule(leaders)):
        seconds: list[float] = []
        if rank in (one, other):
            peer = other if rank == one else one
            for turn in range(rounds + 1):
                began = time.perf_counter()
                _exchange(ours, peer, theirs, peer)
                _synchronize(device)
                if turn:  # the first one connects
                    seconds.append(time.perf_counter() - began)
        mine: list[Any] = [None] * len(hosts)
        dist.all_gather_object(mine, seconds)  # also has the others wait: pairs do not share the network
        taken = max(statistics.median(mine[one]), statistics.median(mine[other]))
        names = [hosts[n] if len(first) > 1 else f"rank {n}" for n in (one, other)]
        found.append({"nodes": names, "bytes": len(ours) * 4, "seconds": taken, "bytes_per_s": len(ours) * 4 / taken})
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    record = measure(**given["measure"])
    if record is not None:
        Path(given["out"]).write_text(json.dumps(record), encoding="utf-8")
