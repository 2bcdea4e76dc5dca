"""What W&B has written into the record of a run on this machine: its rows, read from the `.wandb` files.

Such a file is seven bytes of head and then a log as LevelDB's: blocks of 32 KiB, in them fragments with a checksum, a
length and a kind. wandb writes one for each start, online too, and only whole blocks, or what is there when it flushes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from wandb.proto import wandb_internal_pb2 as messages

STEP: Final = "trainer/global_step"
"""The column in which Lightning puts its step; W&B's own `_step` counts rows."""

_MESSAGE: Final[Any] = vars(messages)["Record"]  # made by protobuf when it is imported
_ADDED: Final = ("_timestamp", "_runtime", "_wandb")  # by W&B itself
_HEAD: Final = 7
_BLOCK: Final = 32768
_FRAGMENT: Final = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass(frozen=True)
class Row:
    """One row of a run: W&B's number of it, the step that it was logged for (None: logged without one), its values."""

    number: int
    step: int | None
    values: dict[str, Any]


class RecordFile:
    """One `.wandb` file, which may still grow: `rows` goes on where it has stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kinds: set[str] = set()
        """The kinds of records that were read: `run`, `history`, `preempting`, ..."""
        self._next = _HEAD

    def rows(self) -> Iterator[Row]:
        """The rows that were written since the last call; one that is not whole yet is left for the next."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._next)
                data = file.read()
        except FileNotFoundError:
            return
        start = self._next
        for record, end in _records(data, start):
            self._next = end
            parsed = _MESSAGE.FromString(record)
            kind = parsed.WhichOneof("record_type")
            self.kinds.add(kind)
            if kind == "history":
                yield _row(parsed.history)

    def mend(self) -> None:
        """Of a start that was killed, after its rows were read: takes away what would make `wandb sync` stop here."""
        if "run" not in self.kinds:  # `wandb sync` refuses it, and all others with it
            self.path.rename(self.path.with_suffix(".wandb.empty"))
        elif self.path.stat().st_size > self._next:
            os.truncate(self.path, self._next)  # half a record

    def make_durable(self) -> None:
        """Waits until what is in the file is on the disk."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def earlier_rows(run_dir: Path, identity: str, *, but: Path | None = None) -> list[Row]:
    """The rows of all starts of a run, in their order; with `but`, the file of this one, those before are mended."""
    files = (path for path in (run_dir / "wandb").glob(f"*run-*-{identity}/run-{identity}.wandb") if path != but)
    ordered = sorted(files, key=lambda path: path.parent.name.partition("run-")[2])  # [offline-]run-DATE_TIME-ID
    rows: list[Row] = []
    for file in map(RecordFile, ordered):
        rows += file.rows()
        if but is not None and file.path.parent.name.startswith("offline-"):
            file.mend()
    return rows


def _records(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Each whole record, and where in the file the next one begins; `data` begins at `start`."""
    at, parts = 0, b""
    while True:
        left = _BLOCK - (start + at) % _BLOCK
        if left < _FRAGMENT.size:  # the end of a block is filled up
            at += left
            continue
        if at + _FRAGMENT.size > len(data):
            return
        _, length, kind = _FRAGMENT.unpack_from(data, at)
        if kind == 0:
            at += left
            continue
        end = at + _FRAGMENT.size + length
        if end > len(data):
            return
        body = data[at + _FRAGMENT.size : end]
        parts = body if kind in (_FULL, _FIRST) else parts + body
        at = end
        if kind in (_FULL, _LAST):
            yield parts, start + at


def _row(history: Any) -> Row:
    values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in history.item}
    step = values.pop(STEP, None)
    number = int(values.pop("_step", history.step.num))
    own = {name: value for name, value in values.items() if name not in _ADDED}
    return Row(number, None if step is None else int(step), own)
