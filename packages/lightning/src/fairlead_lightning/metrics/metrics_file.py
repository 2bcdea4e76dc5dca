"""`metrics.csv` in the run directory: everything that was logged, one row a step, across all starts of a run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from fairlead.errors import RunDirectoryError
from fairlead_runs.step_table import StepTable, TablePosition

METRICS_FILE: Final = "metrics.csv"


class MetricsFile(Logger):
    """The Lightning logger that every run has, on rank 0.

    Columns: `step`, `epoch`, then each metric from when it first appeared; a cell is blank where
    nothing was logged, and a number has all its digits.  The step is Lightning's: the
    n-th optimizer step, and the validation after it, are in row n-1.

    A start that resumes from a checkpoint cuts the file back to the `position` that the checkpoint
    holds: rows, cells and columns that came later will be logged again, or never.

    A disk that refuses to write is a warning, not the end of the training; the rows are kept and
    tried again.

    Args:
        run_dir: The run directory.
        resume_step: How many optimizer steps are done where this start goes on.  None: a new file.
        position: What `position` said when that checkpoint, of this very run, was saved.  None: the rows before
            `resume_step` are kept; a validation that was logged after the save stays in the last of them.

    Example:
        >>> MetricsFile(Path("runs/first"), resume_step=None).log_metrics({"loss": 0.5}, step=0)  # doctest: +SKIP
    """

    position_key: ClassVar[str] = METRICS_FILE

    def __init__(self, run_dir: Path, *, resume_step: int | None, position: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.path = run_dir / METRICS_FILE
        self._keep: TablePosition | int | None = None
        if resume_step is not None:
            # Lightning counts from 0: the next row is that of `resume_step`.
            self._keep = _table_position(position) or resume_step - 1
        self._table: StepTable | None = None
        self._waiting: list[tuple[int, dict[str, str]]] = []
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
            self._waiting.append((self._last, cells))
            self._open()
        except RunDirectoryError as error:
            self._warn(error)

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """Where the file stands, for a checkpoint: what is in it up to here is on the disk when this returns.

        Returns:
            The number of rows, the last one's `step` and cells, and the columns: JSON-able, the `position` of
            a later start.

        Raises:
            RunDirectoryError: The disk refused.
        """
        at = self._open().position()
        return {"rows": at.rows, "step": at.step, "row": dict(at.row), "columns": list(at.columns)}

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
            self._table = StepTable(self.path, self._keep)
            self._keep = sys.maxsize  # what this start has written is not cut off when it opens the file again
            if self._table.missing:
                rank_zero_warn(
                    f"{self.path} lacks {self._table.missing} rows from before the checkpoint that the run resumes from"
                )
        while self._waiting:
            self._table.add(*self._waiting.pop(0))
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


def _table_position(position: Mapping[str, Any] | None) -> TablePosition | None:
    """None where there is none, or one of another version of Fairlead: then the step decides."""
    if position is None:
        return None
    try:
        row = {str(name): str(cell) for name, cell in position["row"].items()}
        return TablePosition(int(position["rows"]), int(position["step"]), row, tuple(map(str, position["columns"])))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
