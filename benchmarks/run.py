"""What a `Run` costs in a plain loop: the same loop without it, in one process and in two on gloo, one thread each.

The step is that of `ddp`, some ten milliseconds in one process. The loops take turns in the same processes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, options, paired_ratio, report, take_turns
from benchmarks._training import Workload
from benchmarks.ddp import LAUNCHER, RANKS, WIDTHS
from fairlead_distributed.testing import run_ranks


def workload(folder: str, given: Options, *, ranks: int) -> Workload:
    return Workload(
        Path(folder) / str(ranks),
        widths=WIDTHS,
        batch_size=64,
        warm_up=2 if given.quick else 20,
        steps=3 if given.quick else 100 if ranks == 1 else 40,
        expected_s=0.02,
        settings={"devices": ranks},
    )


def rank_main(rank: int, folder: str, given: Options) -> dict[str, list[float]]:
    """What one rank measures: seconds of a step, by side and turn."""
    work = workload(folder, given, ranks=RANKS)

    def by_hand() -> float:
        return work.by_hand(distributed=True)

    def in_run() -> float:
        return work.in_run(distributed=True)

    seconds = take_turns({"by hand, two": by_hand, "Run, two": in_run}, given.rounds)
    dist.barrier()
    return seconds


def main() -> None:
    given = options(__doc__, rounds=25)
    with tempfile.TemporaryDirectory(prefix="fairlead-run-") as folder:
        two = run_ranks(rank_main, RANKS, folder, given, timeout=3600, env=LAUNCHER)[0]
        torch.set_num_threads(1)
        work = workload(folder, given, ranks=1)
        one = take_turns({"by hand, one": work.by_hand, "Run, one": work.in_run}, given.rounds)
    ratios = {
        "run_vs_loop": paired_ratio(one["Run, one"], one["by hand, one"], bound=1.03),
        "run_vs_loop_two_ranks": paired_ratio(two["Run, two"], two["by hand, two"], bound=1.03),
    }
    report("run", ratios, {**one, **two}, given, ranks=RANKS)


if __name__ == "__main__":
    main()
