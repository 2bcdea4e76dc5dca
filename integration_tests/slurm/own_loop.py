"""A loop of one's own without Lightning, stopped by `PreemptionGuard`: `python own_loop.py STEPS`.

Rank 0 writes each step that is done into `steps`, and what the stop came to into `outcomes`. The variable GRACE holds
the seconds that a stop may take, if they are not the usual ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fairlead_distributed import process_group
from fairlead_hpc_signals import PreemptionGuard, StopPolicy, requeuer_here


def main(steps: int) -> None:
    saved = Path("saved")
    grace = os.environ.get("GRACE")
    policy = StopPolicy(grace_s=float(grace) if grace is not None else None)
    with PreemptionGuard(policy=policy) as guard, process_group():
        rank = dist.get_rank()
        step = int(saved.read_text()) if saved.exists() else 0
        while step < steps:
            one = torch.ones(1)
            dist.all_reduce(one)  # as a backward would: ranks wait for each other in every step
            time.sleep(0.1)
            step += 1
            if rank == 0:
                with Path("steps").open("a") as file:
                    file.write(f"{step}\n")
            if guard.should_stop():

                def save(step: int = step) -> None:
                    if rank == 0:
                        saved.write_text(str(step))

                outcome = guard.save_and_requeue(save, requeuer_here())
                if rank == 0:
                    with Path("outcomes").open("a") as file:
                        file.write(f"{outcome.reason.why} {outcome.exit_code} {bool(outcome.requeued)}\n")
                outcome.exit()
        if rank == 0:
            Path("done").touch()


if __name__ == "__main__":
    main(int(sys.argv[1]))
