"""An all-reduce between two nodes, over the job's backend."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

from fairlead_diagnostics.checking import Bench, Result

_NUMBERS: Final = 1 << 20


def listen(bench: Bench) -> Result:
    """Opens the store at which partners of this node meet it; `data` is its port."""
    from fairlead_distributed.store import tcp_store
    from fairlead_launch.ports import bind_listener

    if "store" not in bench.cache:
        bench.cache["store"] = tcp_store(bind_listener([0]))
    return Result(True, "", data=bench.cache["store"].port)


def all_reduce(bench: Bench, host: str | None, port: int, turn: int, timeout_s: float) -> Result:
    """A real process group of two: 4 MiB are summed, and every bit compared.

    Args:
        bench: What it works with.
        host: Where the partner's store is; None: at this node's own.
        port: The store's port.
        turn: The number of this pair: it has a separate group.
        timeout_s: Seconds that torch waits for the partner.
    """
    import torch
    import torch.distributed as dist

    bench.progress()
    timeout = timedelta(seconds=timeout_s)
    kind, backend = bench.requested.device, bench.requested.backend
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    rank = 0 if host is None else 1
    if host is None:
        store = bench.cache["store"]
        store.set_timeout(timeout)
    else:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    bench.progress()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"pair-{turn}", store),
        rank=rank,
        world_size=2,
        timeout=timeout,
        device_id=device if kind == "cuda" else None,
    )
    try:
        bench.progress()
        pattern = torch.arange(_NUMBERS, device=device) % 7
        seconds = 0.0
        for _ in range(2):  # the first one connects
            numbers = (pattern * (rank + 1)).float()
            began = time.monotonic()
            dist.all_reduce(numbers)
            wrong = int((numbers != (pattern * 3).float()).sum())
            seconds = time.monotonic() - began
            bench.progress()
            if wrong:
                return Result(False, f"{wrong} of {_NUMBERS} sums are wrong")
    finally:
        dist.destroy_process_group()
    return Result(True, f"4 MiB over {backend}, every bit right", seconds)
