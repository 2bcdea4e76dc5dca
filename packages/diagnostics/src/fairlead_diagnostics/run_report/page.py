"""The page of a report: what is read of the runs, in words, tables and charts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import jinja2
import vl_convert

from fairlead import yaml
from fairlead_diagnostics.run_report.charts import (
    COLORS,
    ORDER,
    Chart,
    curve_charts,
    rank_chart,
    step_chart,
    time_chart,
    timeline_chart,
)
from fairlead_diagnostics.run_report.content import RunContent
from fairlead_runs.commands.runs import differing_settings
from fairlead_runs.commands.texts import in_words
from fairlead_runs.describe import duration
from fairlead_runs.goodput import LOST, OTHER, QUEUE, START_UP, StartTimes
from fairlead_runs.predicted import Comparison, shown
from fairlead_runs.step_times import STEP_PARTS, RankTimes

MEANINGS: Final = {
    "data": "waiting for the next batch",
    "forward": "the forward pass and the loss",
    "backward": "the backward pass",
    "compute": "forward and backward passes, which this engine does not tell apart",
    "communication": "waiting for gradients of other ranks, beyond the backward pass",
    "optimizer": "clipping and the optimizer's step",
    "logging": "callbacks, loggers and the loop's own code",
    "first-step": "the first step of each start: compilation, caches, workers",
    "validation": "validations and sanity checks",
    "saving": "checkpoints, as far as the training waits for them",
    START_UP: "from the start of a job to its training",
    QUEUE: "waiting for the scheduler, before the first start and between starts",
    LOST: "what was done after the last checkpoint before a failure, and the time until it was noticed",
    OTHER: "everything else: phases of the loop's own, the end of a start, what a killed one had not recorded yet",
}
_MOOD: Final = {"running": "good", "finished": "good", "failed": "bad", "interrupted": "bad", "stopped": "warn"}
_WORST: Final = 10
_NOTABLE: Final = 0.02
_SNIPPET: Final = "window.vegaEmbed = vegaEmbed;"


def page(runs: Sequence[RunContent], now: float) -> str:
    """The page about these runs, as HTML that needs nothing else.

    Example:
        >>> Path("report.html").write_text(page([read_content(Path("runs/digits"))], time.time()))  # doctest: +SKIP
    """
    charts = _Charts()
    several = len(runs) > 1
    template = _environment().from_string((resources.files(__package__) / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=f"{len(runs)} runs compared" if several else runs[0].run.name,
        made=f"Fairlead's report of {time.strftime('%Y-%m-%d %H:%M', time.localtime(now))}",
        best=_best(runs) if several else None,
        compared=_compared(runs) if several else None,
        speedups=list(speedups(runs)) if several else (),
        differences=_differences(runs) if several else (),
        curves=charts.add(curve_charts(runs)),
        runs=[_run(run, charts, now) for run in runs],
        specs=charts.json(),
        vega=_vega(),
    )


class _Charts:
    """The charts of a page, numbered as they come."""

    def __init__(self) -> None:
        self._specs: dict[int, Mapping[str, Any]] = {}

    def add(self, charts: Iterator[Chart] | Sequence[Chart | None]) -> list[tuple[int, Chart]]:
        numbered = []
        for chart in charts:
            if chart is not None:
                number = len(self._specs)
                if chart.spec:
                    self._specs[number] = chart.spec
                numbered.append((number, chart))
        return numbered

    def json(self) -> str:
        """All specifications, for a script: no text in them ends it."""
        text = json.dumps(self._specs, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def _vega() -> str:
    return vl_convert.javascript_bundle(_SNIPPET, vl_version="6.1").replace("</script", "<\\/script")


def _run(run: RunContent, charts: _Charts, now: float) -> dict[str, Any]:
    went = run.goodput
    measured = next((start.ranks for start in reversed(went.starts) if any(r.mean_s for r in start.ranks)), ())
    settings = [(name, _shown(one.get("value")), str(one.get("reason", ""))) for name, one in run.settings.items()]
    return {
        "name": run.run.name,
        "path": str(run.run.path),
        "state": run.run.state + (f" ({run.run.reason})" if run.run.reason else ""),
        "mood": _MOOD.get(run.run.state, "soft"),
        "numbers": list(_numbers(run, measured)),
        "findings": run.findings,
        "timeline": charts.add([timeline_chart(run)] if went.starts else []),
        "went": charts.add([time_chart(run), step_chart(measured)] if went.seconds else []),
        "parts": list(_parts(run)),
        "starts": [_start(one, wait) for one, wait in zip(went.starts, went.waits, strict=True)],
        "ranks": _ranks(measured),
        "spread": _spread(measured),
        "rank_charts": charts.add([rank_chart(measured)]),
        "planned": run.comparison.sentence() if run.comparison is not None else "",
        "planned_rows": list(_planned(run.comparison)),
        "exactness": list(run.exact_words),
        "settings": [row for row in settings if row[2] != "the default"],
        "defaults": [row for row in settings if row[2] == "the default"],
        "environment": list(_provenance(run.provenance)),
        "more": list(_more(run.provenance)),
    }


def _numbers(run: RunContent, measured: Sequence[RankTimes]) -> Iterator[tuple[str, str]]:
    went = run.goodput
    if went.share is not None:
        yield "goodput", f"{went.share:.1%}"
    yield "steps", str(run.run.step if run.run.step is not None else 0)
    if run.run.best is not None:
        yield f"best {run.run.best.metric}", f"{run.run.best.value:.4g}"
    yield "time in all", in_words(went.total_s)
    yield "starts", str(run.run.starts)
    means = [one.mean_s for one in measured if one.mean_s]
    if means:
        mean = statistics.median(means)
        yield "a step", duration(mean)
        waits = statistics.median(one.shares.get("data", 0.0) for one in measured if one.mean_s)
        yield "data wait", f"{waits:.1%}"
    memory = max((one.facts.get("device_memory") or one.facts.get("host_memory", 0.0) for one in measured), default=0.0)
    if memory:
        of = "device" if any("device_memory" in one.facts for one in measured) else "process"
        yield f"memory of a {of}", f"{memory / 2**30:.2f} GiB"


def _parts(run: RunContent) -> Iterator[dict[str, str]]:
    total = run.goodput.total_s
    for part in ORDER:
        seconds = run.goodput.seconds.get(part, 0.0)
        if seconds >= 0.001:
            yield {
                "name": part,
                "seconds": f"{seconds:.3f}",
                "time": _time(seconds),
                "share": f"{seconds / total:.1%}",
                "color": COLORS[part],
                "meaning": MEANINGS[part],
            }


def _planned(found: Comparison | None) -> Iterator[tuple[str, str, str, str]]:
    for one in found.pairs if found is not None else ():
        error = f"{one.error:+.1%}" if one.error is not None else "-"
        yield one.name, shown(one.predicted, one.unit), shown(one.measured, one.unit), error


def _start(start: StartTimes, wait: float) -> tuple[str, ...]:
    steps = "-"
    if start.first_step is not None:
        steps = f"{start.first_step} to {start.last_step}"
        if start.continued_step != start.last_step and start.last_step is not None and start.continued_step is not None:
            steps += f", of which {start.last_step - start.continued_step} were lost"
    return (
        str(start.number),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began)),
        _time(start.ended - start.began),
        _time(wait) if wait else "-",
        str(start.world_size or "-"),
        steps,
        ": ".join(text for text in (start.end or "no report of its end", start.why[:200]) if text),
    )


def _ranks(ranks: Sequence[RankTimes]) -> dict[str, Any] | None:
    """The ranks, or the slowest of many, or the nodes where there are several."""
    known = [one for one in ranks if one.mean_s]
    if not known:
        return None
    shown = sorted(known, key=lambda one: -(one.own_s or 0.0))[:_WORST] if len(known) > _WORST else known
    parts = [part for part in (*STEP_PARTS, "communication") if any(one.shares.get(part) for one in shown)]
    rows = []
    for one in shown:
        cells = [duration(one.mean_s or 0.0), *map(duration, (one.own_s or 0.0, one.sd_s, one.max_s))]
        cells += [f"{one.shares.get(part, 0.0):.1%}" for part in parts]
        rows.append((f"{one.rank} ({one.host})", cells))
    of = "rank" if shown is known else f"the {len(shown)} slowest of {len(known)} ranks"
    return {"of": of, "columns": ["a step", "own work", "spread", "longest", *parts], "rows": rows}


def _spread(ranks: Sequence[RankTimes]) -> str:
    known = [one for one in ranks if one.own_s]
    if len(known) < 2:
        return ""
    own = sorted(one.own_s or 0.0 for one in known)
    middle = statistics.median(own)
    text = f"Own work of a rank in a step, without its waiting for others: median {duration(middle)}, "
    text += f"from {duration(own[0])} to {duration(own[-1])}."
    nodes: dict[str, list[float]] = {}
    for one in known:
        nodes.setdefault(one.host, []).append(one.own_s or 0.0)
    if len(nodes) > 1:
        slowest = max(nodes, key=lambda host: statistics.median(nodes[host]))
        longer = statistics.median(nodes[slowest]) / middle - 1
        if longer >= _NOTABLE:
            text += f" The slowest of {len(nodes)} nodes is {slowest}: {longer:.1%} longer than the median rank."
    return text


def _provenance(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    git = found.get("git") or {}
    if git.get("commit"):
        yield "commit", f"{git['commit']}{' with changes' if git.get('dirty') else ''}"
    for name in ("host", "platform", "cwd", "scheduler_job"):
        if found.get(name):
            yield name.replace("_", " "), _shown(found[name])
    if found.get("python"):
        yield "python", str(found["python"].get("version"))
    if found.get("argv"):
        yield "command", " ".join(map(str, found["argv"]))
    for name, value in (found.get("hardware") or {}).items():
        yield name.replace("_", " "), _shown(value)
    wanted = ("torch", "lightning", "fairlead", "transformers", "deepspeed", "numpy")
    pinned = dict(text.split("==", 1) for text in found.get("packages", ()) if "==" in text)
    if versions := [f"{name} {pinned[name]}" for name in wanted if name in pinned]:
        yield "packages", ", ".join(versions)


def _more(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if found.get("packages"):
        yield f"{len(found['packages'])} packages", "\n".join(found["packages"])
    if found.get("environ"):
        yield "environment variables", "\n".join(f"{name}={value}" for name, value in found["environ"].items())
    diff = (found.get("git") or {}).get("diff")
    if diff:
        yield "changes since the commit", str(diff)[:200_000]


# -- several runs


def _compared(runs: Sequence[RunContent]) -> dict[str, Any]:
    columns = ["state", "step", "best", "goodput", "a step", "ranks", "starts"]
    rows = []
    for run in runs:
        step = _step_s(run)
        share = run.goodput.share
        rows.append(
            (
                run.run.name,
                [
                    run.run.state,
                    str(run.run.step),
                    str(run.run.best) if run.run.best is not None else "-",
                    f"{share:.1%}" if share is not None else "-",
                    duration(step) if step is not None else "-",
                    str(run.goodput.starts[-1].world_size or "-") if run.goodput.starts else "-",
                    str(run.run.starts),
                ],
            )
        )
    return {"columns": columns, "rows": rows}


def _best(runs: Sequence[RunContent]) -> str | None:
    measured = [run.run for run in runs if run.run.best is not None]
    metrics = {run.best.metric for run in measured if run.best is not None}
    if len(metrics) != 1 or len(measured) < 2:
        return None
    best = min(measured, key=lambda run: run.best.rank if run.best is not None else 0.0)
    return f"The best by {metrics.pop()} is {best.name}: {best.best}."


def _step_s(run: RunContent) -> float | None:
    means = [rank.mean_s for start in run.goodput.starts[-1:] for rank in start.ranks if rank.mean_s]
    return statistics.median(means) if means else None


def speedups(runs: Sequence[RunContent]) -> Iterator[str]:
    """How much faster each run with more ranks is than the one with the fewest, and what the rest goes into.

    Of runs whose batch of a rank is the same, samples a second grow with the ranks and fall with a step's time.
    """
    measured = [
        (run, run.goodput.starts[-1].world_size or 1, step)
        for run in runs
        if run.goodput.starts and (step := _step_s(run)) is not None
    ]
    if len({ranks for _, ranks, _ in measured}) < 2:
        return
    base, fewest, base_s = min(measured, key=lambda one: one[1])
    for run, ranks, step in sorted(measured, key=lambda one: one[1]):
        if ranks == fewest:
            continue
        faster = ranks / fewest * base_s / step
        waits = statistics.median(one.shares.get("communication", 0.0) for one in run.goodput.starts[-1].ranks)
        text = f"With the same batch on each rank, {ranks} ranks of {run.run.name} give {faster:.2f} times the samples "
        text += f"a second of {fewest} of {base.run.name} ({faster * fewest / ranks:.0%} of the ideal)"
        yield text + (f": {waits:.0%} of a step waits for gradients." if waits >= 0.01 else ".")


def _differences(runs: Sequence[RunContent]) -> list[tuple[str, list[str]]]:
    differing = differing_settings([run.run for run in runs])
    names = sorted({name for one in differing.values() for name in one})
    return [(name, [_shown(differing[run.run.name].get(name)) for run in runs]) for name in names]


def _shown(value: Any) -> str:
    return "-" if value is None else yaml.dump(value).removesuffix("\n").removesuffix("\n...")[:500]


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
