"""Two live starts on one run: one that was frozen and replaced meanwhile does no harm when it wakes (issue 14)."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlead_runs import read_history, state
from fairlead_runs.commit import LockOwner, list_checkpoints, newest_complete
from fairlead_runs.remote import Store
from fairlead_runs.remote import list_checkpoints as copies
from integration_tests.jobs import JOB, Running, changed, events, fairlead, marked, names, repository, start
from integration_tests.s3 import S3, s3_server

pytestmark = pytest.mark.full

STEPS = 40
ALONE: dict[str, Any] = {"devices": 1, "strategy": "auto", "max_steps": STEPS}
SLOW = {"args": {"width": 4, "delay": 0.2}}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        server.call("PUT", "runs-bucket")
        yield server


def until(running: Running, run: Path, event: str, begun: int, times: int) -> None:
    """Waits for so many events of a start of the run."""
    wanted = (event, begun)
    running.until(lambda: [(e["event"], e["start"]) for e in events(run)].count(wanted) >= times, f"{times} {event}")


def send(running: Running, number: signal.Signals) -> None:
    """Stops or wakes all processes of a start, as happens to those of a machine that is suspended."""
    for pid in marked(running.marker):
        os.kill(pid, number)


def test_on_one_run_directory(tmp_path: Path) -> None:
    """It publishes, deletes and finishes nothing, says that it was replaced, and the other one does not notice it."""
    job = str(repository(tmp_path, job=changed(JOB, trainer={"max_steps": STEPS}, model=SLOW)))
    run = tmp_path / "runs" / "small"
    first = start("fit", job, cwd=tmp_path)
    until(first, run, "checkpoint", begun=1, times=2)
    send(first, signal.SIGSTOP)
    os.utime(run / ".lock", (0, 0))  # as if it had been silent for two minutes
    second = start("fit", job, cwd=tmp_path)
    until(second, run, "checkpoint", begun=2, times=1)
    send(first, signal.SIGCONT)
    woken = first.end()
    assert woken.code == 1, woken.text
    assert woken.text.count("this start was replaced") == 1
    ended = second.end()
    assert ended.code == 0, ended.text

    took_over = next(event for event in events(run) if "took_over" in event)
    assert "no sign of life" in took_over["took_over"]
    assert f"process {took_over['pid']}" in woken.text
    later = events(run)[events(run).index(took_over) :]
    assert {event["rank"] for event in later if event["start"] == 1} <= {1}  # it lost its first rank, and said so
    believed = read_history(run / "history.jsonl")
    assert {event["start"] for event in believed[believed.index(took_over) :]} == {2}
    newest = newest_complete(run / "checkpoints", deep=True)
    assert newest.checkpoint is not None
    assert not newest.skipped
    assert (newest.checkpoint.step, newest.checkpoint.metadata["start"]) == (STEPS, 2)
    assert {one.metadata["start"] for one in list_checkpoints(run / "checkpoints")} == {2}
    rows = (run / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [str(step) for step in range(STEPS)]
    assert state(run).state == "finished"


IN_A_POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29400",
}


def test_after_a_kill_on_another_host(tmp_path: Path) -> None:
    """The next pod does not end with exit code 2, which would be final; a person is told of --wait."""
    job = str(repository(tmp_path, job=changed(JOB, trainer={**ALONE, "max_steps": 2})))
    run = tmp_path / "runs" / "small"
    assert fairlead("fit", job, cwd=tmp_path).code == 0
    more = ("fit", job, "--set", "trainer.max_steps=4")

    def killed(age_s: float, of: str | None = None) -> None:
        owner = dataclasses.replace(LockOwner.here(), host="node17", boot="another", nonce="other", job=of)
        (run / ".lock").write_bytes(owner.dump())
        then = time.time() - age_s
        os.utime(run / ".lock", (then, then))

    killed(60)
    refused = fairlead(*more, cwd=tmp_path)
    assert refused.code == 2, refused.text
    assert "another job is using this run directory" in refused.text
    assert "--wait takes over" in refused.text
    killed(105)
    pod = fairlead(*more, cwd=tmp_path, environ=IN_A_POD)
    assert pod.code == 0, pod.text
    assert re.search(r"waiting, .* on node17, .* it is taken over in \d+ s", pod.text)
    killed(60, of="slurm:4711")
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"  # a FAKE: it says what SLURM does of a job that has lost its node
    scontrol.write_text("#!/bin/sh\necho JobId=4711 JobName=x JobState=NODE_FAIL NodeList=node[16-17]\n")
    scontrol.chmod(0o755)
    known = fairlead(
        *more[:-1], "trainer.max_steps=5", cwd=tmp_path, environ={"PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    )
    assert known.code == 0, known.text
    assert "waiting, " not in known.text
    took_over = [event["took_over"] for event in events(run) if "took_over" in event][-1]
    assert "its job slurm:4711 has ended: NODE_FAIL" in took_over
    killed(105)
    person = fairlead("fit", job, "--set", "trainer.max_steps=6", "--wait", cwd=tmp_path)
    assert person.code == 0, person.text
    assert "waiting, " in person.text


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
    until(first, runs[0], "uploaded", begun=1, times=2)
    send(first, signal.SIGSTOP)
    second = start("fit", job, cwd=machines[1], environ=s3.environ)
    until(second, runs[1], "uploaded", begun=2, times=1)
    store = Store.open("s3://runs-bucket/prefix/small")
    send(first, signal.SIGCONT)
    woken = first.end()
    assert woken.code == 1, woken.text
    assert "this start was replaced: another one of this run writes to the store now" in woken.text
    assert "start 2 on" in woken.text
    assert "finished" not in names(runs[0])
    assert max(event.get("step", 0) for event in events(runs[0])) < STEPS  # it ended when it knew
    ended = second.end()
    assert ended.code == 0, ended.text
    found = copies(store)
    assert {(one.metadata["start"], one.complete) for one in found} == {(2, True)}
    assert found[-1].step == STEPS
    history = (store.read("history.jsonl") or b"").decode()
    assert '"start": 2' in history.splitlines()[-1]
