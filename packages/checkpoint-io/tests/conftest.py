"""Makes `checkpoint_files` importable; fixtures for the tests of `fairlead checkpoint`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_files import Command, command


@pytest.fixture
def fairlead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, called in this process."""
    return command(tmp_path, capsys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The checkpoints of a run below the directory of the test."""
    return tmp_path / "runs" / "gpt" / "checkpoints"
