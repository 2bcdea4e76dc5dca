"""Runs the conformance suites over installed plugins, without pytest or a test file: `fairlead plugins check`."""

from __future__ import annotations

import inspect
import tempfile
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fairlead.plugins import PluginManager, PluginRecord
from fairlead.testing.suites import CONFORMANCE


@dataclass(frozen=True)
class Outcome:
    """How one test of a suite ended, and for `skipped` and `failed` why."""

    test: str
    result: Literal["passed", "skipped", "failed"]
    why: str = ""


def run_suite(record: PluginRecord, plugins: PluginManager) -> Iterator[Outcome]:
    """Every test of the suite of a plugin's axis; where it cannot be loaded, the first, which says so, is all."""
    kind = CONFORMANCE[record.axis]
    suite = type(kind.__name__, (kind,), {"plugin_name": record.name, "plugins": lambda self: plugins})
    names = sorted(name for name, _ in inspect.getmembers(suite, inspect.isfunction) if name.startswith("test_"))
    first = "test_is_found_and_loads"
    for name in [first, *(name for name in names if name != first)]:
        outcome = _run(suite(), name)
        yield outcome
        if name == first and outcome.result == "failed":
            return


def _run(suite: object, name: str) -> Outcome:
    method = getattr(suite, name)
    with tempfile.TemporaryDirectory(prefix="fairlead-conformance-") as folder:
        try:
            method(*[Path(folder)] if "tmp_path" in inspect.signature(method).parameters else [])
        except unittest.SkipTest as error:
            return Outcome(name, "skipped", str(error))
        except AssertionError as error:
            return Outcome(name, "failed", str(error))
        except Exception as error:  # a plugin may do anything; it is what is being found out
            return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, "passed")
