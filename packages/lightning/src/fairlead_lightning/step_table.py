"""A CSV file with one row a step, written while it grows: the file behind `metrics.csv`. Torch-free."""

from __future__ import annotations

import csv
import errno
import io
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from fairlead.commit import atomic_write
from fairlead.errors import RunDirectoryError

__all__ = ["StepTable"]

FIRST: Final = ("step", "epoch")
SYNC_EVERY_S: Final = 30.0
MERGE_EVERY_S: Final = 5.0


class StepTable:
    """Rows of values by step; each step has one row, a cell without a value is blank.

    The row of the newest step stays open: more values of that step rewrite it in place, at the end
    of the file.  Everything else is rare and rewrites the file as a whole, under another name first:
    a column that appears later, values of an earlier step.  A process that is killed loses nothing
    of what was flushed; at a power cut the last half minute may be missing.

    Args:
        path: The file.
        keep_through: The last step whose row is kept of an existing file; None: a new file.

    Example:
        >>> table = StepTable(Path("metrics.csv"), None)            # doctest: +SKIP
        >>> table.add(0, {"train/loss": "2.5"}); table.flush()      # doctest: +SKIP
    """

    def __init__(self, path: Path, keep_through: int | None) -> None:
        self.path = path
        self._columns: list[str] = list(FIRST)
        self._step = -1
        self._row: dict[str, str] = {}
        self._offset = 0
        self._late: dict[int, dict[str, str]] = {}
        self._dirty = self._wider = False
        self._synced = self._merged = time.monotonic()
        self._file = path.open("ab", buffering=0)
        rows: dict[int, dict[str, str]] = {}
        if keep_through is not None:
            self._columns, rows = read_rows(path)
        self._store({step: row for step, row in rows.items() if keep_through is not None and step <= keep_through})

    # -- writing

    def add(self, step: int, values: Mapping[str, str]) -> None:
        """Takes values of a step; they reach the file with the next `flush`.

        Raises:
            RunDirectoryError: The disk refused an earlier row; it is kept in memory and tried again.
        """
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
        return failure

    def flush(self, *, sync: bool = False) -> None:
        """Hands the rows to the operating system.

        Args:
            sync: Also those of earlier steps, and wait until all of it is on the disk.

        Raises:
            RunDirectoryError: The disk refused; the rows are kept in memory and tried again.
        """
        now = time.monotonic()
        if self._wider or (self._late and (sync or now - self._merged > MERGE_EVERY_S)):
            self._merge()
        try:
            if self._dirty:
                self._write()
            if sync or now - self._synced > SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced = now
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write {self.path.name}", where=str(self.path), why=error.strerror or str(error)
            ) from error

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
        atomic_write(self.path, b"".join(lines), error=RunDirectoryError)
        self._file.close()
        self._file = self.path.open("r+b", buffering=0)
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
