"""Undisturbed runs, each made once, to compare with."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from integration_tests.exact.cases import Case, Starter, run

__all__ = ["Reference", "References"]


@dataclass(frozen=True)
class Reference:
    """An undisturbed run.

    Args:
        cwd: Its working directory.
        run: Its run directory.
        seconds: What it took.
        steps: Its optimizer steps.
    """

    cwd: Path
    run: Path
    seconds: float
    steps: int


class References:
    """Makes the undisturbed run of a case when it is first asked for.

    Args:
        folder: Where.
        starter: How they are started.
    """

    def __init__(self, folder: Path, starter: Starter) -> None:
        self.folder = folder
        self.starter = starter
        self._made: dict[Case, Reference] = {}

    def of(self, case: Case) -> Reference:
        """The undisturbed run of a case."""
        if case not in self._made:
            name = re.sub(r"[^\w.=-]+", "_", " ".join(str(part) for part in (case, *case.sets)))
            cwd = self.folder / f"{len(self._made):02}-{name}"[:120]
            began = time.monotonic()
            run(case, cwd, self.starter)
            seconds = time.monotonic() - began
            directory = case.directory(cwd)
            events = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
            steps = next(event["step"] for event in events if event["event"] == "finished")
            self._made[case] = Reference(cwd, directory, seconds, steps)
        return self._made[case]
