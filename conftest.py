"""With FAIRLEAD_RAN=FOLDER, FOLDER/tests.txt tells what became of each test; see `integration_tests/acceptance.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


class Ran:
    """Notes the outcome of each test, and writes all of them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed if its setup, call and teardown have."""
        if self.outcomes.get(report.nodeid, "passed") == "passed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """One line for each test."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = sorted(f"{outcome} {test}\n" for test, outcome in self.outcomes.items())
        (self.folder / "tests.txt").write_text("".join(lines), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """`FAIRLEAD_RAN` not in the processes of pytest-xdist, which report to this one, nor in a pytest of a test's."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's `nox &`: what a test starts would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = os.environ.pop("FAIRLEAD_RAN", "")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ran(Path(folder)))
