"""How far a plan is from published runs that its calibration never saw, as parts of what was published.

Not a time: the ratios are relative errors, of the speed beside a constant TFLOP/s for each device and number format,
which is what one reckons with on the back of an envelope. `nox -s plan-table` writes them row by row.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Ratio, options, report
from benchmarks.plan.fit import Array
from benchmarks.plan.rows import read
from benchmarks.plan.table import Errors, losses

RESAMPLES = 1000


def quantile(errors: Array, part: float, bound: float | None = None) -> Ratio:
    """A quantile of errors, with the 95 % interval over the rows that might have been published."""
    chance = np.random.default_rng(0)
    again = np.quantile(chance.choice(errors, (RESAMPLES, len(errors))), part, axis=1)
    low, high = np.quantile(again, (0.025, 0.975))
    middle = float(np.quantile(errors, part))
    return Ratio(middle, min(float(low), middle), max(float(high), middle), bound)


def main() -> None:
    given = options(__doc__, rounds=1)
    errors = Errors(read())
    began = time.perf_counter()
    ours, constant = errors.left_out("model")
    took = time.perf_counter() - began
    source, _ = errors.left_out("source")
    wrong, of_source, of_constant = (np.abs(said / errors.published - 1) for said in (ours, source, constant))
    lost = np.array(losses(errors, ours))
    ratios = {
        "speed_median": quantile(wrong, 0.5, bound=0.05),
        "speed_p90": quantile(wrong, 0.9, bound=0.12),
        "speed_median_vs_constant": quantile(wrong / np.median(of_constant), 0.5),
        "source_left_out_median": quantile(of_source, 0.5),
        "source_left_out_p90": quantile(of_source, 0.9),
        "best_layout_lost": quantile(lost, 1.0, bound=0.03),
    }
    report("plan_errors", ratios, {"all rows": [took]}, given, rows=len(errors.rows))


if __name__ == "__main__":
    main()
