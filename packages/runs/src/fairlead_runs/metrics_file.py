"""`metrics.csv` in the run directory: everything that was logged, one row a step, across all starts of a run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import TypeAdapter, ValidationError

from fairlead.errors import RunDirectoryError, RunLockedError
from fairlead_runs.commit import Fence
from fairlead_runs.step_table import StepTable, TablePosition

METRICS_FILE: Final = "metrics.csv"


class MetricsFile:
    """The file on rank 0; a disk that refuses is a warning, and tried again.

    A start that resumes cuts the file back to the `position` of its checkpoint, or to the rows through the step
    `through` where that has none; both None: a new file.
    """

    position_key: ClassVar[str] = METRICS_FILE

    def __init__(
        self, run_dir: Path, through: int | None, position: Mapping[str, Any] | None = None, fence: Fence | None = None
    ) -> None:
        self.path = run_dir / METRICS_FILE
        self.newest: dict[str, str] = {}
        """The last value of each metric that this start has logged, as in the file."""
        self._fence = fence
        self._keep = (_table_position(position) or through) if through is not None else None
        self._table: StepTable | None = None
        self._waiting: list[tuple[int, dict[str, str]]] = []
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Ranks that are spawned open the file themselves."""
        return {**self.__dict__, "_table": None}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the values of a step: numbers, or tensors with one element."""
        cells = {name: _cell(name, value) for name, value in metrics.items() if name != "step"}
        self.newest.update(cells)
        with self._warning():
            self._waiting.append((step, cells))
            self._open()

    def position(self) -> dict[str, Any] | None:
        """Where the file stands, for a checkpoint: what is in it up to here is on the disk when this returns."""
        at = self._open().position()
        return {**asdict(at), "columns": list(at.columns)}

    def flush(self) -> None:
        """Hands the rows to the operating system; every half minute also waits for the disk.

        It is called after each step, so waiting each time would cost more than a small step.
        """
        with self._warning():
            self._open().flush()

    def close(self) -> None:
        """Writes everything, waits for the disk, and closes the file; adding rows opens it again."""
        idle = self._table is None and not self._waiting
        if idle and self._fence is not None and self._fence.why_lost() is not None:
            return  # loggers are closed after a start that failed early has given the run back
        with self._warning():
            self._open().close()
        self._table = None

    def _open(self) -> StepTable:
        if self._table is None:
            self._table = StepTable(self.path, self._keep, self._fence)
            self._keep = sys.maxsize  # what this start has written is not cut off when it opens the file again
            if self._table.missing:
                warnings.warn(
                    f"{self.path} lacks {self._table.missing} rows from before the checkpoint that the run resumes "
                    "from",
                    stacklevel=3,
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
                warnings.warn(f"{text}; training continues, the rows will be retried", stacklevel=4)
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
