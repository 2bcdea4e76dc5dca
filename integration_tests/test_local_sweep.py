"""`fairlead submit --sweep --local`: trials in real processes, stopped, continued, and failing."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from integration_tests.jobs import JOB, changed, events, fairlead, names, repository, start

pytestmark = pytest.mark.slow

SLOW = changed(JOB, trainer={"devices": 1, "strategy": "auto", "max_steps": 24}, model={"args": {"delay": 0.3}})
AT_ONCE = ("--set", "trainer.threads=1", "--local", "--max-parallel")


def saved(run: Path) -> bool:
    return "checkpoint" in names(run)


def test_a_trial_that_fails_ends_no_other(tmp_path: Path) -> None:
    """A width of -1 is found by torch only; the same command again skips what is done."""
    quick = changed(SLOW, trainer={"max_steps": 2}, model={"args": {}})
    job = str(repository(tmp_path / "repo", job=quick))
    words = ("submit", job, "--sweep", "model.args.width=-1,4", *AT_ONCE, "2")
    sweep = fairlead(*words, cwd=tmp_path)
    assert sweep.code == 1, sweep.text
    lines = sweep.out.splitlines()
    closing = lines.index("sweep     1 of 2 done, 1 failed")
    said = "failed    small-task-0  model.args.width=-1  exit 2: building mine.model:Model failed: "
    assert lines[closing + 1].startswith(said)
    assert "negative dimension" in lines[closing + 1]
    log = tmp_path / lines[closing + 2].removeprefix("          log: ")
    assert "negative dimension" in log.read_text()
    assert names(tmp_path / "runs/small-task-1")[-1] == "finished"

    again = fairlead(*words, "--dry-run", cwd=tmp_path)
    assert [line.split()[0] for line in again.out.splitlines()] == ["sweep", "would", "finished"]
    listed = fairlead("runs", "runs/small", "--json", cwd=tmp_path)
    assert {one["name"]: one["state"] for one in json.loads(listed.out)}["small-task-1"] == "finished"
    assert "is a sweep of 2 runs" in fairlead("status", "small", cwd=tmp_path).err


@pytest.mark.full
def test_a_sweep_that_was_stopped_is_continued(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo", job=SLOW))
    words = ("submit", job, "--sweep", "model.args.width=4,2", *AT_ONCE, "2")
    runs = [tmp_path / "runs" / f"small-task-{index}" for index in range(2)]
    sweep = start(*words, cwd=tmp_path)
    sweep.until(lambda: all(map(saved, runs)), "both trials have saved")
    sweep.process.send_signal(signal.SIGINT)
    stopped = sweep.end(60)
    assert stopped.code == 130, stopped.text
    assert "SIGINT: 2 trials stop after a save; again to stop them now" in stopped.out
    assert "sweep     0 of 2 done, 2 stopped" in stopped.out
    assert [names(run)[-1] for run in runs] == ["stop", "stop"]
    again = fairlead(*words, cwd=tmp_path)
    assert again.code == 0, again.text
    for run in runs:
        starts = [event for event in events(run) if event["event"] == "start"]
        assert [one["resumed_from"] is not None for one in starts] == [False, True]
        assert names(run)[-1] == "finished"


@pytest.mark.full
def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    """One of them hangs where no signal handler of Python's runs."""
    job = str(repository(tmp_path / "repo", job=SLOW))
    words = ("submit", job, "--sweep", "model.args.width=4,2", *AT_ONCE, "2")
    sweep = start(*words, cwd=tmp_path, environ={"FAIL": "hang:0:3"})
    sweep.until(lambda: (tmp_path / "hanging").exists(), "a trial hangs")
    for _ in range(2):
        sweep.process.send_signal(signal.SIGINT)
        time.sleep(1)
    began = time.monotonic()
    assert sweep.end(60).code in (1, 130)
    assert time.monotonic() - began < 15


@pytest.mark.full
def test_sigterm_stops_all_and_starts_no_other(tmp_path: Path) -> None:
    job = str(repository(tmp_path / "repo", job=changed(SLOW, run={"name": "w{model.args.width}"})))
    sweep = start("submit", job, "--sweep", "model.args.width=2,3,4", *AT_ONCE, "2", cwd=tmp_path)
    sweep.until(lambda: all(saved(tmp_path / "runs" / name) for name in ("w2", "w3")), "two have saved")
    sweep.process.send_signal(signal.SIGTERM)
    ended = sweep.end(60)
    assert ended.code == 143, ended.text
    assert "sweep     0 of 3 done, 2 stopped, 1 not started" in ended.out
    assert not (tmp_path / "runs" / "w4").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--local",), "--local is for a sweep"),
        (("--sweep", "run.seed=1,2", "--local", "--to", "slurm"), "--to is for a scheduler"),
        (("--sweep", "model.args.widht=1,2", "--local"), "write 'width'"),
        (("--sweep", "run.seed=1,2", "--local", "--max-parallel", "0"), "--max-parallel is at least 1"),
    ],
)
def test_a_wrong_call_starts_nothing(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    job = str(repository(tmp_path / "repo", job=SLOW))
    call = fairlead("submit", job, *words, cwd=tmp_path)
    assert (call.code, says in call.err) == (2, True), call.text
    assert not (tmp_path / "runs").exists()
