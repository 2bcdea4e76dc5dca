"""The commands of a scheduler, asked with a deadline, by real programs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from fairlead_runs.programs import ask


def program(folder: Path, text: str) -> dict[str, str]:
    file = folder / "question"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return {"PATH": f"{folder}:{os.defpath}"}


def test_a_signal_that_all_processes_of_the_job_get_costs_no_answer(tmp_path: Path) -> None:
    """slurmd sends SIGTERM to each process of a step; without an answer a cancelled job would be started again."""
    environ = program(tmp_path, f"mkdir {tmp_path}/first 2>/dev/null && kill -TERM $$; echo cancelled")
    assert ask(["question"], time.monotonic() + 20, environ) == ("cancelled", "")


@pytest.mark.parametrize(
    ("text", "limit_s", "said"),
    [
        # Asked again until the end: of the last time there may be too little left to start it.
        ("kill -TERM $$", 1.0, r"question (ended with exit code -15: |did not answer within 0\.\d s)"),
        ("echo no such job >&2; exit 1", 30.0, r"question ended with exit code 1: no such job"),
        ("sleep 60", 1.0, r"question did not answer within [01]\.\d s"),
    ],
)
def test_without_an_answer_it_says_why(tmp_path: Path, text: str, limit_s: float, said: str) -> None:
    began = time.monotonic()
    output, why = ask(["question"], began + limit_s, program(tmp_path, text))
    assert output == ""
    assert re.fullmatch(said, why)
    assert time.monotonic() - began < 30.0
