"""With FAIRLEAD_RAN=FOLDER, what became of each test is written there: `noxfile.py` runs those that failed once more.

FOLDER/tests.txt        an outcome and a test's id a line, for `integration_tests/acceptance.py`
FOLDER/times.txt        seconds and a test's id a line
FOLDER/failed.txt       the ids of the tests that failed, as pytest takes them by `@FILE`
FOLDER/failures.txt     their first failures, whole
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest


class Ran:
    """Collects the outcome of each test, and writes all of them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed if its setup, call and teardown have."""
        self.seconds[report.nodeid] += report.duration
        if self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            sections = [f"----- {name}\n{text}" for name, text in report.sections]
            self.failures.append("\n".join([f"===== {report.nodeid} ({report.when})", report.longreprtext, *sections]))

    def pytest_sessionfinish(self) -> None:
        """One line for each test."""
        self.folder.mkdir(parents=True, exist_ok=True)
        failed = [test for test, outcome in self.outcomes.items() if outcome == "failed"]
        for name, lines in {
            "tests": sorted(f"{outcome} {test}" for test, outcome in self.outcomes.items()),
            "times": [f"{seconds:.2f} {test}" for test, seconds in self.seconds.items()],
            "failed": failed,
            "failures": self.failures,
        }.items():
            (self.folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """`FAIRLEAD_RAN` not in the processes of pytest-xdist, which report to this one, nor in a pytest of a test's."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's `nox &`: what a test starts would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = os.environ.pop("FAIRLEAD_RAN", "")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ran(Path(folder)))
