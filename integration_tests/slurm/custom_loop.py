"""A custom training loop in a `Run`, without Lightning: `python custom_loop.py STEPS`.

Rank 0 writes each step that is done into `steps`, what a stop came to into `outcomes`, and the weights at the end into
`done`. The variable GRACE holds the seconds that a stop may take, if they are not the usual ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Run, Stopped
from fairlead_distributed import DistributedDataParallel, get_rank, process_group
from fairlead_hpc_signals import PreemptionGuard, StopPolicy


def main(steps: int) -> None:
    grace = os.environ.get("GRACE")
    guard = PreemptionGuard(policy=StopPolicy(grace_s=float(grace))) if grace is not None else None
    with process_group():
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=4, shuffle=True)
        try:
            with Run("run", model=model, optimizer=optimizer, max_steps=steps, guard=guard) as run:
                run.restore()
                for (x,) in run.batches(loader):
                    loss: Any = (model(x) - x.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    time.sleep(0.1)
                    run.step(loss=loss)
                    if get_rank() == 0:
                        with Path("steps").open("a") as file:
                            file.write(f"{run.steps}\n")
        except Stopped as stopped:
            if get_rank() == 0:
                outcome = stopped.outcome
                with Path("outcomes").open("a") as file:
                    file.write(f"{outcome.reason.why} {outcome.exit_code} {bool(outcome.requeued)}\n")
            raise
        if get_rank() == 0:
            Path("done").write_text(repr([one.tolist() for one in model.parameters()]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
