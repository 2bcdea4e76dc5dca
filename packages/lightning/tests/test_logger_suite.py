"""The conformance suite of loggers shows what a logger does: one that loses a step, or lies about it, fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from fairlead.testing import LoggerConformance


class Stands(CSVLogger):
    """It always says the same position."""

    position_key = "stands"

    def position(self) -> Any:
        return {"size": 0}


class Objects(Stands):
    """Its position cannot go into a checkpoint."""

    def position(self) -> Any:
        return {"file": Path("metrics.csv")}


class Refuses(CSVLogger):
    """It does not take a second step."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step == 2:
            raise ValueError("one step is enough")


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (Stands, AssertionError, "its position after two steps is that after one"),
        (Objects, AssertionError, "give numbers, texts, lists and dicts"),
        (Refuses, ValueError, "one step is enough"),
    ],
)
def test_a_bad_logger_is_caught(kind: Any, error: type[Exception], said: str, tmp_path: Path) -> None:
    class Suite(LoggerConformance):
        plugin_name = "bad"

        def build(self, run_dir: Path, engine: str = "trainer") -> Any:
            return kind(run_dir)

    with pytest.raises(error, match=said):
        Suite().test_two_steps_are_logged(tmp_path)
