"""Two live starts on one run: one that was frozen and replaced meanwhile does no harm when it wakes (issue 14)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead_runs import state
from fairlead_runs.commit import list_checkpoints, newest_complete
from fairlead_runs.remote import Store
from fairlead_runs.remote import list_checkpoints as copies
from integration_tests.jobs import JOB, Running, changed, events, names, repository, start
from integration_tests.s3 import S3, s3_server

ALONE: dict[str, Any] = {"devices": 1, "strategy": "auto", "max_steps": 40}
SLOW = {"args": {"width": 4, "delay": 0.2}}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        server.call("PUT", "runs-bucket")
        yield server


def count(run: Path, event: str, pid: int) -> int:
    return sum(one["event"] == event and one["pid"] == pid for one in events(run))


def freeze(running: Running, run: Path, event: str) -> None:
    """Stops the process, as a suspended machine does, once it has had two of such events."""
    pid = running.process.pid
    running.until(lambda: count(run, event, pid) >= 2, f"its second {event}")
    running.process.send_signal(signal.SIGSTOP)


def test_on_one_run_directory(tmp_path: Path) -> None:
    """It publishes, deletes and finishes nothing, says that it was replaced, and the other one does not notice it."""
    job = str(repository(tmp_path, job=changed(JOB, trainer=ALONE, model=SLOW)))
    run = tmp_path / "runs" / "small"
    first = start("fit", job, cwd=tmp_path)
    freeze(first, run, "checkpoint")
    os.utime(run / ".lock", (0, 0))  # as if it had been silent for two minutes
    second = start("fit", job, cwd=tmp_path)
    second.until(lambda: count(run, "checkpoint", second.process.pid) >= 1, "a checkpoint of the second")
    first.process.send_signal(signal.SIGCONT)
    woken = first.end()
    assert woken.code == 1, woken.text
    assert woken.text.count("this start was replaced") == 1
    assert f"process {second.process.pid}" in woken.text
    ended = second.end()
    assert ended.code == 0, ended.text

    took_over = [event for event in events(run) if event["event"] == "start"][1]
    assert "no sign of life" in took_over["took_over"]
    later = events(run)[events(run).index(took_over) :]
    assert {event["pid"] for event in later} == {second.process.pid}
    newest = newest_complete(run / "checkpoints", deep=True)
    assert newest.checkpoint is not None
    assert not newest.skipped
    assert (newest.checkpoint.step, newest.checkpoint.metadata["start"]) == (40, 2)
    assert {one.metadata["start"] for one in list_checkpoints(run / "checkpoints")} == {2}
    rows = (run / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(step) for step in range(40)]
    assert state(run).state == "finished"


def test_on_an_object_store(s3: S3, tmp_path: Path) -> None:
    """On two machines, which share nothing but the store; the first one notices before its next manifest."""
    remote = {"name": "remote", "url": "s3://runs-bucket/prefix", "inner": "torch"}
    trainer = {**ALONE, "checkpoint_io": remote}
    job = str(repository(tmp_path / "user", job=changed(JOB, trainer=trainer, model=SLOW)))
    machines = [tmp_path / name for name in ("first", "second")]
    runs = [machine / "runs" / "small" for machine in machines]
    for machine in machines:
        machine.mkdir()
    first = start("fit", job, cwd=machines[0], environ=s3.environ)
    freeze(first, runs[0], "uploaded")
    second = start("fit", job, cwd=machines[1], environ=s3.environ)
    second.until(lambda: count(runs[1], "uploaded", second.process.pid) >= 1, "an upload of the second")
    store = Store.open("s3://runs-bucket/prefix/small")
    first.process.send_signal(signal.SIGCONT)
    woken = first.end()
    assert woken.code == 1, woken.text
    assert "this start was replaced: another one of this run writes to the store now" in woken.text
    assert "start 2 on" in woken.text
    assert names(runs[0])[-1] != "finished"
    ended = second.end()
    assert ended.code == 0, ended.text
    found = copies(store)
    assert {(one.metadata["start"], one.complete) for one in found} == {(2, True)}
    assert found[-1].step == 40
    history = (store.read("history.jsonl") or b"").decode()
    assert f'"pid": {second.process.pid}' in history.splitlines()[-1]
