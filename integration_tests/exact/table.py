"""Kills runs at random moments, all over the matrix of jobs, ranks and workers, and prints whether each ended alike.

`nox -s exact -- --moments 100 --seed 1 --output table.md`; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration_tests.exact.cases import JOBS, Case, Starter, cold, run, warm
from integration_tests.exact.compare import differences
from integration_tests.exact.disturb import AIMS, PHASES, Kill, disturbed, draw
from integration_tests.exact.references import References

__all__ = ["Row", "main", "markdown", "plan"]

WAYS = ("fairlead fit", "torchrun")
_HEAD = """# Killed at random, and equal

Written by `nox -s exact`. Each run was killed by SIGKILL, all of its ranks or one of them, some of them twice, and
started again until it ended; the columns from *start-up* to *end* count the kills by what the run was doing. *Equal*
says that the weights, optimizers, schedules and loops of the last checkpoint, the state of each rank, `metrics.csv`,
the points in TensorBoard and the choice of the best checkpoints are those of a run that was not disturbed, bit for bit.
[Exactness](../exactness.md) says what is promised.

"""


@dataclass
class Row:
    """What was tried of one case.

    Args:
        case: The case.
        way: How the ranks were started.
        phases: The kills by the phase in which they fell.
        runs: Runs that were killed, some of them twice.
        differences: What was not equal, by run.
    """

    case: Case
    way: str
    phases: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    differences: list[str] = field(default_factory=list)


def plan(
    generator: random.Random, jobs: Sequence[str], ranks: Sequence[int], workers: Sequence[int], ways: Sequence[str]
) -> Iterator[tuple[Case, str, list[Kill]]]:
    """Endlessly: which case is killed next, how it is started, and when; every third run is killed twice in a row.

    Cases, ways and aims come in turns, so that a short table covers all of them; everything else is random. Four ranks
    are forked: with the imports of `fairlead fit`, a start takes minutes on two cores.
    """
    cases = [Case(job, count, processes) for count, processes, job in itertools.product(ranks, workers, jobs)]
    generator.shuffle(cases)
    aims = itertools.cycle(AIMS)
    for number, case in enumerate(itertools.cycle(cases)):
        possible = [way for way in ways if case.ranks <= 2 or way == "torchrun"] or list(ways)
        kills = [draw(generator, case, next(aims)) for _ in range(2 if number % 3 == 2 else 1)]
        yield case, possible[(number // len(cases) + number) % len(possible)], kills


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the table."""
    parser = argparse.ArgumentParser(prog="table.py", description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=100, help="kills in all (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the ranks are started")
    parser.add_argument("--output", type=Path, help="write the table there as Markdown")
    parser.add_argument("--keep", type=Path, help="keep the runs that differ in this folder")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    rows: dict[tuple[Case, str], Row] = {}
    with tempfile.TemporaryDirectory(prefix="fairlead-exact-") as folder:
        table = _Table(Path(folder), {"fairlead fit": cold, "torchrun": warm}, chosen.keep)
        left = chosen.moments
        planned = plan(random.Random(chosen.seed), chosen.jobs, chosen.ranks, chosen.workers, chosen.ways)
        # Bounded: where nothing works, no kill falls.
        for case, way, kills in itertools.islice(planned, 2 * chosen.moments):
            row = rows.setdefault((case, way), Row(case, way))
            left -= table.add(row, kills[:left])
            if left <= 0:
                break
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (JOBS.index(key[0].job), str(key[0]), key[1]))]
    text = markdown(ordered, chosen.seed, time.monotonic() - began)
    print(f"\n{text}")
    if chosen.output is not None:
        chosen.output.write_text(text, encoding="utf-8")
    return 1 if any(row.differences for row in ordered) else 0


class _Table:
    """Tries one run after the other."""

    def __init__(self, folder: Path, starters: dict[str, Starter], keep: Path | None) -> None:
        self.folder = folder
        self.starters = starters
        self.keep = keep
        self._references = {way: References(folder / way.replace(" ", "-"), s) for way, s in starters.items()}
        self._number = 0

    def add(self, row: Row, kills: list[Kill]) -> int:
        """Kills one run and compares it; the number of kills that fell while it ran."""
        self._number += 1
        cwd = self.folder / f"run-{self._number:03}"
        fell: list[str] = []
        found: list[str] = []
        try:
            reference = self._references[row.way].of(row.case)
            starter = self.starters[row.way]
            fell = disturbed(row.case, cwd, starter, kills, seconds=reference.seconds, steps=reference.steps)
            found = differences(reference.run, row.case.directory(cwd))
            if found:
                found.append(self._control(row, reference.run))
        except Exception as error:  # an assertion, or a file that is not there: the table goes on, and says it
            found = [f"{type(error).__name__}: {error}", traceback.format_exc(limit=-2)]
        row.runs += 1
        row.phases.update(fell)
        row.differences += (
            [f"run {self._number}, {', '.join(map(str, kills))} (fell in {fell}):", *found] if found else []
        )
        verdict = "NOT EQUAL" if found else "equal"
        print(
            f"{self._number:4} {row.case} by {row.way}: killed in {', '.join(fell) or 'no phase'}: {verdict}",
            flush=True,
        )
        for line in found:
            print(f"       {line}", flush=True)
        if found and self.keep is not None:
            shutil.copytree(cwd, self.keep / cwd.name, dirs_exist_ok=True)
        shutil.rmtree(cwd, ignore_errors=True)
        return len(fell)

    def _control(self, row: Row, reference: Path) -> str:
        """Whether two undisturbed runs are equal at all."""
        cwd = self.folder / f"control-{self._number:03}"
        run(row.case, cwd, self.starters[row.way])
        again = differences(reference, row.case.directory(cwd))
        return f"two undisturbed runs differ as well: {again[0]}" if again else "two undisturbed runs are equal"


def markdown(rows: Sequence[Row], seed: int, seconds: float) -> str:
    """The table, and below it what was not equal."""
    heads = ["job", "ranks", "workers", "started by", "runs", *PHASES, "equal"]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.phases)
        case = row.case
        counts = [str(row.phases[phase] or "") for phase in PHASES]
        cells = [
            case.job,
            case.ranks,
            case.workers,
            f"`{row.way}`",
            row.runs,
            *counts,
            "NO" if row.differences else "yes",
        ]
        lines.append(" | ".join(map(str, cells)))
    unequal = sum(bool(row.differences) for row in rows)
    ends = [str(total[phase]) for phase in PHASES]
    last = ["all", "", "", "", str(sum(row.runs for row in rows)), *ends, f"{unequal} are not" if unequal else "yes"]
    lines.append(" | ".join(last))
    day = datetime.datetime.now(datetime.UTC).date()
    text = _HEAD + "\n".join(f"| {line} |" for line in lines)
    text += f"\n\n{sum(total.values())} kills, seed {seed}, {seconds / 60:.0f} minutes, {day}.\n"
    for row in rows:
        text += "".join(f"\n    {row.case}: {line}" for line in row.differences)
    return text


if __name__ == "__main__":
    sys.exit(main())
