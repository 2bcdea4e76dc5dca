"""A step of DeepSpeed's ZeRO stages of two processes on gloo, 2.4 million parameters, one thread each.

The three stages, configured as `strategy: deepspeed_stage_N` configures them, and torch's DistributedDataParallel take
turns in the same two processes and the same process group, with one model and one Adam each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, options, paired_ratio, report, take_turns
from benchmarks._training import Net
from fairlead_distributed.testing import run_ranks
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.deepspeed.settings import settings_of

RANKS = 2
WIDTHS = (784, 1024, 1024, 512, 10)
BATCH = 64


def engine_of(stage: int) -> Callable[[Tensor, Tensor], None]:
    """One step under a ZeRO stage."""
    import deepspeed

    settings = settings_of(DeepSpeedStrategyConfig.model_validate({"stage": stage}), "cpu")
    model: Any = Net(WIDTHS)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        config={**settings, "train_micro_batch_size_per_gpu": BATCH},
        dist_init_required=False,
    )

    def step(x: Tensor, y: Tensor) -> None:
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()

    return step


def data_parallel() -> Callable[[Tensor, Tensor], None]:
    """One step of torch's DistributedDataParallel."""
    model = DistributedDataParallel(Net(WIDTHS))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def rank_main(rank: int, given: Options) -> dict[str, list[float]]:
    """What one rank measures: seconds of a step, by side and turn."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        import deepspeed

        from fairlead_strategies.deepspeed.runtime import without_inference_kernels

        with without_inference_kernels():
            deepspeed.init_distributed("gloo")
        torch.manual_seed(rank)
        x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(WIDTHS[-1], (BATCH,))
        steps = {f"stage {stage}": engine_of(stage) for stage in (1, 2, 3)} | {"ddp": data_parallel()}
        count = 2 if given.quick else 20

        def timed(step: Callable[[Tensor, Tensor], None]) -> Callable[[], float]:
            def run() -> float:
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(count):
                    step(x, y)
                return (time.perf_counter() - begun) / count

            return run

        seconds = take_turns({name: timed(step) for name, step in steps.items()}, given.rounds)
        dist.barrier()
    return seconds


def main() -> None:
    given = options(__doc__, rounds=15)
    # All ranks wait for each other in every step, so one of them tells the time of all.
    seconds = run_ranks(rank_main, RANKS, given, timeout=3600)[0]
    ratios = {
        "stage_1_vs_ddp": paired_ratio(seconds["stage 1"], seconds["ddp"]),
        "stage_2_vs_stage_1": paired_ratio(seconds["stage 2"], seconds["stage 1"]),
        "stage_3_vs_stage_2": paired_ratio(seconds["stage 3"], seconds["stage 2"]),
    }
    parameters = sum(parameter.numel() for parameter in Net(WIDTHS).parameters())
    report("zero_stages", ratios, seconds, given, ranks=RANKS, parameters=parameters)


if __name__ == "__main__":
    main()
