"""Ways to divide the CPUs of a machine among processes, what was measured of them, and what to take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fairlead_diagnostics.bench.cpus import CPUs
from fairlead_runs.describe import counted

LEAST_GAIN: Final = 1.03
"""What is not this much faster is not worth another set-up."""
LEAST_ROUNDS: Final = 3
"""With fewer, a difference cannot be told from noise."""


@dataclass(frozen=True)
class Layout:
    """So many processes, with so many threads each; `str()` is `4 x 10`."""

    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


def layouts(cpus: CPUs, processes: Sequence[int] | None = None) -> list[Layout]:
    """What is tried: one process with all CPUs first, then one with a single thread, then more and more processes.

    Args:
        cpus: What there is to divide.
        processes: Their numbers; None: powers of two, and the numbers of NUMA nodes and of sockets.
    """
    if processes is None:
        powers = [2**exponent for exponent in range(cpus.count.bit_length())]
        processes = sorted({*powers, cpus.numa_nodes, cpus.sockets})
    several = [Layout(number, cpus.count // number) for number in processes if 1 < number <= cpus.count]
    return [Layout(1, cpus.count), Layout(1, 1), *several]


@dataclass(frozen=True)
class Measured:
    """One trial: samples a second of all ranks, seconds of a step, the share that is communication, bytes."""

    rate: float
    step_s: float
    communication: float | None
    memory: int
    ranks: Sequence[Mapping[str, Any]] = ()
    """What each rank has left (`StepTimes`)."""


@dataclass
class Row:
    """What was measured of one layout.

    Attributes:
        layout: Processes and threads.
        batch_size: What the job's batch size is to be set to; None: as it is.
        rates: Samples a second of all its processes together, one number a round.
        communication: The share of a step that goes when the ranks send each other nothing, one number a round.
        memory: Bytes of all its processes together, after the last timing.
        failed: Why it could not be measured.
        last: The newest trial.
    """

    layout: Layout
    batch_size: int | None = None
    rates: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    memory: int | None = None
    failed: str | None = None
    last: Measured | None = None

    @property
    def rate(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rates)

    @property
    def share(self) -> float | None:
        """The median share of communication; None: there is none, or it could not be switched off."""
        return statistics.median(self.communication) if self.communication else None

    def against(self, other: Row) -> tuple[float, float, float]:
        """Its speed over that of another: the median of the rounds, and the lowest and the highest of them."""
        ratios = [mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)

    def efficiency(self, single: Row) -> float:
        """Its speed over what its CPUs would reach if each did as much as one thread of one process."""
        return self.against(single)[0] / (self.layout.processes * self.layout.threads)


@dataclass(frozen=True)
class Advice:
    """What to take; `certain` is False where the fastest is not faster beyond the noise."""

    layout: Layout
    settings: Mapping[str, Any]
    certain: bool
    text: str


def advise(rows: Sequence[Row], *, batch_setting: str | None = None, strategy: str | None = None) -> Advice:
    """One process with all CPUs, unless something else is faster in every single round and by 3 % in the median.

    Args:
        rows: What was measured; the first is one process with all CPUs.
        batch_setting: Where the job says its batch size, if each layout is to have its own.
        strategy: What the strategy is to be set to for several processes; None: as it is.
    """
    base, *rest = [row for row in rows if row.failed is None]
    if not rest:
        return _advice(base, True, "stay with one process: nothing else could be measured", batch_setting, None)
    best = max(rest, key=lambda row: row.rate)
    median, low, high = best.against(base)
    stay = "stay with one process" if best.layout.processes > 1 else f"stay with {base.layout.threads} threads"
    speed = f"{median:.2f} x the samples/s of {words(base.layout)} [{low:.2f}, {high:.2f}]"
    share = f"; {best.share:.0%} of its step is communication" if best.share is not None else ""
    if median <= 1:
        text = f"{stay}: {words(best.layout)}, the next best, reach{_s(best)} {speed}{share}"
        return _advice(base, True, text, batch_setting, None)
    if len(base.rates) < LEAST_ROUNDS:
        few = counted(len(base.rates), "round")
        text = f"{words(best.layout)} reach{_s(best)} {speed}, and {few} cannot tell that from the noise"
        return _advice(base, False, f"{stay} until more is known: {text}", batch_setting, None)
    if low <= 1 or median < LEAST_GAIN:
        why = "which is within the noise" if low <= 1 else f"which is not worth it below {LEAST_GAIN:.2f}"
        text = f"{stay}: {words(best.layout)} reach{_s(best)} {speed}, {why}{share}"
        return _advice(base, low > 1, text, batch_setting, None)
    text = f"take {words(best.layout)}: {speed}{share}"
    return _advice(best, True, text, batch_setting, strategy if best.layout.processes > 1 else None)


def _advice(row: Row, certain: bool, why: str, batch_setting: str | None, strategy: str | None) -> Advice:
    settings: dict[str, Any] = {"trainer.devices": row.layout.processes, "trainer.threads": row.layout.threads}
    if strategy is not None:
        settings["trainer.strategy"] = strategy
    if batch_setting is not None:
        settings[batch_setting] = row.batch_size
    written = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return Advice(row.layout, settings, certain, f"{why}. Write {written}")


def words(layout: Layout) -> str:
    """`4 processes with 10 threads each`."""
    processes = "one process" if layout.processes == 1 else f"{layout.processes} processes"
    each = " each" if layout.processes > 1 else ""
    return f"{processes} with {counted(layout.threads, 'thread')}{each}"


def _s(row: Row) -> str:
    return "es" if row.layout.processes == 1 else ""


def table(rows: Sequence[Row]) -> list[str]:
    """The lines that a person reads; the first row is one process with all CPUs, the second one with one thread."""
    base, single = rows[:2]
    heads = ("processes x threads", "samples/s", "lowest, highest", f"vs {base.layout}", "efficiency", "communication")
    lines = [(*heads, "memory")]
    for row in rows:
        if row.failed is not None:
            lines.append((str(row.layout), "failed", row.failed, "", "", "", ""))
            continue
        efficiency = f"{row.efficiency(single):.0%}" if single.failed is None else "-"
        share = f"{row.share:.0%}" if row.share is not None else "-"
        memory = f"{row.memory / 2**30:.2f} GiB" if row.memory is not None else "-"
        spread = f"{number(min(row.rates))}, {number(max(row.rates))}"
        speed = f"{row.against(base)[0]:.2f}"
        lines.append((str(row.layout), number(row.rate), spread, speed, efficiency, share, memory))
    # What failed says why in a line as long as it needs.
    widths = [max(len(line[column]) for line in lines if line[1] != "failed") for column in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table with its columns below each other: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
