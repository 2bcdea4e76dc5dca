"""Hugging Face's Trainer, stopped, killed, or saved and killed at every step in turn, ends with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.huggingface.every_step import CASES

SCRIPT = Path(__file__).with_name("every_step.py")


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_disturbed_at_every_step_it_ends_with_the_same_bits(case: str, tmp_path: Path) -> None:
    """Weights, what was logged, the best checkpoint, the rows of metrics.csv, and how many steps there were."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), case]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
