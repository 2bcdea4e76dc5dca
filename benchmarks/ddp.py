"""A data-parallel step of two processes on gloo, 2.4 million parameters, one thread each.

A loop by hand around torch's DistributedDataParallel, plain Lightning, and Fairlead take turns in the same two
processes and the same process group, so that they share whatever disturbs these.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, options, paired_ratio, report, take_turns
from benchmarks._training import Net, Workload
from fairlead_distributed.testing import run_ranks

RANKS = 2
WIDTHS = (784, 1024, 1024, 512, 10)
# Both trainers recognise ranks that an elastic agent has started.
LAUNCHER = {"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def rank_main(rank: int, folder: str, given: Options) -> dict[str, list[float]]:
    """What one rank measures: seconds of a step, by side and turn."""
    Tqdm.set_lock(threading.RLock())  # its own lock is a semaphore that outlives a rank
    work = Workload(
        Path(folder),
        widths=WIDTHS,
        batch_size=64,
        warm_up=2 if given.quick else 5,
        steps=3 if given.quick else 40,
        expected_s=0.05,
        settings={"devices": RANKS, "strategy": "ddp"},
    )

    def by_hand() -> float:
        return work.by_hand(distributed=True)

    sides = {"by hand": by_hand, "Lightning": work.lightning, "Fairlead": work.fairlead}
    seconds = take_turns(sides, given.rounds)
    dist.barrier()
    return seconds


def main() -> None:
    given = options(__doc__, rounds=25)
    with tempfile.TemporaryDirectory(prefix="fairlead-ddp-") as folder:
        # All ranks wait for each other in every step, so one of them tells the time of all.
        seconds = run_ranks(rank_main, RANKS, folder, given, timeout=3600, env=LAUNCHER)[0]
    ratios = {
        "trainer_vs_loop": paired_ratio(seconds["Fairlead"], seconds["by hand"], bound=1.02),
        "trainer_vs_lightning": paired_ratio(seconds["Fairlead"], seconds["Lightning"]),
    }
    parameters = sum(parameter.numel() for parameter in Net(WIDTHS).parameters())
    report("ddp", ratios, seconds, given, ranks=RANKS, parameters=parameters)


if __name__ == "__main__":
    main()
