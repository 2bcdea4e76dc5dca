"""`metrics.csv` in the run directory: everything that was logged, one row a step, across all starts of a run."""

from __future__ import annotations

import csv
import errno
import io
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import TypeAdapter, ValidationError

from fairlead.errors import RunDirectoryError, RunLockedError
from fairlead_runs.commit import Fence, atomic_write

METRICS_FILE: Final = "metrics.csv"


class MetricsFile:
    """The file on rank 0; an error of the disk is a warning, and retried.

    A start that resumes cuts the file back to the `position` of its checkpoint, or to the rows through the step
    `through` where that has none; both None: a new file.
    """

    position_key: ClassVar[str] = METRICS_FILE

    def __init__(
        self, run_dir: Path, through: int | None, position: Mapping[str, Any] | None = None, fence: Fence | None = None
    ) -> None:
        self.path = run_dir / METRICS_FILE
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
        """Writes everything, waits for the disk, and closes the file; adding rows reopens it."""
        idle = self._table is None and not self._waiting
        if idle and self._fence is not None and self._fence.why_lost() is not None:
            return  # loggers are closed after a start that failed early has given the run back
        with self._warning():
            self._open().close()
        self._table = None

    def _open(self) -> StepTable:
        if self._table is None:
            self._table = StepTable(self.path, self._keep, self._fence)
            self._keep = sys.maxsize  # what this start has written is not cut off when it reopens the file
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


FIRST: Final = ("step", "epoch")
SYNC_EVERY_S: Final = 30.0
MERGE_EVERY_S: Final = 5.0


@dataclass(frozen=True)
class TablePosition:
    """How far a table has come: enough to cut it back to this, whatever it has taken since.

    Bytes would not do, as a column that appears later moves every row. The cells of the last row (`step` -1: there is
    none) are stored because the power may fail while later values of that step are written over them.
    """

    rows: int
    step: int
    row: Mapping[str, str]
    columns: tuple[str, ...]


class StepTable:
    """Rows of values by step; each step has one row, a cell without a value is blank.

    The row of the newest step stays open: more values of that step rewrite it in place, at the end of the file. The
    rest (a column that appears later, values of an earlier step) is rare and rewrites the file, under another name.
    A process that is killed loses nothing of what was flushed; at a power cut the last half minute may be missing.

    `keep` is what remains of an existing file: all that was there at a position, whose rows that the file lacks are
    counted in `missing`, or the rows through a step with the columns that have a value in them; None: a new file.
    `RunDirectoryError`: the disk refused; the rows stay in memory and are retried.
    """

    def __init__(self, path: Path, keep: TablePosition | int | None, fence: Fence | None = None) -> None:
        self.path = path
        self._fence = fence
        self._columns: list[str] = list(FIRST)
        self._step = -1
        self._row: dict[str, str] = {}
        self._rows = self._offset = 0
        self._late: dict[int, dict[str, str]] = {}
        self._dirty = self._wider = False
        self._synced = self._merged = time.monotonic()
        self.missing = 0
        try:
            self._file = path.open("ab", buffering=0)
            try:
                self._store(self._retained_rows(keep))
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise self._refused(error) from error

    def _retained_rows(self, keep: TablePosition | int | None) -> dict[int, dict[str, str]]:
        if keep is None:
            return {}
        through = keep.step if isinstance(keep, TablePosition) else keep
        columns, found = read_rows(self.path)
        rows = {step: row for step, row in found.items() if step <= through}
        if isinstance(keep, TablePosition):
            self._columns = list(keep.columns)
            if through >= 0:
                rows[through] = dict(keep.row)
            self.missing = max(0, keep.rows - len(rows))
        elif len(rows) == len(found):
            self._columns = columns
        else:
            used = {*FIRST}.union(*rows.values())
            self._columns = [name for name in columns if name in used]
        return rows

    # -- writing

    def add(self, step: int, values: Mapping[str, str]) -> None:
        """Takes values of a step; they reach the file with the next `flush`."""
        new = [name for name in values if name not in self._columns]
        if new:
            self._columns += new
            self._wider = True
        if step < self._step:
            self._late.setdefault(step, {}).update(values)
            return
        failure = self._open_row(step) if step > self._step else None
        self._row.update(values)
        self._dirty = True
        if failure is not None:
            raise failure

    def _open_row(self, step: int) -> RunDirectoryError | None:
        failure = None
        try:
            self.flush()
        except RunDirectoryError as error:  # a full disk must not end the training
            self._late.setdefault(self._step, {}).update(self._row)
            self._wider = True
            failure = error
        self._offset = self._file.seek(0, os.SEEK_END)
        self._step, self._row, self._dirty = step, {"step": str(step)}, False
        self._rows += 1
        return failure

    def flush(self, *, sync: bool = False) -> None:
        """Hands the rows to the operating system; `sync`: those of earlier steps too, and waits for the disk."""
        now = time.monotonic()
        try:
            if self._wider or (self._late and (sync or now - self._merged > MERGE_EVERY_S)):
                self._merge()
            if self._dirty:
                self._write()
            if sync or now - self._synced > SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced = now
        except OSError as error:
            raise self._refused(error) from error

    def position(self) -> TablePosition:
        """How far the table is, with everything up to here on the disk."""
        self.flush(sync=True)
        return TablePosition(self._rows, self._step, dict(self._row), tuple(self._columns))

    def _refused(self, error: OSError) -> RunDirectoryError:
        return RunDirectoryError(
            f"cannot write {self.path.name}", where=str(self.path), why=error.strerror or str(error)
        )

    def _write(self) -> None:
        line = _line([self._row.get(name, "") for name in self._columns])
        self._file.seek(self._offset)
        written = self._file.write(line)
        self._file.truncate()
        if written != len(line):
            raise OSError(errno.ENOSPC, "the disk is full")
        self._dirty = False

    def close(self) -> None:
        """Writes everything and closes the file."""
        try:
            self.flush(sync=True)
        finally:
            self._file.close()

    # -- rewriting

    def _merge(self) -> None:
        began = time.monotonic()
        _, rows = read_rows(self.path)
        for step, values in self._late.items():
            rows.setdefault(step, {}).update(values)
        if self._step >= 0:
            rows[self._step] = {**rows.get(self._step, {}), **self._row}
        self._store(rows)
        self._late = {}
        # Merging costs as much as the file is long: never more than a twentieth of the time.
        self._merged = time.monotonic() + 20 * (time.monotonic() - began)

    def _store(self, rows: Mapping[int, dict[str, str]]) -> None:
        """Replaces the file; its last row is the open one from now on."""
        lines = [_line(self._columns)]
        steps = sorted(rows)
        lines += [_line([str(step), *(rows[step].get(name, "") for name in self._columns[1:])]) for step in steps]
        # Each start writes a file of its own: one that was replaced continues in the previous file.
        atomic_write(self.path, b"".join(lines), error=RunDirectoryError, fence=self._fence)
        replaced, self._file = self._file, self.path.open("r+b", buffering=0)
        replaced.close()
        self._rows = len(steps)
        self._step = steps[-1] if steps else -1
        self._row = dict(rows[steps[-1]]) if steps else {}
        self._offset = self._file.seek(0, os.SEEK_END) - (len(lines[-1]) if steps else 0)
        self._dirty = self._wider = False


def read_rows(path: Path) -> tuple[list[str], dict[int, dict[str, str]]]:
    """The columns and the rows by step; a torn or damaged line is left out, rows of one step are merged.

    A file that is no such table is put aside as `<name>.damaged`.
    """
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return list(FIRST), {}
    complete = text[: text.rfind("\n") + 1]  # what follows the last newline was cut off in the middle
    lines = csv.reader(io.StringIO(complete, newline=""))
    columns = next(lines, [])
    if columns[: len(FIRST)] != list(FIRST) or len(set(columns)) < len(columns):
        if text:
            os.replace(path, path.with_name(f"{path.name}.damaged"))
        return list(FIRST), {}
    rows: dict[int, dict[str, str]] = {}
    for cells in lines:
        if len(cells) == len(columns) and cells[0].isdecimal():
            row = {name: cell for name, cell in zip(columns, cells, strict=True) if cell}
            rows.setdefault(int(cells[0]), {}).update(row)
    return columns, rows


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
