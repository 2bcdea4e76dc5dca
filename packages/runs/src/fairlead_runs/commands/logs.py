"""`fairlead logs`: what the ranks of a run have printed, in the order of time, and what they print from now on."""

from __future__ import annotations

import argparse
import heapq
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead_runs import read_history, state
from fairlead_runs.commands.texts import find_run
from fairlead_runs.scheduler import ask_for_job, job_of_run
from fairlead_runs.waiting import parse_ranks

_NAME: Final = re.compile(r"rank-(\d+)\.log")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+")
_OPEN: Final = 256
"""Files that are open at once; if there are more, each is read at once."""
_POLL_S: Final = 0.5
_STATE_S: Final = 2.0
"""How often the run directory is checked for the end of the run."""
_SCHEDULER_S: Final = 30.0
"""How often the scheduler is queried, while no start of the run is there."""


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead logs`."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one in runs/")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow the output, through restarts, until the run ends"
    )
    parser.add_argument("--rank", metavar="RANKS", help="only these ranks: 0, or 0,8-15 (default: all)")
    parser.add_argument("--tail", metavar="N", type=_count, help="show only the last N lines")


def run_logs(arguments: argparse.Namespace, session: Session) -> int:
    """Prints the logs of a run."""
    path = find_run(arguments.run, session)
    try:
        wanted = parse_ranks(arguments.rank) if arguments.rank is not None else None
    except ValueError as error:
        raise ConfigError(f"--rank {error}", where="fairlead logs") from error
    logs = _Logs(path / "logs", wanted)
    for line in logs.so_far(arguments.tail):
        session.print(line)
    if not logs.files and not arguments.follow:
        session.warn(f"no logs in {path / 'logs'}: no rank has printed anything yet, or a scheduler keeps its output")
    if arguments.follow:
        _follow(path, logs, session)
    return 0


@dataclass
class _File:
    """A log, up to where it was read; `rest` is a line that its rank is still writing."""

    path: Path
    offset: int = 0
    rest: bytes = b""
    time: str = ""

    def more(self, limit: int | None = None) -> Iterator[tuple[str, str]]:
        """The lines since the last call, each with its time: that of the line before, where it has none."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            selected: Iterator[bytes] | deque[bytes] = self._full_lines(iter(file))
            for line in selected if limit is None else deque(selected, limit):
                text = line.decode(errors="replace").rstrip("\r\n")
                if found := _TIME.match(text):
                    self.time = found[0]
                yield self.time, text

    def _full_lines(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            self.offset += len(line)
            self.rest += line
            if line.endswith(b"\n"):
                complete, self.rest = self.rest, b""
                yield complete


class _Logs:
    """The logs of the ranks of a run."""

    def __init__(self, folder: Path, ranks: frozenset[int] | None) -> None:
        self._folder = folder
        self._ranks = ranks
        self.files: dict[str, _File] = {}

    def so_far(self, tail: int | None) -> Iterator[str]:
        """All lines that are there, or the last ones, in the order of their times."""
        self._look()
        lines: list[Iterable[tuple[str, str]]] = [file.more(tail) for file in self.files.values()]
        if tail is not None or len(lines) > _OPEN:
            lines = [list(one) for one in lines]
        merged = heapq.merge(*lines, key=lambda line: line[0])
        yield from (text for _, text in (merged if tail is None else deque(merged, tail)))

    def new(self) -> Iterator[str]:
        """What has come since."""
        self._look()
        lines = [line for file in self.files.values() for line in file.more()]
        yield from (text for _, text in sorted(lines, key=lambda line: line[0]))

    def _look(self) -> None:
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and (self._ranks is None or int(match[1]) in self._ranks):
                self.files.setdefault(path.name, _File(path))


def _follow(path: Path, logs: _Logs, session: Session) -> None:
    looked = float("-inf")
    ending = _Ending(path, session)
    while True:
        over = None
        if time.monotonic() - looked >= _STATE_S:  # before the lines are read: none is to be missed
            looked, over = time.monotonic(), ending.why_over()
        for line in logs.new():
            session.print(line)
        if over is not None:
            session.warn(over)
            return
        time.sleep(_POLL_S)


class _Ending:
    """Whether a run has ended for good: a start that has stopped may have another one behind it."""

    def __init__(self, path: Path, session: Session) -> None:
        self._path = path
        self._session = session
        self._queried_at = float("-inf")
        self._reported: str | None = None

    def why_over(self) -> str | None:
        """The run's end in words; None while it runs, or is to be restarted."""
        run = state(self._path)
        if run.state == "running" or (run.owner is not None and run.state != "finished"):  # or has yet to ask for one
            self._reported = None
            return None
        ended = f"{run.name} is {run.state}" + (f" ({run.reason})" if run.reason else "")
        if run.state == "finished":
            return ended
        waits = self._waits()
        if waits is None:
            now = state(self._path)  # the next start may have come since
            return ended if (now.starts, now.owner) == (run.starts, run.owner) else None
        if self._reported != waits:
            self._reported = waits
            self._session.warn(f"{ended}; {waits}: waiting for its next start")
        return None

    def _waits(self) -> str | None:
        job = job_of_run(self._path)
        if job is not None:
            if time.monotonic() - self._queried_at < _SCHEDULER_S:
                return self._reported or f"job {job} will be queried shortly"
            self._queried_at = time.monotonic()
            status = ask_for_job(job, self._session.plugins, self._session.environ)
            if status is not None and status.state != "unknown":
                return f"job {job} is {status.state} ({status.detail})" if status.state != "ended" else None
        last = read_history(self._path / "history.jsonl")[-1:]
        return "another start was requested" if last and last[0]["event"] == "requeue" else None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines")
    return int(text)
