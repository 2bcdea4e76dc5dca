"""Draws what was measured, with the charting library of `fairlead report`: an `.svg` or a `.png`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.errors import ConfigError, MissingDependencyError, RunDirectoryError
from fairlead.install import install_line
from fairlead_runs.commit import atomic_write


@dataclass
class Line:
    """A line of a plot; with `dashes` it is a reference, not a measurement."""

    label: str
    x: list[float]
    y: list[float]
    dashes: bool = False


def plot(file: Path, lines: Sequence[Line], *, title: str, x: str, y: str, log: bool = False) -> None:
    """Writes a plot; `log` has a logarithmic x axis of base 2.

    Raises:
        MissingDependencyError: vl-convert-python is not installed.
        ConfigError: The name of the file says neither `.svg` nor `.png`.
        RunDirectoryError: The file cannot be written.
    """
    if file.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"a plot cannot be a {file.suffix or 'file without an ending'}",
            where=f"--plot {file.name}",
            fix=f"--plot {file.stem}.svg",
        )
    try:
        import vl_convert
    except ImportError as error:
        raise MissingDependencyError(
            "a plot needs vl-convert-python", where="--plot", why=str(error), fix=install_line("report")
        ) from error
    values = [
        {"x": at, "y": value, "line": one.label, "dashes": one.dashes}
        for one in lines
        for at, value in zip(one.x, one.y, strict=True)
    ]
    scale = {"type": "log", "base": 2} if log else {}
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": title,
        "width": 640,
        "height": 380,
        "background": "white",
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {
                "field": "x",
                "type": "quantitative",
                "title": x,
                "scale": scale,
                "axis": {"format": "~s", "tickMinStep": 1},
            },
            "y": {"field": "y", "type": "quantitative", "title": y, "scale": {"zero": True}},
            "color": {"field": "line", "type": "nominal", "title": None, "sort": None},
            "strokeDash": {"field": "dashes", "type": "nominal", "legend": None},
        },
    }
    draw = vl_convert.vegalite_to_svg if file.suffix == ".svg" else vl_convert.vegalite_to_png
    drawn = draw(spec, vl_version="6.1")
    atomic_write(file, drawn.encode() if isinstance(drawn, str) else drawn, error=RunDirectoryError)
