"""The devices: are they all there, and do they compute what they should."""

from __future__ import annotations

import importlib.util
import time

from fairlead_diagnostics.checking import Bench, Result


def count(bench: Bench) -> Result:
    """As many devices as the job asks, for the driver and for torch."""
    requested = bench.requested
    if requested.device == "cpu":
        return Result(True, "the job computes on CPUs" if requested.count else "no accelerator: CPUs")
    seen, by = requested.found, requested.found_by
    if requested.device == "cuda" and importlib.util.find_spec("torch") is not None:
        import torch

        bench.progress()
        usable = torch.cuda.device_count()
        if usable != seen:
            seen, by = min(seen, usable), f"{by} sees {seen}, torch {usable}"
    ok = seen >= (requested.count or 1)
    return Result(
        ok,
        f"{seen} of {requested.count} {requested.device} ({by})"
        if requested.count
        else f"{seen} {requested.device} ({by})",
    )


def matmul(bench: Bench) -> Result:
    """A product of matrices on each device, compared bit for bit with the known answer.

    The factors are small integers, so that every partial sum is exact in float32, in any order, and also in TF32.
    """
    import torch

    bench.progress()
    kind = bench.requested.device
    indices = range(getattr(torch, kind).device_count()) if kind != "cpu" else range(1)
    size, repeats = (1024, 3) if kind == "cpu" else (8192, 10)
    torch.set_float32_matmul_precision("high")
    wrong, slowest = [], 0.0
    for index in indices:
        device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
        rows, columns = (torch.arange(size, device=device) * step % 5 - 2 for step in (3, 7))
        inner = torch.arange(size, device=device) % 3 + 1
        left = (rows[:, None] * inner[None, :]).float()
        right = (inner[:, None] * columns[None, :]).float()
        answer = (rows[:, None] * columns[None, :] * (inner * inner).sum()).float()
        left @ right  # the first one loads libraries
        bench.progress()
        for _ in range(repeats):
            began = time.monotonic()
            product = left @ right
            different = int((product != answer).sum())  # waits for the device, too
            slowest = max(slowest, time.monotonic() - began)
            bench.progress()
            if different:
                wrong.append(f"{device}: {different} of {size * size} numbers are wrong")
                break
    if wrong:
        return Result(False, "; ".join(wrong))
    return Result(True, f"{len(indices)} x {size} x {size} on {kind}, every bit right", slowest)
