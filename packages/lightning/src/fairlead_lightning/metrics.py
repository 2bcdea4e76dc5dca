"""`metrics.csv` in the run directory: everything that was logged, one row a step, across all starts of a run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from fairlead.errors import RunDirectoryError
from fairlead_lightning.step_table import StepTable

__all__ = ["METRICS_FILE", "MetricsFile"]

METRICS_FILE: Final = "metrics.csv"


class MetricsFile(Logger):
    """The Lightning logger that every run has, on rank 0.

    Columns: `step`, `epoch`, then each metric from when it first appeared; a cell is blank where
    nothing was logged, and a number has all its digits.  The step is Lightning's: the
    n-th optimizer step, and the validation after it, are in row n-1.

    A disk that refuses to write is a warning, not the end of the training; the rows are kept and
    tried again.

    Args:
        run_dir: The run directory.
        resume_step: The step that this start goes on from: later rows are of steps that will be
            done again, and are cut off.  None: a new file.

    Example:
        >>> MetricsFile(Path("runs/first"), resume_step=None).log_metrics({"loss": 0.5}, step=0)  # doctest: +SKIP
    """

    def __init__(self, run_dir: Path, *, resume_step: int | None) -> None:
        super().__init__()
        self.path = run_dir / METRICS_FILE
        self._keep_through = resume_step
        self._table: StepTable | None = None
        self._last = 0
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Ranks that are spawned open the file themselves."""
        return {**self.__dict__, "_table": None}

    @property
    def name(self) -> str:
        """The folder in the run directory for what Lightning keeps by logger, such as a user's own ModelCheckpoint."""
        return "lightning"

    @property
    def version(self) -> str:
        """None of its own: the run directory is of one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory; `trainer.log_dir` is this."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: `job.yaml` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Takes the values of a step.

        Args:
            metrics: Numbers, or tensors with one element.
            step: The step; None: that of the last call.
        """
        self._last = step if step is not None else self._last
        cells = {name: _cell(name, value) for name, value in metrics.items() if name != "step"}
        try:
            self._open().add(self._last, cells)
        except RunDirectoryError as error:
            self._warn(error)

    @rank_zero_only
    def save(self) -> None:
        """Hands the rows to the operating system; every half minute also waits for the disk.

        Lightning calls this after each `log_metrics`, so waiting each time would cost more than a small step.
        """
        try:
            self._open().flush()
        except RunDirectoryError as error:
            self._warn(error)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes everything, waits for the disk, and closes the file; logging again opens it again."""
        try:
            self._open().close()
        except RunDirectoryError as error:
            self._warn(error)
        self._table = None

    def _open(self) -> StepTable:
        if self._table is None:
            self._table = StepTable(self.path, self._keep_through)
            self._keep_through = sys.maxsize  # what this start has written is not cut off when it opens the file again
        return self._table

    def _warn(self, error: RunDirectoryError) -> None:
        if not self._warned:
            rank_zero_warn(f"{error.what}: {error.why} ({error.where}); the training goes on, the rows are tried again")
            self._warned = True


def _cell(name: str, value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or (name == "epoch" and isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return repr(value) if isinstance(value, (int, float)) else str(value)
