"""Fits the numbers of `calibration.json` to published runs: `python benchmarks/plan/fit.py` writes the file anew.

Each number has a physical meaning and is known roughly before any run is looked at: `PRIORS` has that value, and how
far it may be off (the spread of its logarithm). The fit moves them by least squares on relative errors, in which a row
that no number explains counts little (a robust loss), and all rows of a source together count as the square root of
their number. No number belongs to a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plan.rows import PUBLISHED, Row, read
from fairlead_planning.calibration import Calibration, shipped
from fairlead_planning.step_time import StepTimer

Array = npt.NDArray[np.float64]
SHIPPED = Path(__file__).resolve().parents[2] / "packages/planning/src/fairlead_planning/calibration.json"

PRIORS: dict[str, tuple[float, float, str]] = {
    "matmul.ampere.bfloat16": (0.82, 0.06, "of the peak that large products reach"),
    "matmul.ampere.float32": (0.8, 0.1, "of the peak that large products reach"),
    "matmul.hopper.bfloat16": (0.68, 0.05, "of the peak that large products reach"),
    "matmul.hopper.float8": (0.68, 0.1, "of the peak that large products reach"),
    "matmul.blackwell.bfloat16": (0.7, 0.05, "of the peak that large products reach"),
    "matmul.blackwell.float8": (0.62, 0.1, "of the peak that large products reach"),
    "matmul.blackwell.float4": (0.55, 0.15, "of the peak that large products reach"),
    "matmul.blackwell ultra.bfloat16": (0.72, 0.05, "of the peak that large products reach"),
    "matmul.blackwell ultra.float8": (0.64, 0.1, "of the peak that large products reach"),
    "matmul.blackwell ultra.float4": (0.45, 0.15, "of the peak that large products reach"),
    "matmul.volta.bfloat16": (0.72, 0.1, "of the peak that large products reach"),
    "matmul.cdna3.bfloat16": (0.5, 0.1, "of the peak that large products reach"),
    "matmul.cdna2.bfloat16": (0.7, 0.1, "of the peak that large products reach"),
    "matmul.other": (0.6, 0.2, "of the peak that large products reach"),
    "attention.ampere": (0.62, 0.15, "of the bfloat16 peak that the best fused attention reaches, forward"),
    "attention.hopper": (0.6, 0.15, "of the bfloat16 peak that the best fused attention reaches, forward"),
    "attention.blackwell": (0.55, 0.15, "of the bfloat16 peak that the best fused attention reaches, forward"),
    "attention.blackwell ultra": (0.65, 0.15, "of the bfloat16 peak that the best fused attention reaches, forward"),
    "attention.other": (0.4, 0.3, "of the bfloat16 peak that the best fused attention reaches, forward"),
    "attention.backward": (0.8, 0.1, "its backward pass, relative to forward"),
    "memory.other": (0.8, 0.07, "of the memory bandwidth that large elementwise kernels reach"),
    "grouped": (0.75, 0.25, "products of experts, relative to one large product"),
    "all_to_all": (0.7, 0.25, "of a network's rate, what dispatch to experts over nodes reaches"),
    "power": (0.5, 0.5, "exponent of the rated power, relative to the family's usual one, in the rate of products"),
    "depth": (200, 0.4, "length of the sum at which a product reaches half of its rate"),
    "wave": (0.15, 0.5, "waves of tiles at which a product reaches half of its rate"),
    "kernel_us": (3, 0.5, "what a small kernel takes, microseconds"),
    "hop_us": (1.0, 0.5, "what a further rank adds to a ring, microseconds"),
    "contention": (0.15, 0.5, "of hidden communication, the part by which it slows the compute that hides it"),
    "jitter": (0.01, 0.7, "spread of ranks, relative: the slowest of n nodes waits for sqrt(2 ln n) of it"),
    "host_gb_s": (20, 0.3, "memory bandwidth of the host that an offloaded optimizer reaches, GB/s"),
    "stack.eager.matmul": (1, 0, "products, relative to recent libraries"),
    "stack.eager.attention": (0.75, 0.2, "attention, relative to the family's best"),
    "stack.eager.traffic": (1.0, 0.05, "of the traffic of eager elementwise kernels, what fusion leaves"),
    "stack.eager.launch_us": (7, 0.2, "host time of a kernel of the eager trace, microseconds"),
    "stack.eager.cast": (1, 0.3, "of the traffic of separate casts to 8 and 4 bits, what fusion leaves"),
    "stack.eager.overlap_data": (0.9, 0.1, "of the backward pass, the part that can hide gradients (DDP, ZeRO 1)"),
    "stack.eager.exposed_tensor": (1, 0.1, "of tensor-parallel communication, the part that is not hidden"),
    "stack.eager.exposed_context": (0.5, 0.3, "of context-parallel communication, the part that is not hidden"),
    "stack.eager.exposed_expert": (1, 0.1, "of the dispatch to experts, the part that is not hidden"),
    "stack.eager.exposed_pipeline": (1, 0.1, "of sends between stages, the part that is not hidden"),
    "stack.eager.dispatch_us": (700, 0.6, "host time of a mixture, forward and backward, microseconds"),
    "stack.eager.step_ms": (3, 0.6, "host time of a step that nothing hides, milliseconds"),
    "stack.eager.uneven_context": (
        0.7,
        0.2,
        "1: consecutive positions a rank, uneven work of causal attention; 0: even",
    ),
    "stack.eager.gradient_bytes": (12, 0, "traffic of each parameter when a further micro-batch is added"),
    "stack.eager.once": (0, 0, "1: a token goes once to each domain and rank that has experts of it"),
    "stack.eager.reduce_each": (0, 0, "1: gradients are reduced in each micro-batch"),
    "stack.triton.matmul": (1, 0.08, "products, relative to recent libraries"),
    "stack.triton.attention": (0.5, 0.25, "attention, relative to the family's best"),
    "stack.triton.traffic": (1.0, 0.05, "of the traffic of eager elementwise kernels, what fusion leaves"),
    "stack.triton.launch_us": (7, 0.2, "host time of a kernel of the eager trace, microseconds"),
    "stack.triton.cast": (1, 0.3, "of the traffic of separate casts to 8 and 4 bits, what fusion leaves"),
    "stack.triton.overlap_data": (0.9, 0.1, "of the backward pass, the part that can hide gradients (DDP, ZeRO 1)"),
    "stack.triton.exposed_tensor": (1, 0.1, "of tensor-parallel communication, the part that is not hidden"),
    "stack.triton.exposed_context": (0.5, 0.3, "of context-parallel communication, the part that is not hidden"),
    "stack.triton.exposed_expert": (1, 0.1, "of the dispatch to experts, the part that is not hidden"),
    "stack.triton.exposed_pipeline": (1, 0.1, "of sends between stages, the part that is not hidden"),
    "stack.triton.dispatch_us": (700, 0.6, "host time of a mixture, forward and backward, microseconds"),
    "stack.triton.step_ms": (15, 0.6, "host time of a step that nothing hides, milliseconds"),
    "stack.triton.uneven_context": (
        0.7,
        0.2,
        "1: consecutive positions a rank, uneven work of causal attention; 0: even",
    ),
    "stack.triton.gradient_bytes": (12, 0, "traffic of each parameter when a further micro-batch is added"),
    "stack.triton.once": (0, 0, "1: a token goes once to each domain and rank that has experts of it"),
    "stack.triton.reduce_each": (1, 0, "1: gradients are reduced in each micro-batch"),
    "stack.compile.matmul": (1, 0, "products, relative to recent libraries"),
    "stack.compile.attention": (0.75, 0.2, "attention, relative to the family's best"),
    "stack.compile.traffic": (0.5, 0.2, "of the traffic of eager elementwise kernels, what fusion leaves"),
    "stack.compile.launch_us": (5, 0.2, "host time of a kernel of the eager trace, microseconds"),
    "stack.compile.cast": (0.6, 0.3, "of the traffic of separate casts to 8 and 4 bits, what fusion leaves"),
    "stack.compile.overlap_data": (0.9, 0.1, "of the backward pass, the part that can hide gradients (DDP, ZeRO 1)"),
    "stack.compile.exposed_tensor": (0.8, 0.2, "of tensor-parallel communication, the part that is not hidden"),
    "stack.compile.exposed_context": (0.5, 0.3, "of context-parallel communication, the part that is not hidden"),
    "stack.compile.exposed_expert": (1, 0.1, "of the dispatch to experts, the part that is not hidden"),
    "stack.compile.exposed_pipeline": (1, 0.1, "of sends between stages, the part that is not hidden"),
    "stack.compile.dispatch_us": (700, 0.6, "host time of a mixture, forward and backward, microseconds"),
    "stack.compile.step_ms": (3, 0.6, "host time of a step that nothing hides, milliseconds"),
    "stack.compile.uneven_context": (
        0.7,
        0.2,
        "1: consecutive positions a rank, uneven work of causal attention; 0: even",
    ),
    "stack.compile.gradient_bytes": (12, 0, "traffic of each parameter when a further micro-batch is added"),
    "stack.compile.once": (0, 0, "1: a token goes once to each domain and rank that has experts of it"),
    "stack.compile.reduce_each": (0, 0, "1: gradients are reduced in each micro-batch"),
    "stack.megatron.matmul": (1, 0, "products, relative to recent libraries"),
    "stack.megatron.attention": (1, 0.1, "attention, relative to the family's best"),
    "stack.megatron.traffic": (0.5, 0.2, "of the traffic of eager elementwise kernels, what fusion leaves"),
    "stack.megatron.launch_us": (5, 0.3, "host time of a kernel of the eager trace, microseconds"),
    "stack.megatron.cast": (0.8, 0.3, "of the traffic of separate casts to 8 and 4 bits, what fusion leaves"),
    "stack.megatron.overlap_data": (0.9, 0.1, "of the backward pass, the part that can hide gradients (DDP, ZeRO 1)"),
    "stack.megatron.exposed_tensor": (0.4, 0.3, "of tensor-parallel communication, the part that is not hidden"),
    "stack.megatron.exposed_context": (0.3, 0.3, "of context-parallel communication, the part that is not hidden"),
    "stack.megatron.exposed_expert": (1, 0.2, "of the dispatch to experts, the part that is not hidden"),
    "stack.megatron.exposed_pipeline": (0.5, 0.3, "of sends between stages, the part that is not hidden"),
    "stack.megatron.dispatch_us": (4000, 0.5, "host time of a mixture, forward and backward, microseconds"),
    "stack.megatron.step_ms": (10, 0.6, "host time of a step that nothing hides, milliseconds"),
    "stack.megatron.uneven_context": (
        0.01,
        0.2,
        "1: consecutive positions a rank, uneven work of causal attention; 0: even",
    ),
    "stack.megatron.gradient_bytes": (3, 0.5, "traffic of each parameter when a further micro-batch is added"),
    "stack.megatron.once": (1, 0, "1: a token goes once to each domain and rank that has experts of it"),
    "stack.megatron.reduce_each": (0, 0, "1: gradients are reduced in each micro-batch"),
    "stack.megatron graphs.matmul": (1, 0, "products, relative to recent libraries"),
    "stack.megatron graphs.attention": (1, 0.1, "attention, relative to the family's best"),
    "stack.megatron graphs.traffic": (0.5, 0.2, "of the traffic of eager elementwise kernels, what fusion leaves"),
    "stack.megatron graphs.launch_us": (3, 0.3, "host time of a kernel of the eager trace, microseconds"),
    "stack.megatron graphs.cast": (0.8, 0.3, "of the traffic of separate casts to 8 and 4 bits, what fusion leaves"),
    "stack.megatron graphs.overlap_data": (
        0.9,
        0.1,
        "of the backward pass, the part that can hide gradients (DDP, ZeRO 1)",
    ),
    "stack.megatron graphs.exposed_tensor": (0.4, 0.3, "of tensor-parallel communication, the part that is not hidden"),
    "stack.megatron graphs.exposed_context": (
        0.3,
        0.3,
        "of context-parallel communication, the part that is not hidden",
    ),
    "stack.megatron graphs.exposed_expert": (1, 0.2, "of the dispatch to experts, the part that is not hidden"),
    "stack.megatron graphs.exposed_pipeline": (0.5, 0.3, "of sends between stages, the part that is not hidden"),
    "stack.megatron graphs.dispatch_us": (2000, 0.5, "host time of a mixture, forward and backward, microseconds"),
    "stack.megatron graphs.step_ms": (10, 0.6, "host time of a step that nothing hides, milliseconds"),
    "stack.megatron graphs.uneven_context": (
        0.01,
        0.2,
        "1: consecutive positions a rank, uneven work of causal attention; 0: even",
    ),
    "stack.megatron graphs.gradient_bytes": (3, 0.5, "traffic of each parameter when a further micro-batch is added"),
    "stack.megatron graphs.once": (1, 0, "1: a token goes once to each domain and rank that has experts of it"),
    "stack.megatron graphs.reduce_each": (0, 0, "1: gradients are reduced in each micro-batch"),
}
OLDER = {
    "matmul": 0.9, "attention": 0.55, "traffic": 0.7, "launch_us": 6, "cast": 1, "overlap_data": 0.7,
    "exposed_tensor": 1, "exposed_context": 0.5, "exposed_expert": 1, "exposed_pipeline": 1, "dispatch_us": 2000,
    "step_ms": 15, "uneven_context": 0.01, "gradient_bytes": 8, "once": 0, "reduce_each": 0,
}  # fmt: skip
"""Megatron of 2022 and 2023, on A100s: nothing of tensor parallelism is hidden, fewer kernels are fused. No row of the
file is one of it: these are assumed."""
PRIORS |= {
    f"stack.megatron 2023.{name}": (value, 0, PRIORS[f"stack.megatron.{name}"][2]) for name, value in OLDER.items()
}
ERROR = 0.04
"""What rows of the same job differ by from each other: the spread of a residual."""


def timer_of(row: Row) -> StepTimer:
    """The timer of a row, under the numbers known before."""
    return StepTimer(
        row.profile, row.cluster, stack=row.stack, products=row.products, ring=row.ring, calibration=prior()
    )


def speed(row: Row, timer: StepTimer) -> float:
    """What was published, in tokens a second and device: of a row that has only TFLOP/s, by the work of its model."""
    if row.tokens_per_second is not None:
        return row.tokens_per_second
    return row.tflops * 1e12 * timer.profile.tokens / timer.model_flops


def prior() -> Calibration:
    """What is known before any run is looked at."""
    return Calibration({name: value for name, (value, _, _) in PRIORS.items()})


def predicted(rows: Sequence[Row], timers: Sequence[StepTimer], calibration: Calibration) -> Array:
    """Tokens a second and device of each row."""
    return np.array(
        [
            timer.calibrated(calibration).time(row.layout).tokens_per_second
            for row, timer in zip(rows, timers, strict=True)
        ]
    )


def touches(name: str) -> Callable[[Row], bool]:
    """Which rows a number can matter for."""
    kind, _, rest = name.partition(".")
    of = rest.split(".")[0]
    if kind == "stack":
        return lambda row: row.stack == of
    if kind in ("grouped", "all_to_all"):
        return lambda row: row.config.experts is not None
    if kind in ("matmul", "attention") and of != "backward":
        return lambda row: (
            row.cluster.device.family.startswith(of)
            or (of == "hopper" and row.cluster.device.family.startswith("blackwell"))
        )
    return lambda row: kind != "host_gb_s"


def fit(
    rows: Sequence[Row],
    timers: Sequence[StepTimer],
    steps: int = 10,
    begin: Mapping[str, float] | None = None,
    say: bool = False,
) -> Calibration:
    """The numbers that explain these rows best: Gauss-Newton on logarithms, drawn to the priors.

    `begin` is where it starts, the priors by default: a good start saves steps, and moves no optimum.
    """
    names = [name for name, (_, spread, _) in PRIORS.items() if spread > 0]
    fixed = {name: value for name, (value, _, _) in PRIORS.items()}
    start = np.log([PRIORS[name][0] for name in names])
    spread = np.array([PRIORS[name][1] for name in names])
    published = np.log([speed(row, timer) for row, timer in zip(rows, timers, strict=True)])
    of = Counter(row.source for row in rows)
    weight = np.array([of[row.source] ** -0.25 for row in rows])
    weight *= np.sqrt(len(rows) / (weight**2).sum())
    affected = [np.array([i for i, row in enumerate(rows) if touches(name)(row)], dtype=int) for name in names]

    def calibration(at: Array) -> Calibration:
        return Calibration({**fixed, **{name: float(value) for name, value in zip(names, np.exp(at), strict=True)}})

    def logs(at: Array, which: Sequence[int]) -> Array:
        some = predicted([rows[i] for i in which], [timers[i] for i in which], calibration(at))
        return np.log(some)

    at = start.copy() if begin is None else np.log([begin[name] for name in names])
    everything = list(range(len(rows)))
    now = logs(at, everything)
    for step in range(steps):
        residual = now - published
        slopes = np.zeros((len(rows), len(names)))
        for column, which in enumerate(affected):
            if len(which):
                moved = at.copy()
                moved[column] += 0.02
                slopes[which, column] = (logs(moved, list(which)) - now[which]) / 0.02
        robust = weight / np.sqrt(1 + (residual / (1.5 * ERROR)) ** 2) ** 0.5 / ERROR
        scaled = slopes * robust[:, None]
        known = np.diag(1 / spread**2)
        change = -np.linalg.solve(scaled.T @ scaled + known, scaled.T @ (residual * robust) + (at - start) / spread**2)
        at = at + np.clip(change, -0.4, 0.4)
        now = logs(at, everything)
        if say:
            error = np.abs(np.expm1(now - published))
            print(
                f"step {step}: median {np.median(error):.4f}, 90th percentile {np.quantile(error, 0.9):.4f}, "
                f"moved {np.abs(change).max():.3f}"
            )
        if np.abs(change).max() < 0.01:
            break
    return calibration(at)


LEFT_OUT = Path(__file__).with_name("left_out.json")


def folds(rows: Sequence[Row]) -> dict[str, list[int]]:
    """The rows that are left out together, by what they have in common: a source, several of them, or models."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(f"source {row.source}", []).append(number)
        if row.source.startswith("llm-foundry"):
            found.setdefault("source llm-foundry", []).append(number)
        found.setdefault(f"model {row.model}", []).append(number)
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("model"), item[0])))


def left_out(rows: Sequence[Row], name: str) -> tuple[str, Mapping[str, float]]:
    """The numbers that the rows outside of a fold give."""
    without = set(folds(rows)[name])
    kept = [row for i, row in enumerate(rows) if i not in without]
    found = fit(kept, [timer_of(row) for row in kept], 5, shipped().numbers)
    print(f"{name}: left {len(without)} rows out", flush=True)
    return name, {key: float(f"{value:.4g}") for key, value in found.numbers.items()}


def as_json(numbers: Mapping[str, float], rows: Sequence[Row]) -> str:
    """The shipped file."""
    entries = {
        name: {"value": float(f"{numbers[name]:.4g}"), "prior": value, "spread": spread, "says": says}
        for name, (value, spread, says) in PRIORS.items()
    }
    sources = dict(sorted(Counter(row.source for row in rows).items()))
    return (
        json.dumps({"written_by": "python benchmarks/plan/fit.py", "rows": sources, "numbers": entries}, indent=1)
        + "\n"
    )


def main() -> None:
    """Writes the shipped calibration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, default=PUBLISHED)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--left-out", action="store_true", help=f"write {LEFT_OUT.name} as well: a fit for each fold")
    given = parser.parse_args()
    rows = read(given.rows)
    timers = [timer_of(row) for row in rows]
    found = fit(rows, timers, say=True)
    given.out.write_text(as_json(found.numbers, rows), encoding="utf-8")
    if given.left_out:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            numbers = dict(pool.map(partial(left_out, rows), folds(rows)))
        LEFT_OUT.write_text(json.dumps(numbers, indent=0) + "\n", encoding="utf-8")
    print(f"{given.out}: {len(found.numbers)} numbers from {len(rows)} rows")


if __name__ == "__main__":
    main()
