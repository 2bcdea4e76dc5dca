"""What the job leaves behind for a reader: a sample of generated text, and a picture of the loss."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from examples.gpt.model import GPT

__all__ = ["LossCurve", "Sample", "draw", "read_column"]

SHOWN = frozenset(b"\n\t") | frozenset(range(32, 127))  # an untrained model also writes escape codes for the terminal
TOP = 6.0  # of the loss axis, in nats: just above a uniform guess


class Sample(L.Callback):
    """Print text that the trained model writes.

    Args:
        prompt: what it starts from.
        length: bytes to generate.
        temperature: below 1 the likelier bytes are preferred.
    """

    def __init__(self, prompt: str = "def ", length: int = 300, temperature: float = 0.8) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Generate on every rank, print on rank 0."""
        if not isinstance(pl_module, GPT):
            raise TypeError(f"the callback Sample generates text with a GPT; this job's model is {type(pl_module)}")
        # On every rank, with the same seed: a sharded model can only be called by all ranks together.
        text = pl_module.generate(self.prompt.encode(), self.length, self.temperature)
        if trainer.is_global_zero:
            shown = "".join(chr(byte) if byte in SHOWN else "?" for byte in text)
            print(f"\nA sample of {self.length} bytes:\n{'-' * 80}\n{shown}\n{'-' * 80}")


class LossCurve(L.Callback):
    """Draw the run's training and validation loss into `<run directory>/loss.png`.

    The values come from `metrics.csv` and not from this process, so that the curve of a run that was stopped and
    resumed begins at its first step.
    """

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw, on rank 0; without metrics or without matplotlib, warn and leave it."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()  # loggers buffer their last rows
        directory = Path(trainer.default_root_dir)
        metrics = directory / "metrics.csv"
        if not metrics.is_file():
            warnings.warn(f"no loss curve: there is no {metrics} (the job has no csv logger)", stacklevel=1)
            return
        try:
            draw(metrics, directory / "loss.png")
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            warnings.warn("no loss curve: matplotlib is not installed (pip install matplotlib)", stacklevel=1)
            return
        print(f"Loss curve: {directory / 'loss.png'}")


def read_column(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric in a `metrics.csv`, whose cells are blank where nothing was logged."""
    with metrics.open(newline="") as file:
        rows = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]
    rows.sort()
    return [step for step, _ in rows], [value for _, value in rows]


def draw(metrics: Path, picture: Path) -> None:
    """Write the curves of `train/loss` and `val/loss` as a PNG, in nats and in bits per byte.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: it is optional, and slow to import
    from matplotlib.figure import Figure

    # No pyplot: it would choose a backend for the whole process, and may look for a display.
    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: list[dict[str, Any]] = [
        {"name": "train/loss", "color": "#9db7d5", "linewidth": 1},
        {"name": "val/loss", "color": "#c0392b", "linewidth": 2, "marker": "o", "markersize": 4},
    ]
    for line in lines:
        name = line.pop("name")
        steps, values = read_column(metrics, name)
        if values:
            axes.plot(steps, values, label=f"{name} (last: {values[-1]:.2f})", **line)
    axes.axhline(math.log(256), color="grey", linestyle=":", linewidth=1, label="a uniform guess: ln 256 = 5.55")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, TOP), title="Byte-level GPT on Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    right = axes.twinx()
    right.set(ylabel="bits per byte", ylim=(0, TOP / math.log(2)))
    figure.savefig(picture)
