"""Draws what was measured, with the charting library of `fairlead report`: an `.svg` or a `.png`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
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


def plot_file(name: str, cwd: Path) -> Path:
    """The file of `--plot`, before anything is measured.

    Raises:
        MissingDependencyError: vl-convert-python is not installed.
        ConfigError: The name of the file says neither `.svg` nor `.png`, or there is no such folder.
    """
    file = cwd / name
    if file.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"a plot cannot be a {file.suffix or 'file without an ending'}",
            where=f"--plot {file.name}",
            fix=f"--plot {file.stem}.svg",
        )
    if not os.access(file.parent, os.W_OK):
        what = "nothing can be written into" if file.parent.exists() else "there is no folder"
        raise ConfigError(f"{what} {file.parent}", where=f"--plot {name}", fix="name another folder")
    if find_spec("vl_convert") is None:
        raise MissingDependencyError("a plot needs vl-convert-python", where="--plot", fix=install_line("report"))
    return file


def plot(file: Path, lines: Sequence[Line], *, title: str, x: str, y: str, log: bool = False) -> None:
    """Writes a plot; `log` has a logarithmic x axis of base 2, otherwise only what was measured is marked on it.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    import vl_convert

    values: list[dict[str, Any]] = [
        {"x": at, "y": value, "line": one.label, "dashes": one.dashes}
        for one in lines
        for at, value in zip(one.x, one.y, strict=True)
    ]
    scale = {"type": "log", "base": 2} if log else {}
    axis = {"format": "~s"} if log else {"values": sorted({one["x"] for one in values})}
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": title,
        "width": 640,
        "height": 380,
        "background": "white",
        "data": {"values": values},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": x, "scale": scale, "axis": axis},
            "y": {"field": "y", "type": "quantitative", "title": y, "scale": {"zero": True}},
            "color": {"field": "line", "type": "nominal", "title": None, "sort": None},
            "strokeDash": {"field": "dashes", "type": "nominal", "legend": None},
        },
    }
    draw = vl_convert.vegalite_to_svg if file.suffix == ".svg" else vl_convert.vegalite_to_png
    drawn = draw(spec, vl_version="6.1")
    atomic_write(file, drawn.encode() if isinstance(drawn, str) else drawn, error=RunDirectoryError)
