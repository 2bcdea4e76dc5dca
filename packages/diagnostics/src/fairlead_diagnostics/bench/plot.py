"""Draws what was measured; the kind of file is that of its name: `.svg`, `.png`, `.pdf`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairlead.errors import ConfigError, MissingDependencyError
from fairlead.install import install_line


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
        MissingDependencyError: matplotlib is not installed.
        ConfigError: The file cannot be written, or its name says no kind that matplotlib knows.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a plot needs matplotlib", where="--plot", why=str(error), fix=install_line("plot")
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for one in lines:
        axes.plot(
            one.x, one.y, label=one.label, marker=None if one.dashes else "o", linestyle="--" if one.dashes else "-"
        )
    if log:
        axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the plot cannot be written",
            where=f"--plot {file}",
            why=str(error),
            fix="name a file as comm.svg or comm.png",
        ) from error
