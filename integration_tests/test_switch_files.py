"""A person without signal rights, and a run of two ranks: SAVE, `fairlead cancel`, and the start after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairlead.cli import main
from integration_tests.jobs import JOB, changed, events, repository, start

pytestmark = pytest.mark.slow

SLOW = changed(
    JOB,
    model={"args": {"width": 4, "delay": 0.05}},
    # Without validations: one behind the last batch of an epoch is saved there for its own reason.
    trainer={"max_steps": 400, "checkpoint": {"every_n_steps": 1000}, "limit_val_batches": 0},
)


def test_two_ranks_are_saved_and_stopped_by_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both at the same steps; `check` says what a STOP will do to the next start."""

    def said(*words: str) -> str:
        assert main(list(words), environ=os.environ, cwd=tmp_path) == 0
        return capsys.readouterr().out

    job, run = str(repository(tmp_path, job=SLOW)), tmp_path / "runs/small"
    fit = start("fit", job, cwd=tmp_path)
    fit.until(lambda: any(event["event"] == "training" for event in events(run)), "it trains")
    (run / "SAVE").touch()
    fit.until(lambda: any(event.get("reason") == "asked" for event in events(run)), "it is saved")
    assert "stops after its next step" in said("cancel", "small")
    ended = fit.end()
    assert ended.code == 143, ended.text
    assert "requested it by the file STOP; everything is saved" in ended.text
    (stop,) = (event for event in events(run) if event["event"] == "stop")
    saved = [event["step"] for event in events(run) if event["event"] == "checkpoint"]
    assert (stop["reason"], stop["step"]) == ("cancelled", saved[-1])
    assert not (run / "STOP").exists()
    (run / "STOP").touch()
    assert "will stop before its first step" in said("check", job)
