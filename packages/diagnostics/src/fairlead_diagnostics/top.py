"""`fairlead top`: a run while it trains, in a terminal; it only reads the run directory."""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_diagnostics.run_report.charts import COLORS, ORDER
from fairlead_runs import RunState, state
from fairlead_runs.commands.status import find_stuck, stuck_line
from fairlead_runs.commands.texts import ago, facts, find_run, headline, in_words
from fairlead_runs.goodput import goodput
from fairlead_runs.pace import pace
from fairlead_runs.step_findings import step_findings
from fairlead_runs.step_times import RankTimes, read_times
from fairlead_runs.waiting import grouped, rank_ranges

_TAIL: Final = 1 << 17
"""Bytes of `metrics.csv` that are read: its newest rows."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_METRICS: Final = 8
_GROUPS: Final = 8
_GOODPUT_S: Final = 15.0
"""Seconds between two looks at the whole history: it grows with the run."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead top`."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one in runs/")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=2.0, help="seconds between two looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print one view and end, as without a terminal")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Shows a run until Ctrl-C, which leaves the run alone, or until it has ended."""
    if not math.isfinite(arguments.interval) or arguments.interval < 0.1:
        raise ConfigError(f"--interval {arguments.interval:g} is too short", where="--interval", fix="--interval 2")
    path = find_run(arguments.run, session)
    console = Console(file=session.stdout)
    view = _View(path)
    if arguments.once or not console.is_terminal:
        console.print(view.frame())
        return 0
    try:
        with Live(view.frame(), console=console, auto_refresh=False, screen=True) as live:
            while view.run.state == "running":
                time.sleep(arguments.interval)
                live.update(view.frame(), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(view.frame())  # the last view stays, where the screen was
    return 0


class _View:
    """What is shown of one run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._good: tuple[float, float | None] = (-math.inf, None)
        self.run: RunState = state(path)

    def frame(self) -> Group:
        """One look at the run."""
        now = time.time()
        run = self.run = state(self._path, now=now)
        how = pace(run, now)
        ranks = read_times(self._path, max((beat.start for beat in run.ranks), default=run.starts))
        parts: list[object] = [Text(headline(run, None, None), style="bold")]
        if how.max_steps and run.step is not None:
            left = f" {run.step}/{how.max_steps}"
            left += f", {in_words(how.left_s)} left" if how.left_s and run.state == "running" else ""
            bar = Table.grid(expand=True)
            bar.add_row(ProgressBar(total=how.max_steps, completed=run.step), Text(left))
            parts.append(bar)
        lines = facts(run, how, None, None, now)
        table = Table.grid(padding=(0, 2))
        for name in ("step", "speed", "saved", "running"):
            if name in lines and not (name == "step" and how.max_steps):
                table.add_row(Text(name, style="dim"), lines[name])
        for name, value in self._more(ranks, now):
            table.add_row(Text(name, style="dim"), value)
        parts += [table, *_metrics(self._path / "metrics.csv"), *_step(ranks)]
        if run.ranks:
            parts.append(_groups(run, now))
        if (stuck := find_stuck(run, now)) is not None:
            parts.append(Text(stuck_line(stuck, now, running=run.state == "running"), style="bold red"))
        parts += [Text(f"{finding.what} ({finding.why})", style="yellow") for finding in step_findings(ranks)]
        return Group(*parts)  # type: ignore[arg-type]

    def _more(self, ranks: Sequence[RankTimes], now: float) -> list[tuple[str, str]]:
        if now - self._good[0] > _GOODPUT_S:
            self._good = (now, goodput(self._path).share)
        found = [("goodput", f"{self._good[1]:.1%}")] if self._good[1] is not None else []
        known = [one for one in ranks if one.mean_s]
        if known:
            recent = [one.recent.step_s or one.mean_s or 0.0 for one in known]
            means = statistics.median(one.mean_s or 0.0 for one in known)
            step = f"{statistics.median(recent) * 1000:.4g} ms now, {means * 1000:.4g} ms on average"
            found.append(("a step", step))
            waits = [one.shares.get("data", 0.0) for one in known]
            found.append(("data wait", f"{statistics.median(waits):.1%} of a step"))
        for name, of in (("device_memory", "device"), ("host_memory", "process")):
            most = max((one.facts.get(name, 0.0) for one in ranks), default=0.0)
            if most:
                found.append(("memory", f"{most / 2**30:.2f} GiB on the fullest {of}"))
                break
        return found


def _metrics(file: Path) -> list[Table]:
    """The newest values of each metric, with what came before."""
    found: dict[str, list[float]] = {}
    for columns, row in _tail(file):
        for name, cell in zip(columns, row, strict=True):
            if cell and name not in ("step", "epoch"):
                try:
                    value = float(cell)
                except ValueError:  # a text that somebody logged
                    continue
                found.setdefault(name, []).append(value)
    if not found:
        return []
    table = Table.grid(padding=(0, 2))
    for name in sorted(found, key=lambda name: ("loss" not in name, name))[:_METRICS]:
        table.add_row(Text(name, style="dim"), f"{found[name][-1]:.5g}", Text(sparkline(found[name]), style="cyan"))
    return [table]


def _tail(file: Path) -> list[tuple[list[str], list[str]]]:
    try:
        with file.open("rb") as stream:
            columns = next(csv.reader([stream.readline().decode(errors="replace")]), [])
            size = stream.seek(0, io.SEEK_END)
            at = max(stream.tell() - _TAIL, 0)
            stream.seek(at)
            text = stream.read(min(size, _TAIL)).decode(errors="replace")
    except OSError:
        return []
    rows = csv.reader(text.splitlines()[1:])  # the header, or a row that was cut
    return [(columns, row) for row in rows if len(row) == len(columns)]


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The last values as a line of bars, the lowest at the bottom.

    Example:
        >>> sparkline([1.0, 2.0, 3.0])
        '▁▄█'
    """
    shown = [value for value in values if math.isfinite(value)][-8 * width :]
    if not shown:
        return ""
    each = max(1, math.ceil(len(shown) / width))
    means = [statistics.fmean(shown[at : at + each]) for at in range(0, len(shown), each)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) / span * (len(_BARS) - 1)))] for value in means)


def _step(ranks: Sequence[RankTimes], width: int = 60) -> list[Text]:
    """What a step is made of, as a bar with its parts."""
    known = [one for one in ranks if one.mean_s]
    if not known:
        return []
    shares = {part: statistics.fmean(one.shares.get(part, 0.0) for one in known) for part in ORDER}
    bar, names = Text("step  "), Text("      ")
    for part in ORDER:
        if shares[part] >= 0.005:
            bar.append("█" * max(1, round(shares[part] * width)), style=COLORS[part])
            names.append(f"{part} ", style=COLORS[part])
            names.append(f"{shares[part]:.0%}  ")
    return [bar, names]


def _groups(run: RunState, now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("ranks", "step", "phase", "last heartbeat", "stands in"):
        table.add_column(name)
    groups = grouped(run.ranks)
    for group in groups[:_GROUPS]:
        first = group[0]
        seen = ago(now - max(beat.time for beat in group))
        table.add_row(
            rank_ranges(beat.rank for beat in group), str(first.step), first.phase, seen, first.location or "-"
        )
    if len(groups) > _GROUPS:
        table.add_row(f"and {len(groups) - _GROUPS} more groups: fairlead status --json", "", "", "", "")
    return table
