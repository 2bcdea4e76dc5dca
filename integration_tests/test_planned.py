"""What was predicted of a run beside what it has measured: in the report, and in a calibration file."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli import main
from fairlead_planning.calibration import from_file, shipped
from fairlead_planning.devices import device_facts
from fairlead_runs import RunDirectory, fingerprint
from fairlead_runs.predicted import compare, read_plan, write_plan
from integration_tests.made_run import EPOCH, make_run

STEP = {"data": 0.01, "passes": 0.05, "communication": 0.03, "optimizer": 0.01}
"""Seconds of the parts of a step, as `make_run` has its ranks measure them."""
EXACT = {
    "step_s": 0.1,
    "compute_s": 0.05,
    "exposed_communication_s": 0.03,
    "bubble_s": 0.0,
    "optimizer_s": 0.01,
    "host_s": 0.01,
    "samples_s": 640.0,
    "tokens_s": 640.0 * 128,
    "memory_bytes": None,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "runs" / "lm", steps=600, ranks=4, starts=1)
    when = datetime.datetime.fromtimestamp(EPOCH + 30, datetime.UTC).isoformat(timespec="milliseconds")
    with (path / "history.jsonl").open("a") as file:
        file.write(json.dumps({"time": when, "event": "batch", "rank": 0, "start": 1, "samples": 64}) + "\n")
    return path


def planned(run: Path, *, ranks: int = 4, **changes: Any) -> None:
    write_plan(run, {**EXACT, **changes}, device="h100", layout={"strategy": "ddp"}, ranks=ranks)


def reported(folder: Path, *words: str) -> int:
    return main(["report", *words], environ=dict(os.environ), cwd=folder)


def test_a_right_plan_is_confirmed_figure_by_figure(run: Path) -> None:
    planned(run)
    found = compare(run)
    assert found is not None
    errors = {one.name: one.error for one in found.pairs}
    assert set(errors) == {
        *("step", "compute", "communication", "optimizer", "host and data", "samples", "tokens"),
    }
    assert all(abs(error) < 0.03 for error in errors.values() if error is not None), errors
    assert read_plan(run.parent / "other") is None


@pytest.mark.parametrize(
    ("changes", "term", "said"),
    [
        ({"exposed_communication_s": 0.002, "step_s": 0.072}, "communication", "too short"),
        ({"compute_s": 0.04, "bubble_s": 0.05, "step_s": 0.14}, "compute", "too long"),
        ({"host_s": 0.0, "step_s": 0.09}, "host and data", "too short"),
    ],
)
def test_the_term_that_was_wrong_is_named(run: Path, changes: dict[str, Any], term: str, said: str) -> None:
    planned(run, **changes)
    found = compare(run)
    assert found is not None
    assert found.worst is not None
    assert found.worst.name == term
    assert said in found.sentence()
    wrong = sum(changes.get(name, EXACT[name] or 0) - (EXACT[name] or 0) for name in changes if name != "step_s")
    assert found.worst.predicted - found.worst.measured == pytest.approx(wrong, abs=0.002)


def test_the_report_shows_both_and_records_the_pair_where_it_may(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(run, exposed_communication_s=0.002, step_s=0.072, goodput=0.9)
    assert reported(tmp_path, "lm") == 0
    said = capsys.readouterr().out
    assert "a step was planned with 72 ms and takes 100 ms" in said
    assert "the plan is most wrong in communication, 28" in said
    page = (run / "report.html").read_text()
    assert "Planned and measured" in page
    assert "<td>communication</td>" in page
    assert not list(tmp_path.glob("*.json")), "nothing is recorded that nobody has asked for"
    for _ in range(2):  # the second time replaces it
        assert reported(tmp_path, "lm", "--record", "here.json") == 0
    content = json.loads((tmp_path / "here.json").read_text())
    assert content["device"] == "h100"
    (row,) = content["runs"]
    assert row["predicted"]["exposed_communication_s"] == 0.002
    assert row["measured"]["communication"] == pytest.approx(0.03, rel=0.03)


def test_a_recorded_run_makes_the_kernels_of_the_next_plan_slower(run: Path, tmp_path: Path) -> None:
    """It took twice the compute that was planned; what the next plan had right stays right."""
    device, before = device_facts("h100"), shipped()
    stack = before.stack("eager")
    for planned_s, earlier in ((0.025, 1.0), (0.05, 0.5)):  # the second plan had heard of the first run
        figures = {**EXACT, "compute_s": planned_s}
        write_plan(run, figures, device="h100", layout={}, ranks=4, rates=earlier)
        assert reported(tmp_path, "lm", "--record", "here.json") == 0
        after = from_file(tmp_path / "here.json", device)
        for kind in ("matmul", "attention"):
            fractions = [one.fraction(kind, "bfloat16", device, stack, backward=False) for one in (before, after)]
            assert fractions[1] == pytest.approx(fractions[0] / 2, rel=0.03)
        assert after.memory_fraction(device) == pytest.approx(before.memory_fraction(device) / 2, rel=0.03)


def test_what_cannot_be_compared_says_why(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(run) is None
    assert reported(tmp_path, "lm", "--record", "here.json") == 2
    assert "nothing was planned of lm" in capsys.readouterr().err
    planned(run, ranks=64)
    assert reported(tmp_path, "lm", "--record", "here.json") == 2
    assert "it is for 64 ranks, and start 1 has 4" in capsys.readouterr().err
    assert reported(tmp_path, "lm") == 0
    assert "not compared with the plan: it is for 64 ranks" in capsys.readouterr().out


def test_a_plan_may_lie_in_the_directory_of_a_run_that_has_not_started(tmp_path: Path) -> None:
    planned(tmp_path / "runs" / "new")
    job = {"model": {"class": "m:M"}, "trainer": {}}
    with RunDirectory.open(tmp_path / "runs" / "new", job=job, fingerprint=fingerprint(job)) as opened:
        assert opened.path.name == "new"
        assert not opened.continued
    assert read_plan(tmp_path / "runs" / "new") is not None
