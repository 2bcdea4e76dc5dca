"""What a step costs besides the computation: a tiny network, one process, one thread.

A loop by hand, plain Lightning, and Fairlead take turns of some hundred steps in one process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import options, paired_ratio, report, take_turns
from benchmarks._training import Workload


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
    ratios = {
        "trainer_vs_lightning": paired_ratio(seconds["Fairlead"], seconds["Lightning"], bound=0.95),
        "trainer_vs_loop": paired_ratio(seconds["Fairlead"], seconds["by hand"]),
    }
    report("step", ratios, seconds, given, steps_of_a_turn=work.steps)


if __name__ == "__main__":
    main()
