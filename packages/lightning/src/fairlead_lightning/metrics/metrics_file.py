"""`metrics.csv` in the run directory: everything that was logged, one row a step, across all starts of a run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from pydantic import TypeAdapter, ValidationError

from fairlead.errors import RunDirectoryError, RunLockedError
from fairlead_runs.commit import Fence
from fairlead_runs.step_table import StepTable, TablePosition

METRICS_FILE: Final = "metrics.csv"


class MetricsFile(Logger):
    """The Lightning logger that every run has, on rank 0; a disk that refuses is a warning, and tried again.

    The step is Lightning's: the n-th optimizer step, and the validation after it, are in row n-1.  A start that resumes
    cuts the file back to the `position` of its checkpoint, or to the rows before `resume_step` where it has none.
    """

    position_key: ClassVar[str] = METRICS_FILE

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None,
        position: Mapping[str, Any] | None = None,
        fence: Fence | None = None,
    ) -> None:
        super().__init__()
        self._fence = fence
        self.path = run_dir / METRICS_FILE
        self._keep: TablePosition | int | None = None
        if resume_step is not None:
            # Lightning counts from 0: the next row is that of `resume_step`.
            self._keep = _table_position(position) or resume_step - 1
        self._table: StepTable | None = None
        self._waiting: list[tuple[int, dict[str, str]]] = []
        self._last = 0
        self._warned = False
        self.newest: dict[str, str] = {}
        """The last value of each metric that this start has logged, as in the file."""

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
        """Takes the values of a step (None: that of the last call): numbers, or tensors with one element."""
        self._last = step if step is not None else self._last
        cells = {name: _cell(name, value) for name, value in metrics.items() if name != "step"}
        self.newest.update(cells)
        with self._warning():
            self._waiting.append((self._last, cells))
            self._open()

    @rank_zero_only
    def position(self) -> dict[str, Any]:
        """Where the file stands, for a checkpoint: what is in it up to here is on the disk when this returns."""
        at = self._open().position()
        return {**asdict(at), "columns": list(at.columns)}

    @rank_zero_only
    def save(self) -> None:
        """Hands the rows to the operating system; every half minute also waits for the disk.

        Lightning calls this after each `log_metrics`, so waiting each time would cost more than a small step.
        """
        with self._warning():
            self._open().flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes everything, waits for the disk, and closes the file; logging again opens it again."""
        idle = self._table is None and not self._waiting
        if idle and self._fence is not None and self._fence.why_lost() is not None:
            return  # Lightning closes its loggers after a start that failed early has given the run back
        with self._warning():
            self._open().close()
        self._table = None

    def _open(self) -> StepTable:
        if self._table is None:
            self._table = StepTable(self.path, self._keep, self._fence)
            self._keep = sys.maxsize  # what this start has written is not cut off when it opens the file again
            if self._table.missing:
                rank_zero_warn(
                    f"{self.path} lacks {self._table.missing} rows from before the checkpoint that the run resumes from"
                )
        while self._waiting:
            self._table.add(*self._waiting.pop(0))
        return self._table

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except RunLockedError:
            raise  # another start owns the run: this one ends
        except RunDirectoryError as error:
            if not self._warned:
                text = f"{error.what}: {error.why} ({error.where})"
                rank_zero_warn(f"{text}; training continues, the rows will be retried")
                self._warned = True


def _cell(name: str, value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or (name == "epoch" and isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return repr(value) if isinstance(value, (int, float)) else str(value)


def _table_position(position: Mapping[str, Any] | None) -> TablePosition | None:
    """None where there is none, or one of another version of Fairlead: then the step decides."""
    try:
        return TypeAdapter(TablePosition).validate_python(position)
    except ValidationError:
        return None
