"""The charts of a report, as Vega-Lite specifications without colors of the page: `page.html` adds those."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fairlead_diagnostics.run_report.content import RunContent
from fairlead_runs.goodput import LOST, OTHER, PARTS, QUEUE, START_UP
from fairlead_runs.step_times import RankTimes

SCHEMA: Final = "https://vega.github.io/schema/vega-lite/v6.json"
COLORS: Final = {
    "data": "#e8a33d",
    "forward": "#2f7ebc",
    "backward": "#1f5a92",
    "compute": "#2a6cab",
    "communication": "#c2578a",
    "optimizer": "#4aa3a2",
    "logging": "#8aa0b4",
    "first-step": "#7d6bb5",
    "validation": "#9a86d1",
    "saving": "#8c6d46",
    START_UP: "#c9b458",
    QUEUE: "#b9bec5",
    LOST: "#cf3f3f",
    OTHER: "#8d9299",
}
"""The color of each part of the time, the same everywhere on the page."""
ORDER: Final = (*PARTS, START_UP, QUEUE, LOST, OTHER)
_STARTS: Final = 12
_NODES: Final = 12
_PREFIX: Final = re.compile(r"^(train|training|val|valid|validation|eval|test)[/_.]")
_SUFFIX: Final = re.compile(r"_(step|epoch)$")
_UNITS: Final = (("second", 1, (1, 2, 5, 10, 30)), ("minute", 60, (1, 2, 5, 10, 30)), ("hour", 3600, (1, 3, 6, 12)))
_TICKS: Final = [(step * size, unit, step) for unit, size, steps in _UNITS for step in steps]
"""Distances of ticks on an axis of times: seconds, the unit and how many of it."""
_KINDS: Final = {
    "start": ("triangle-right", "#4aa3a2"),
    "finished": ("circle", "#3a9d5d"),
    "checkpoint": ("triangle-down", "#8c6d46"),
    "signal": ("wedge", "#e8a33d"),
    "stop": ("square", "#e8a33d"),
    "requeue": ("triangle-up", "#7d6bb5"),
    "failure": ("cross", "#cf3f3f"),
    "hang": ("diamond", "#cf3f3f"),
    "killed": ("cross", "#8d9299"),
}


@dataclass(frozen=True)
class Chart:
    """One chart: its heading, its specification, and a sentence that says what is in it."""

    title: str
    spec: Mapping[str, Any] = field(repr=False)
    text: str = ""


def curve_charts(runs: Sequence[RunContent]) -> Iterator[Chart]:
    """Two charts for each group of metrics, as `train/loss` and `val/loss`: by step, and by time."""
    groups: dict[str, list[tuple[RunContent, str]]] = {}
    for run in runs:
        for name in run.curves:
            groups.setdefault(_SUFFIX.sub("", _PREFIX.sub("", name)), []).append((run, name))
    for group in sorted(groups, key=lambda name: (name != "loss", name)):
        members = groups[group]
        values = []
        for run, name in members:
            for point in run.curves[name].points:
                when = run.clock.when(point.step)
                row: dict[str, Any] = {"step": point.step, "value": _short(point.mean), "metric": name}
                if len(runs) > 1:
                    row["run"] = run.run.name
                if when is not None:
                    row["time"] = round(when * 1000)
                if point.low != point.high:
                    row |= {"low": _short(point.low), "high": _short(point.high)}
                values.append(row)
        bad = sum(run.curves[name].not_finite for run, name in members)
        text = f"{bad} values are infinite or not a number, and are not drawn" if bad else ""
        if not values:
            yield Chart(group, {}, text)
            continue
        for axis, kind in (("step", "quantitative"), ("time", "temporal")):
            own = values if axis == "step" else [row for row in values if "time" in row]
            if own:
                yield Chart(f"{group} by {axis}", _lines(own, axis, kind, several=len(runs) > 1), text)
                text = ""


def _lines(values: Sequence[Mapping[str, Any]], axis: str, kind: str, *, several: bool) -> dict[str, Any]:
    x: dict[str, Any] = {"field": axis, "type": kind, "title": axis if axis == "step" else None}
    x["axis"] = {"format": "~s", "tickMinStep": 1} if axis == "step" else _clock([row["time"] for row in values])
    y = {"type": "quantitative", "scale": {"zero": False}, "title": None, "axis": {"format": "~g"}}
    legend = {"orient": "bottom", "title": None, "symbolOpacity": 1}
    color = {"field": "run" if several else "metric", "type": "nominal", "legend": legend}
    encoding: dict[str, Any] = {"x": x, "color": color}
    if several:
        encoding["strokeDash"] = {"field": "metric", "type": "nominal", "legend": legend}
    tips = [{"field": name, "type": "nominal"} for name in (["run", "metric"] if several else ["metric"])]
    tips += [{"field": "step", "type": "quantitative"}, {"field": "value", "type": "quantitative"}]
    single = len(values) <= 40
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.6, "point": single, "tooltip": True},
            "encoding": {"y": {**y, "field": "value"}, "tooltip": tips},
        }
    ]
    if any("low" in row for row in values):
        band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.18, "clip": True}, "encoding": band})
    return {**_chart(values, height=240), "encoding": encoding, "layer": layers}


def timeline_chart(run: RunContent) -> Chart:
    """When the starts ran, and what happened."""
    last = run.goodput.starts[-1] if run.run.state == "running" else None
    starts: list[dict[str, Any]] = [
        {
            "start": f"start {one.number}",
            "from": round(one.began * 1000),
            "to": round(max(one.ended, one.began + 0.001) * 1000),
            "ended": one.end or ("runs" if one is last else "killed, without a report"),
            "steps": f"{one.first_step} to {one.last_step}" if one.first_step is not None else "none",
            "why": one.why[:200],
        }
        for one in run.goodput.starts
    ]
    moments = [
        {
            "start": f"start {one.start}",
            "time": round(one.time * 1000),
            "event": one.kind,
            "step": one.step,
            "what": one.text,
        }
        for one in run.moments
    ]
    kinds = [kind for kind in _KINDS if any(one["event"] == kind for one in moments)]
    kinds += sorted({str(one["event"]) for one in moments} - set(kinds))
    shapes = [_KINDS.get(kind, ("diamond", "#8d9299")) for kind in kinds]
    y = {"field": "start", "type": "nominal", "sort": None, "title": None}
    axis = _clock([one["from"] for one in starts] + [one["to"] for one in starts])
    spec = {
        **_chart([], height=min(640, 22 * len(starts) + 90)),
        "layer": [
            {
                "data": {"values": starts},
                "mark": {"type": "bar", "opacity": 0.28, "height": {"band": 0.7}, "color": "#4aa3a2"},
                "encoding": {
                    "x": {"field": "from", "type": "temporal", "title": None, "axis": axis},
                    "x2": {"field": "to"},
                    "y": y,
                    "tooltip": [{"field": name, "type": "nominal"} for name in ("start", "ended", "steps", "why")],
                },
            },
            {
                "data": {"values": moments},
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.95},
                "encoding": {
                    "x": {"field": "time", "type": "temporal", "title": None, "axis": axis},
                    "y": y,
                    "shape": _scale("event", kinds, [shape for shape, _ in shapes]),
                    "color": _scale("event", kinds, [color for _, color in shapes]),
                    "tooltip": [
                        {"field": "event", "type": "nominal"},
                        {"field": "time", "type": "temporal", "format": "%Y-%m-%d %H:%M:%S"},
                        {"field": "step", "type": "nominal"},
                        {"field": "what", "type": "nominal"},
                    ],
                },
            },
        ],
    }
    return Chart("What happened", spec)


def time_chart(run: RunContent) -> Chart:
    """Where the time went, of the run and, if they are few, of each start."""
    rows = [{"row": "the run", "part": part, "seconds": value} for part, value in run.goodput.seconds.items()]
    if 1 < len(run.goodput.starts) <= _STARTS:
        for one in run.goodput.starts:
            rows += [{"row": f"start {one.number}", "part": part, "seconds": s} for part, s in one.seconds.items()]
    return Chart("Where the time went", _stacked(rows, "seconds"))


def step_chart(ranks: Sequence[RankTimes]) -> Chart | None:
    """What a step is made of: the mean over the ranks."""
    known = [one for one in ranks if one.mean_s]
    if not known:
        return None
    seconds: dict[str, float] = {}
    for one in known:
        for part, share in one.shares.items():
            seconds[part] = seconds.get(part, 0.0) + share * (one.mean_s or 0.0) / len(known)
    rows = [{"row": "a step", "part": part, "seconds": value * 1000} for part, value in seconds.items()]
    return Chart("A step", _stacked(rows, "milliseconds"))


def _stacked(rows: Sequence[dict[str, Any]], unit: str) -> dict[str, Any]:
    parts = [part for part in ORDER if any(row["part"] == part for row in rows)]
    values = [{**row, "seconds": _short(row["seconds"]), "order": parts.index(row["part"])} for row in rows]
    lanes = len({row["row"] for row in rows})
    return {
        **_chart(values, height=28 * lanes + 50),
        "mark": {"type": "bar", "tooltip": True, "height": {"band": 0.75}},
        "encoding": {
            "x": {"field": "seconds", "type": "quantitative", "title": unit, "axis": {"format": "~g"}},
            "y": {"field": "row", "type": "nominal", "sort": None, "title": None},
            # The table beside it has the names of the colors.
            "color": {**_scale("part", parts, [COLORS[part] for part in parts]), "legend": None},
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "part", "type": "nominal"},
                {"field": "seconds", "type": "quantitative", "title": unit, "format": ".4~s"},
            ],
        },
    }


def rank_chart(ranks: Sequence[RankTimes]) -> Chart | None:
    """How long each rank works for a step, without its waiting for others."""
    known = [one for one in ranks if one.own_s]
    if len(known) < 2:
        return None
    hosts = sorted({one.host for one in known})
    values = [{"rank": one.rank, "host": one.host, "ms": _short((one.own_s or 0.0) * 1000)} for one in known]
    axis = {"format": "d", "tickCount": min(10, len(known) - 1)}
    encoding: dict[str, Any] = {
        "x": {"field": "rank", "type": "quantitative", "title": "rank", "axis": axis},
        "y": {"field": "ms", "type": "quantitative", "title": "ms a step", "scale": {"zero": False}},
        "tooltip": [{"field": name, "type": "nominal"} for name in ("rank", "host", "ms")],
    }
    if 1 < len(hosts) <= _NODES:
        encoding["color"] = {"field": "host", "type": "nominal", "legend": {"orient": "bottom", "title": None}}
    size = 50 if len(known) <= 256 else 8
    return Chart(
        "Own work of each rank",
        {**_chart(values, height=200), "mark": {"type": "point", "filled": True, "size": size}, "encoding": encoding},
    )


def _scale(name: str, domain: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    legend = {"orient": "bottom", "title": None, "columns": {"signal": "max(2, floor(width / 130))"}}
    return {"field": name, "type": "nominal", "scale": {"domain": domain, "range": values}, "legend": legend}


def _clock(times: Sequence[float]) -> dict[str, Any]:
    """The axis of times in milliseconds: with the day where they span more than one."""
    span = (max(times) - min(times)) / 1000 if times else 0.0
    shown = "%H:%M:%S" if span < 7200 else "%H:%M" if span < 86_400 else "%b %d %H:%M"
    each = next((one for one in _TICKS if span / one[0] <= 7), None)  # full seconds, minutes, hours
    return {"format": shown, "tickCount": {"interval": each[1], "step": each[2]} if each is not None else 7}


def _chart(values: Sequence[Mapping[str, Any]], *, height: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
    }
    return {**spec, "data": {"values": list(values)}} if values else spec


def _short(value: float) -> float:
    return float(f"{value:.5g}")
