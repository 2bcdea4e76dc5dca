"""What a step costs besides the computation: a tiny network, one process, one thread.

A loop by hand, plain Lightning, and Fairlead take turns of some hundred steps in one process. Besides, what it costs to
measure where a step's time goes, beside a sleep of 5 ms, which is a small step.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import options, paired_ratio, report, take_turns
from benchmarks._training import Workload
from fairlead_runs.step_times import StepTimes, times_folder

SMALL_STEP_S = 5e-3


def small_step_s() -> float:
    """Seconds of a small step."""
    began = time.perf_counter()
    time.sleep(SMALL_STEP_S)
    return time.perf_counter() - began


def measuring_s(folder: Path, steps: int = 2000) -> float:
    """Seconds that a Trainer's step spends in the calls that measure it, the writing of the records among them."""
    times = StepTimes(times_folder(folder, 1), node=0, local_rank=0, rank=0, interval_s=math.inf)
    times.beat("setup", 0)
    began = time.perf_counter()
    for step in range(steps):
        for part in ("data", "forward", "backward", "optimizer", "logging"):
            times.at(part)
        times.beat("train", step)
    times.write()  # every ten seconds, which are so many steps
    spent = time.perf_counter() - began
    times.close()
    return spent / steps


def main() -> None:
    given = options(__doc__, rounds=40)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fairlead-step-") as folder:
        work = Workload(
            Path(folder),
            widths=(32, 64, 64, 10),
            batch_size=32,
            warm_up=10 if given.quick else 100,
            steps=20 if given.quick else 500,
            expected_s=1e-3,
            settings={"devices": 1},
        )
        sides = {"by hand": work.by_hand, "Lightning": work.lightning, "Fairlead": work.fairlead}
        seconds = take_turns(sides, given.rounds)
        measuring = {"measuring": lambda: measuring_s(Path(folder)), "a step": small_step_s}
        seconds |= take_turns(measuring, given.rounds)
    ratios = {
        "step_times_of_a_step": paired_ratio(seconds["measuring"], seconds["a step"], bound=0.005),
        "trainer_vs_lightning": paired_ratio(seconds["Fairlead"], seconds["Lightning"], bound=0.95),
        "trainer_vs_loop": paired_ratio(seconds["Fairlead"], seconds["by hand"]),
    }
    report("step", ratios, seconds, given, steps_of_a_turn=work.steps)


if __name__ == "__main__":
    main()
