"""`fairlead logs`, `cancel`, and what `status` says of the job: with a FAKE scheduler, a plugin of this file."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.cli import main
from fairlead.config_bases import EnvironmentConfigBase
from fairlead.facts import Job
from fairlead.plugin_classes import EnvironmentPlugin
from fairlead.testing import FakeEntryPoint
from fairlead_runs import RunDirectory, fingerprint, list_runs
from fairlead_runs.commands import plugins as commands
from fairlead_runs.commit import LockOwner
from fairlead_runs.scheduler import JobStatus

JOB = {"run": {"seed": 0}, "trainer": {"max_steps": 100, "checkpoint": {"every_n_steps": 20}}}
PATIENCE = 30.0


class FakeConfig(EnvironmentConfigBase):
    """A scheduler of this file."""

    name: str = "fake"


class Fake(EnvironmentPlugin):
    """Answers what the test says; its command writes down that it was called."""

    config = FakeConfig

    def __init__(self) -> None:
        super().__init__()
        self.says = JobStatus("ended", "COMPLETED")
        self.asked = 0
        self.meanwhile: Callable[[], Any] | None = None

    def job_status(self, job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
        assert 0 < deadline - time.monotonic() <= 5.0
        self.asked += 1
        if self.meanwhile is not None:
            happens, self.meanwhile = self.meanwhile, None
            happens()
        return self.says

    def job_cancel(self, job: str, *, queued: bool) -> tuple[str, ...]:
        return ("fakecancel", *(["--pending"] if queued else []), job)


class Place:
    """A folder with one run, in a job of the fake scheduler or of none."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys, self.scheduler = folder, capsys, Fake()
        (folder / "bin").mkdir()
        program = folder / "bin/fakecancel"
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/cancelled\n[ ! -e {folder}/refuse ] || exit 1\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.environ = {"PATH": f"{folder}/bin:/usr/bin:/bin"}

    @property
    def run(self) -> Path:
        return self.folder / "runs/gpt"

    def open(self, job: str | None = "fake:7") -> RunDirectory:
        found = Job(job, cancel=f"fakecancel {job}") if job is not None else None
        run = RunDirectory.open(self.run, job=JOB, fingerprint=fingerprint(JOB), owner=LockOwner.here(found))
        run.begin(resolution={}, provenance={})
        return run

    def fairlead(self, *words: str, code: int = 0) -> str:
        points = [FakeEntryPoint(f"command.{n}", getattr(commands, n)) for n in ("runs", "status", "logs", "cancel")]
        plugins = PluginManager([*points, FakeEntryPoint("environment.fake", self.scheduler)])
        assert main(list(words), plugins=plugins, environ=self.environ, cwd=self.folder) == code
        printed = self.capsys.readouterr()
        return printed.out + printed.err

    @property
    def cancelled(self) -> list[str]:
        path = self.folder / "cancelled"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, capsys)


# -- status


def test_a_running_job(place: Place) -> None:
    """How fast, how long still, by the time limit and by the job's last step; when it saved and saves."""
    now = time.time()
    place.scheduler.says = JobStatus("running", "RUNNING", since=now - 60, ends=now + 3 * 3600 + 30, restarts=2)
    with place.open() as run:
        run.history.append("training", step=0)
        history = run.path / "history.jsonl"
        past = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(now - 20))
        lines = [{**json.loads(line), "time": past} for line in history.read_text().splitlines()]
        history.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run.heartbeat(node_rank=0, local_rank=0, rank=0, start=run.start).beat("train", 50)
        run.history.append("checkpoint", step=40)
        text = place.fairlead("status", "gpt")
        document = json.loads(place.fairlead("status", "gpt", "--json"))
    assert "gpt: running" in text
    assert "step:      50 of 100" in text
    assert "fake:7: running (RUNNING); its time limit is at" in text
    assert "in 3 h; restarted 2 times" in text
    assert "saved:     step 40, 0 s ago; next at step 60 in" in text
    assert document["job"]["state"] == "running"
    assert document["steps_per_s"] == pytest.approx(2.5, rel=0.1)
    assert document["left_s"] == pytest.approx(20, rel=0.1)
    assert place.scheduler.asked == 2  # once for each call


def test_a_job_that_waits_to_start_again(place: Place) -> None:
    """Its last start says nothing of that, also where it was killed and left its lock."""
    place.scheduler.says = JobStatus("queued", "PENDING, BeginTime", "waits for its earliest start", time.time() + 90.5)
    with place.open():
        text = place.fairlead("status", "gpt")
        assert "gpt: queued; its last start: exited without an error report" in text
        assert "queued (PENDING, BeginTime); waits for its earliest start; not before" in text
        assert "in 90 s" in text
        assert "held by" not in text
        place.scheduler.says = JobStatus("ended", "NODE_FAIL")
        assert "gpt: interrupted (its job has ended: NODE_FAIL)" in place.fairlead("status", "gpt")


def test_a_job_that_was_only_submitted(place: Place) -> None:
    """Known by its name from then on: shown, listed, taken out of the queue; so is one for a run that has started."""
    place.scheduler.says = JobStatus("queued", "PENDING, Priority", "waits until nodes are free")

    def submit(job: str, when: str) -> None:
        record = {"to": "fake", "id": job, "index": None, "run": str(place.run), "runs": [str(place.run)]}
        folder = place.run / "submissions" / job
        folder.mkdir(parents=True)
        (folder / "submission.json").write_text(json.dumps({**record, "submitted": when}))

    submit("7", "2026-01-01T10:00:00+00:00")
    said = place.fairlead("status", "gpt")
    assert "gpt: queued; it has not started yet" in said
    assert "fake:7: queued (PENDING, Priority); waits until nodes are free" in said
    assert [run.name for run in list_runs(place.folder / "runs")] == ["gpt"]
    assert "gpt was queued, and is not any more: fakecancel --pending fake:7" in place.fairlead("cancel", "gpt")
    with place.open("fake:8"):  # the job of a start is the newer one
        assert "fake:8: queued" in place.fairlead("status", "gpt")
    submit("9", "2126-01-01T10:00:00+00:00")
    assert "fake:9: queued" in place.fairlead("status", "gpt")
    (place.run / "submissions/9/submission.json").write_text("{")  # half a record is none
    assert "fake:8: queued" in place.fairlead("status", "gpt")


def test_a_job_that_runs_and_has_not_begun_the_run(place: Place) -> None:
    """Imports take a while: after it was submitted, and after it was started again."""
    record = {"to": "fake", "id": "7", "index": None, "run": str(place.run), "runs": [str(place.run)]}
    (place.run / "submissions/1").mkdir(parents=True)
    file = place.run / "submissions/1/submission.json"
    file.write_text(json.dumps({**record, "submitted": "2026-01-01T10:00:00+00:00"}))
    place.scheduler.says = JobStatus("running", "RUNNING", since=time.time() - 20)
    assert place.fairlead("status", "gpt").splitlines()[0] == "gpt: starting"
    assert json.loads(place.fairlead("status", "gpt", "--json"))["state"] == "starting"
    assert listed(place) == ["starting"]
    place.scheduler.says = JobStatus("ended", "FAILED, NonZeroExitCode")
    assert place.fairlead("status", "gpt").startswith(
        "gpt: unknown (its job ended before it started: FAILED, NonZeroExitCode)\n"
    )
    with place.open() as run:
        run.history.append("stop", reason="preempted")
    place.scheduler.says = JobStatus("queued", "PENDING, BeginTime")
    assert listed(place) == ["queued"]
    place.scheduler.says = JobStatus("running", "RUNNING", since=time.time() + 60)  # once more, after that start
    assert place.fairlead("status", "gpt").startswith("gpt: starting; its last start: stopped (preempted)\n")
    place.scheduler.says = JobStatus("running", "RUNNING", since=time.time() - 60)
    assert place.fairlead("status", "gpt").startswith("gpt: stopped (preempted)\n")
    place.scheduler.says = JobStatus("unknown", "fakequeue is not on the PATH")
    assert listed(place) == ["stopped"]


def listed(place: Place) -> list[str]:
    """The states that `fairlead runs` shows."""
    return [run["state"] for run in json.loads(place.fairlead("runs", "--json"))]


def test_a_sweep_is_none_of_its_runs(place: Place) -> None:
    """Its folder is listed as its members; only `cancel` takes it for one, as its scheduler does."""
    home, members = place.folder / "runs/lr", [place.folder / f"runs/lr-task-{n}" for n in range(2)]
    for index, folder in enumerate([home, *members]):
        record = {"to": "fake", "id": "7", "index": max(0, index - 1), "run": str(folder)}
        (folder / "submissions/1").mkdir(parents=True)
        (folder / "submissions/1/submission.json").write_text(
            json.dumps({**record, "runs": [str(one) for one in members], "submitted": "2026-01-01T10:00:00+00:00"})
        )
    place.scheduler.says = JobStatus("queued", "PENDING")
    for words in ((), ("runs/lr",)):
        found = json.loads(place.fairlead("runs", *words, "--json"))
        assert [(run["name"], run["state"]) for run in found] == [("lr-task-0", "queued"), ("lr-task-1", "queued")]
    assert "lr is a sweep of 2 runs" in place.fairlead("status", "lr", code=2)
    assert "lr was queued, and is not any more: fakecancel --pending fake:7" in place.fairlead("cancel", "lr")


def test_without_a_scheduler_the_rest_is_shown(place: Place) -> None:
    place.scheduler.says = JobStatus("unknown", "fakequeue is not on the PATH")
    with place.open():
        assert "fake:7: unknown (fakequeue is not on the PATH)" in place.fairlead("status", "gpt")
    with place.open("other:7"):
        assert "other:7: no plugin here knows how to ask for it" in place.fairlead("status", "gpt")
    with place.open(None):
        asked = place.scheduler.asked
        assert "job:" not in place.fairlead("status", "gpt")
        assert place.scheduler.asked == asked
        (place.run / "STOP").touch()
        assert "requested it by the file STOP: not seen yet" in place.fairlead("status", "gpt")


# -- cancel


def test_a_running_run_is_asked_by_a_file(place: Place) -> None:
    """Not by `scancel`, which would grant it 30 seconds; twice is once."""
    place.scheduler.says = JobStatus("running", "RUNNING")
    with place.open():
        assert "stops after its next step, with a checkpoint" in place.fairlead("cancel", "gpt", "--save")
        assert (place.run / "STOP").exists()
        assert "requested it by the file STOP already" in place.fairlead("cancel", "gpt")
        assert place.cancelled == []
        assert "ended by fakecancel fake:7" in place.fairlead("cancel", "gpt", "--now")
        assert place.cancelled == ["fake:7"]
        (place.folder / "refuse").touch()
        assert "the job is not ended" in place.fairlead("cancel", "gpt", "--now", code=1)


def test_a_queued_job_is_taken_out_of_the_queue(place: Place) -> None:
    """There is nothing to save; where the scheduler refuses, a file has its next start stop at once."""
    place.scheduler.says = JobStatus("queued", "PENDING")
    place.open().close()
    assert "was queued, and is not any more: fakecancel --pending fake:7" in place.fairlead("cancel", "gpt")
    assert not (place.run / "STOP").exists()
    (place.folder / "refuse").touch()
    assert "asks its next start to stop before it trains" in place.fairlead("cancel", "gpt")
    assert (place.run / "STOP").exists()


def test_what_has_ended_is_left_alone(place: Place) -> None:
    place.scheduler.says = JobStatus("ended", "COMPLETED")
    place.open().close()
    assert "nothing to cancel" in place.fairlead("cancel", "gpt")
    assert not (place.run / "STOP").exists()


def test_now_without_a_scheduler_is_a_signal_to_its_process(place: Place) -> None:
    """A process of ours on this machine."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with place.open(None):
            assert f"SIGTERM to process {os.getpid()}" in place.fairlead("cancel", "gpt", "--now")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]


def test_a_run_of_somebody_else(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so that the refusal is made here."""

    open_ = os.open

    def refused(path: Any, *more: Any, **named: Any) -> int:
        if Path(path).name == "STOP":
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, *more, **named)

    with place.open(None):
        monkeypatch.setattr("fairlead_runs.commands.cancel.os.open", refused)
        text = place.fairlead("cancel", "gpt", code=2)
        monkeypatch.undo()
    assert "you may not write into its directory" in text
    assert "chmod g+w" in text


# -- logs


def line(second: int, rank: int, text: str) -> str:
    return f"2026-11-23 10:00:{second:02d},000 [Rank {rank}] INFO: {text}\n"


def add(folder: Path, text: str) -> None:
    with (folder / "rank-00000.log").open("a") as file:
        file.write(text)


@pytest.fixture
def logs(place: Place) -> Iterator[tuple[Path, RunDirectory]]:
    with place.open(None) as run:
        folder = run.path / "logs"
        folder.mkdir(exist_ok=True)
        (folder / "rank-00000.log").write_text(line(1, 0, "one") + line(3, 0, "three"))
        (folder / "rank-00001.log").write_text(line(2, 1, "two") + "  of two lines\n" + line(4, 1, "four"))
        yield folder, run


def test_logs_in_the_order_of_time(place: Place, logs: tuple[Path, RunDirectory]) -> None:
    """A line without a time, as of a traceback, stays behind the one before it."""
    text = place.fairlead("logs", "gpt").splitlines()
    assert [one.rpartition(": ")[2] for one in text] == ["one", "two", "  of two lines", "three", "four"]
    assert place.fairlead("logs", "gpt", "--tail", "2").splitlines() == text[-2:]
    assert place.fairlead("logs", "gpt", "--rank", "1").splitlines() == [text[1], text[2], text[4]]
    assert place.fairlead("logs", "gpt", "--rank", "0-1").splitlines() == text
    assert "names no ranks" in place.fairlead("logs", "gpt", "--rank", "first", code=2)


def test_no_logs(place: Place) -> None:
    place.open(None).close()
    assert "no logs in" in place.fairlead("logs", "gpt")


def test_following_goes_on_over_a_restart_until_the_run_has_ended(
    place: Place, logs: tuple[Path, RunDirectory]
) -> None:
    """A half line is not shown, nor one twice; a rank that only the next start has is followed, too."""
    folder, run = logs
    add(folder, "2026-11-23 10:00:05,000 [Rank 0] INFO: fi")

    def later(*steps: Callable[[], Any]) -> None:
        for step in steps:
            time.sleep(0.5 if step is not start_again else 3.0)  # the state is looked at every 2 s
            step()

    def stop() -> None:
        run.history.append("stop", reason="time_limit")
        run.history.append("requeue", by="fake")
        run.close()

    def start_again() -> None:
        again.append(place.open("fake:7"))
        (folder / "rank-00002.log").write_text(line(6, 2, "six"))

    again: list[RunDirectory] = []
    steps = (
        lambda: add(folder, "ve\n"),
        stop,
        start_again,
        lambda: again[0].finish(step=100),
        lambda: again[0].close(),
    )
    thread = threading.Thread(target=later, args=steps)
    thread.start()
    text = place.fairlead("logs", "gpt", "-f")
    thread.join(PATIENCE)
    shown = [one.rpartition(": ")[2] for one in text.splitlines() if "[Rank" in one]
    assert shown == ["one", "two", "three", "four", "five", "six"]
    assert "gpt is stopped (time_limit); another start was requested: waiting for its next start" in text
    assert "gpt is finished" in text


def test_following_goes_on_where_the_next_start_comes_while_the_scheduler_is_asked(place: Place) -> None:
    """It says of the job of the start before that it is over: that is not the run's end."""
    with place.open() as run:
        run.history.append("stop", reason="time_limit")
    again: list[RunDirectory] = []

    def finish() -> None:
        again[0].finish(step=100)
        again[0].close()

    def start_again() -> None:
        again.append(place.open("fake:8"))
        threading.Timer(0.2, finish).start()

    place.scheduler.meanwhile = start_again
    text = place.fairlead("logs", "gpt", "-f")
    assert "gpt is finished" in text
    assert "stopped" not in text


def test_following_waits_for_what_a_stop_that_is_not_over_will_ask_for(place: Place) -> None:
    """The requeue is recorded after the stop."""
    run = place.open(None)
    run.history.append("stop", reason="time_limit")

    def later() -> None:
        time.sleep(1.0)
        run.history.append("requeue", by="fake")
        run.close()
        with place.open(None) as again:
            again.finish(step=100)

    thread = threading.Thread(target=later)
    thread.start()
    text = place.fairlead("logs", "gpt", "-f")
    thread.join(PATIENCE)
    assert "gpt is finished" in text
    assert "stopped" not in text


def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, fairlead_runs.commands.logs, fairlead_runs.commands.cancel, fairlead_runs.commands.status\n"
    code += "print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
