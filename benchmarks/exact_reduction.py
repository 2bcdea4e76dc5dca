"""What it costs that DDP adds gradients in the order of the ranks: 3 and 4 processes on gloo, 2.4 million parameters.

A loop by hand trains with the hook, with DDP as it is, and without sending gradients at all; the three take turns in
the same processes and the same process group, one thread each. The last one shows how much of a step is sending.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, Ratio, options, paired_ratio, report, take_turns
from benchmarks._training import Net
from fairlead_distributed import register_exact_reduction
from fairlead_distributed.testing import run_ranks

RANKS = (3, 4)
WIDTHS = (784, 1024, 1024, 512, 10)
BATCH = 64
EXACT, PLAIN, ALONE = "in order of ranks", "plain DDP", "nothing sent"


def loop(*, exact: bool = False, alone: bool = False) -> Callable[[int], float]:
    """A model of its own, and what trains it for some steps and returns the seconds of one."""
    torch.manual_seed(0)
    net = Net(WIDTHS)
    model = DistributedDataParallel(net)
    if exact and not register_exact_reduction(model):
        raise RuntimeError("DDP took no hook")
    optimizer = net.configure_optimizers()
    x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(WIDTHS[-1], (BATCH,))

    def train(steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        with model.no_sync() if alone else contextlib.nullcontext():
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    train(2)  # DDP rebuilds its buckets after the first step
    return train


def rank_main(rank: int, given: Options) -> dict[str, list[float]]:
    """What one rank measures: seconds of a step, by side and turn."""
    steps = 2 if given.quick else 10
    sides = {EXACT: loop(exact=True), PLAIN: loop(), ALONE: loop(alone=True)}
    return take_turns({name: partial(train, steps) for name, train in sides.items()}, given.rounds)


def main() -> None:
    given = options(__doc__, rounds=40)
    ratios: dict[str, Ratio] = {}
    seconds: dict[str, list[float]] = {}
    for ranks in RANKS:
        # All ranks wait for each other in every turn, so one of them tells the time of all.
        found = run_ranks(rank_main, ranks, given, timeout=3600)[0]
        ratios[f"exact_vs_ddp_{ranks}_ranks"] = paired_ratio(found[EXACT], found[PLAIN])
        ratios[f"ddp_vs_nothing_sent_{ranks}_ranks"] = paired_ratio(found[PLAIN], found[ALONE])
        seconds |= {f"{ranks} ranks, {name}": values for name, values in found.items()}
    parameters = sum(parameter.numel() for parameter in Net(WIDTHS).parameters())
    report("exact_reduction", ratios, seconds, given, ranks=RANKS, parameters=parameters)


if __name__ == "__main__":
    main()
