"""The page of errors: what a plan says of published runs beside what was published.

    python benchmarks/plan/table.py                    writes docs/reference/plan-errors.md (`nox -s plan-table`)
    python benchmarks/plan/table.py FILE.csv           prints the same table of another file of the same columns

On the page each row is predicted by numbers that were fitted without it: without its whole source, and without its
model (`left_out.json`, which `python benchmarks/plan/fit.py --left-out` writes). Rows of another file are predicted by
the calibration that ships.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plan.fit import LEFT_OUT, PRIORS, Array, folds, predicted, speed, timer_of
from benchmarks.plan.published_models import Config, Decoder
from benchmarks.plan.rows import PUBLISHED, Row, read
from fairlead_planning.calibration import Calibration, shipped
from fairlead_planning.memory import fullest, memory
from fairlead_planning.profile import Profile
from fairlead_planning.step_time import StepTimer
from fairlead_planning.trace import Work, trace
from fairlead_planning.variants import checkpointed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "plan-errors.md"
HEAD = """# How wrong a plan is

`fairlead plan` beside published training runs: {rows} rows of {sources} sources (`benchmarks/plan/published.csv`, with
the page that each is from). `nox -s plan-table` writes this page; `nox -s plan-table -- FILE.csv` prints the same
tables of another file with the same columns. Each row's model is built as a plain module without data, traced as a
user's job is, and laid out as the row says; no number belongs to a row. The {numbers} numbers of the calibration
(`fairlead_planning/calibration.json`: each with its meaning, and what was assumed of it beforehand) are fitted to
*other* rows than those that a table shows; all rows together moved {free} of them by more than 2 %.

The baseline is a constant TFLOP/s for each device and number format, fitted to the same rows as the calibration; of a
device that these do not have, the same part of its peak as the others reach.
"""
LARGEST = "source llm-foundry"
"""The fold of three sources that are of the same people."""


@dataclass
class Errors:
    """Predictions of rows by numbers that these rows had no part in."""

    rows: list[Row]

    @cached_property
    def timers(self) -> list[StepTimer]:
        return [timer_of(row) for row in self.rows]

    @cached_property
    def published(self) -> Array:
        """Tokens a second and device."""
        return np.array([speed(row, timer) for row, timer in zip(self.rows, self.timers, strict=True)])

    @cached_property
    def tflops(self) -> Array:
        """What was published, as model TFLOP/s; of rows without it by the same count, all pairs of an attention."""
        found = []
        for row, timer, tokens in zip(self.rows, self.timers, self.published, strict=True):
            forward = [one for one in timer.profile.kernels if one.phase == "forward" and one.kind != "other"]
            work = 3 * sum(one.flops * (2 if one.kind == "attention" else 1) for one in forward)
            found.append(row.tflops or tokens * work / timer.profile.tokens / 1e12)
        return np.array(found)

    @cached_property
    def folds(self) -> dict[str, list[int]]:
        return folds(self.rows)

    def by(self, calibration: Calibration, which: Sequence[int]) -> Array:
        """Predictions of some rows."""
        return predicted([self.rows[i] for i in which], [self.timers[i] for i in which], calibration)

    def baseline(self, kept: Sequence[int], which: Sequence[int], others: Errors | None = None) -> Array:
        """What a constant TFLOP/s per device and number format predicts, from the rows `kept` (of `others`)."""
        known = others or self
        found: dict[tuple[str, str | None], list[float]] = {}
        parts = []
        for i in kept:
            row = known.rows[i]
            found.setdefault((row.family, row.products), []).append(known.tflops[i])
            parts.append(known.tflops[i] / row.cluster.device.peak_of(row.products or "bfloat16"))
        usual = float(np.median(parts))
        said = []
        for i in which:
            row = self.rows[i]
            constant = found.get((row.family, row.products))
            peak = row.cluster.device.peak_of(row.products or "bfloat16")
            tflops = float(np.median(constant)) if constant else usual * peak
            said.append(self.published[i] * tflops / self.tflops[i])
        return np.array(said)

    def left_out(self, kind: str) -> tuple[Array, Array]:
        """Of all rows the predictions without the fold of that kind (`source`, `model`) that has it, and baselines."""
        numbers = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
        ours, constant = np.full(len(self.rows), np.nan), np.full(len(self.rows), np.nan)
        for name, which in self.folds.items():
            if not name.startswith(kind) or name == LARGEST:
                continue
            ours[which] = self.by(Calibration(numbers[name]), which)
            constant[which] = self.baseline(sorted(set(range(len(self.rows))) - set(which)), which)
        return ours, constant

    def of_fold(self, name: str) -> tuple[Array, Array]:
        """Predictions of one fold's rows, and baselines."""
        which = self.folds[name]
        numbers = json.loads(LEFT_OUT.read_text(encoding="utf-8"))[name]
        kept = sorted(set(range(len(self.rows))) - set(which))
        return self.by(Calibration(numbers), which), self.baseline(kept, which)


def percent(value: float) -> str:
    """As the tables show it."""
    return f"{value * 100:.1f} %"


def line(name: str, ours: Array, constant: Array, published: Array) -> str:
    """A line of a table: how many, and the errors of both."""
    cells = [name, str(len(published))]
    for said in (ours, constant):
        error = np.abs(said / published - 1)
        cells += [percent(float(np.median(error))), percent(float(np.quantile(error, 0.9)))]
    return f"| {' | '.join(cells)} |\n"


TABLE = "| {} | rows | median | 90th percentile | baseline: median | 90th percentile |\n|---|---|---|---|---|---|\n"


def by_group(errors: Errors, ours: Array, constant: Array, key: Callable[[Row], str], title: str) -> str:
    """A table with a line for each group of rows, and one of all."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(errors.rows):
        groups.setdefault(key(row), []).append(i)
    text = TABLE.format(title)
    for name, which in sorted(groups.items()):
        text += line(name, ours[which], constant[which], errors.published[which])
    return text + line("all", ours, constant, errors.published)


ASKED = (0.05, 0.12)
"""Of the speed: the median error, and the 90th percentile, that a plan is to keep."""


def kind_of(row: Row) -> str:
    """What decides how well a row is predicted."""
    return "mixtures of experts, hybrids" if row.config.experts is not None else "dense models"


def gates(errors: Errors, ours: Array) -> str:
    """Whether the errors are as small as asked, and in which rows they are not."""
    wrong = np.abs(ours / errors.published - 1)
    middle, most = (float(np.quantile(wrong, part)) for part in (0.5, 0.9))
    text = f"Asked: a median of at most {percent(ASKED[0])}, a 90th percentile of at most {percent(ASKED[1])}. Found: "
    text += " and ".join(
        f"{percent(found)}, which {'holds' if found <= asked else 'does not hold'}"
        for found, asked in zip((middle, most), ASKED, strict=True)
    )
    beyond = [errors.rows[i] for i in np.flatnonzero(wrong > ASKED[1])]
    counts = Counter(f"{row.source}, {kind_of(row)}" for row in beyond)
    listed = "; ".join(f"{count} of {name}" for name, count in counts.most_common())
    return f"{text}. Rows beyond {percent(ASKED[1])}: {len(beyond)}: {listed}.\n"


def worst(errors: Errors, ours: Array, count: int = 15) -> str:
    """The rows with the largest errors."""
    error = ours / errors.published - 1
    text = "| row | published | predicted | error |\n|---|---|---|---|\n"
    for i in np.argsort(-np.abs(error), kind="stable")[:count]:
        row = errors.rows[i]
        text += (
            f"| {row.source}: {row.name} | {errors.published[i]:,.0f} | {ours[i]:,.0f} | {error[i] * 100:+.0f} % |\n"
        )
    return text


def same_jobs(errors: Errors) -> str:
    """Rows that describe the same job, and differ: what no prediction from these columns can explain."""
    groups: dict[object, list[int]] = {}
    for i, row in enumerate(errors.rows):
        key = (row.config, row.sequence, row.layout, row.family, row.stack, row.products)
        groups.setdefault(key, []).append(i)
    text, apart = "| job | published | apart |\n|---|---|---|\n", []
    for which in groups.values():
        speeds = errors.published[which]
        if len(which) > 1:
            apart.append(float(speeds.max() / speeds.min() - 1))
        if len(which) > 1 and speeds.max() / speeds.min() > 1.05:
            both = " and ".join(f"{one:,.0f}" for one in speeds)
            text += f"| {errors.rows[which[0]].name} | {both} | {percent(speeds.max() / speeds.min() - 1)} |\n"
    if not apart:
        return ""
    middle = percent(float(np.median(apart)))
    says = f"{len(apart)} jobs stand in the file more than once; they differ by {middle} in the median"
    return f"{says}, and these by more than 5 %. No prediction from these columns meets both:\n\n{text}"


def several_layouts(errors: Errors) -> list[list[int]]:
    """Rows of the same job on as many of the same devices, where they have more than one layout."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(errors.rows):
        job = (row.model, row.sequence, row.family, row.layout.devices, row.products, row.source)
        groups.setdefault(job, []).append(i)
    return [which for which in groups.values() if len({errors.rows[i].layout for i in which}) > 1]


def choice(errors: Errors, ours: Array, which: Sequence[int]) -> tuple[Row, float]:
    """Of several layouts the one that is predicted fastest, and how much slower than the best it is."""
    chosen = errors.rows[which[int(ours[which].argmax())]]
    # The same layout may have been published twice: its best counts, as that of the others does.
    same = [i for i in which if errors.rows[i].layout == chosen.layout]
    return chosen, float(1 - errors.published[same].max() / errors.published[which].max())


def losses(errors: Errors, ours: Array) -> list[float]:
    """For each job with several layouts how much slower than the best the one is that is predicted fastest."""
    return [choice(errors, ours, which)[1] for which in several_layouts(errors)]


def ranking(errors: Errors, ours: Array) -> str:
    """For each job with several layouts the one that is predicted fastest."""
    text = "| job | layouts | predicted fastest | slower than the best by |\n|---|---|---|---|\n"
    for which in several_layouts(errors):
        one, loss = choice(errors, ours, which)
        name = (
            f"{one.model}, {one.layout.devices} x {one.family}, {one.products or 'bfloat16'}, {one.sequence} positions"
        )
        layouts = len({errors.rows[i].layout for i in which})
        text += f"| {name} | {layouts} | {described(one)} | {percent(loss)} |\n"
    lost = losses(errors, ours)
    if not lost:
        return ""
    return f"{sum(one <= 0.03 for one in lost)} of {len(lost)} first, or within 3 % of the best.\n\n{text}"


def described(row: Row) -> str:
    """A layout in a few words."""
    one = row.layout
    return f"{one.mesh}, micro-batch {one.micro_batch}" + (
        f", {one.stages_per_rank} stages a rank" if one.stages_per_rank > 1 else ""
    )


@cache
def with_storages(config: Config, rows: int, sequence: int, layers: int) -> Profile:
    """The traced step of a model with so many layers, as FSDP2 and autocast keep its tensors."""
    tokens = torch.zeros(rows, sequence, dtype=torch.long)
    build = partial(Decoder, replace(config, layers=layers))
    return trace(Work(build, (tokens, tokens), lambda model, batch: model(*batch), precision="bf16-mixed"))


def memory_gib(row: Row) -> float:
    """The most that a rank holds, GiB: traced with two and with three layers, which says what each further one adds."""
    one, sizes = row.layout, []
    for layers in (2, 3):
        profile = checkpointed(with_storages(row.config, one.micro_batch, row.sequence, layers), one.checkpointing)
        sizes.append(fullest(memory(profile, one)).total / 2**30)
    return sizes[0] + (row.config.layers - 2) * (sizes[1] - sizes[0])


def memories(rows: Iterable[Row]) -> str:
    """A table of memory."""
    text, errors = "| row | published | predicted | error |\n|---|---|---|---|\n", []
    for row in rows:
        if row.memory_gib is not None:
            said = memory_gib(row)
            errors.append(abs(said / row.memory_gib - 1))
            error = f"{(said / row.memory_gib - 1) * 100:+.0f} %"
            text += f"| {row.name} | {row.memory_gib:.1f} GiB | {said:.1f} GiB | {error} |\n"
    if not errors:
        return ""
    middle, most = (percent(float(np.quantile(errors, part))) for part in (0.5, 0.9))
    return f"Median {middle}, 90th percentile {most}.\n\n{text}"


def page() -> str:
    """The page of the rows that the repository has."""
    errors = Errors(read())
    sources = len({row.source for row in errors.rows})
    fitted = shipped().numbers
    free = sum(abs(fitted[name] - value) > 0.02 * value for name, (value, _, _) in PRIORS.items())
    parts = [HEAD.format(rows=len(errors.rows), sources=sources, numbers=len(PRIORS), free=free)]
    ours, constant = errors.left_out("source")
    table = by_group(errors, ours, constant, lambda row: row.source, "source that was left out").rpartition("| all |")[
        0
    ]
    table += line("llm-foundry, all of it", *errors.of_fold(LARGEST), errors.published[errors.folds[LARGEST]])
    table += line("all, a source each", ours, constant, errors.published)
    parts += ["\n## Speed, without the row's source\n\n", table]
    ours, constant = errors.left_out("model")
    table = by_group(errors, ours, constant, lambda row: f"{row.source}, {row.family}", "source and device")
    parts += [
        "\n## Speed, without the row's model\n\n",
        "Each row is predicted without all rows of its model.\n\n",
        table,
    ]
    parts += [
        "\n",
        by_group(errors, ours, constant, kind_of, "models").rpartition("| all |")[0],
        "\n",
        gates(errors, ours),
    ]
    parts += ["\nThe largest errors:\n\n", worst(errors, ours)]
    parts += ["\n## Rows that contradict each other\n\n", same_jobs(errors)]
    parts += ["\n## The best layout\n\n", ranking(errors, ours)]
    parts += ["\n## Memory\n\n", memories(errors.rows)]
    return "".join(parts)


def other(path: Path) -> str:
    """The tables of another file: its rows by the shipped calibration, and the baseline of the repository's rows."""
    errors, known = Errors(read(path)), Errors(read())
    everything = list(range(len(errors.rows)))
    ours = errors.by(shipped(), everything)
    constant = errors.baseline(list(range(len(known.rows))), everything, known)
    table = by_group(errors, ours, constant, lambda row: f"{row.source}, {row.family}", "source and device")
    parts = [
        table,
        gates(errors, ours),
        worst(errors, ours),
        same_jobs(errors),
        ranking(errors, ours),
        memories(errors.rows),
    ]
    return "\n".join(part for part in parts if part)


def columns(path: Path) -> set[str]:
    """The names of a file's columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return set(csv.DictReader(file).fieldnames or ())


def main() -> int:
    """Writes the page, or prints the tables of another file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=PAGE)
    given = parser.parse_args()
    if given.file is None:
        given.out.write_text(page(), encoding="utf-8")
        print(given.out)
        return 0
    if missing := columns(PUBLISHED) - columns(given.file):
        print(f"{given.file} has no column {', '.join(sorted(missing))}", file=sys.stderr)
        return 2
    print(other(given.file), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
