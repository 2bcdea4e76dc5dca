"""The run directory: one fingerprint, one job at a time, nothing overwritten, nothing written when it refuses."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import FingerprintError, RunDirectoryError, RunLockedError
from fairlead.interfaces import Job
from fairlead.yaml import load_file
from fairlead_runs import RunDirectory, fingerprint, list_runs, read_history, state
from fairlead_runs.commit import (
    Checkpoint,
    LockOwner,
    Syscalls,
    atomic_write,
    checkpoint_name,
    publish,
    stage,
)
from fairlead_runs.ownership import stored_fingerprint


def job(**trainer: Any) -> dict[str, Any]:
    return {
        "run": {"name": "gpt", "seed": 1},
        "model": {"class": "gpt:GPT", "args": {"lr": 1e-3, "api_key": "hunter2"}},
        "data": {"class": "gpt:Data", "args": {}},
        "trainer": {"precision": "32-true", "max_steps": 200, "devices": 2, **trainer},
    }


def open_run(path: Path, the_job: dict[str, Any] | None = None, **options: Any) -> RunDirectory:
    the_job = the_job or job()
    return RunDirectory.open(path, job=the_job, fingerprint=fingerprint(the_job), **options)


def begin(run: RunDirectory, **git: Any) -> int:
    return run.begin(resolution={"num_nodes": {"value": 1, "reason": "default"}}, provenance={"git": git or None})


def saved(run: RunDirectory, step: int = 100) -> Checkpoint:
    """A checkpoint of this start."""
    staged = stage(run.checkpoints, checkpoint_name(step), token=run.token)
    (staged / "state.ckpt").write_bytes(b"state")
    return publish(staged, {"step": step, "start": run.start}, fence=run.fence)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_a_fresh_run_has_the_layout_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "my runs" / "gpt"
    with open_run(path) as run:
        assert (run.continued, run.finished, run.load) == (False, None, None)
        assert begin(run) == 1
        assert run.token == "s1"
        names = {str(p.relative_to(path)) for p in path.rglob("*")}
    assert {
        "job.yaml",
        "fingerprint.json",
        "history.jsonl",
        "starts/1/resolution.json",
        "starts/1/provenance.json",
        "checkpoints",
        "logs",
        "heartbeats",
    } <= names
    assert not (path / ".lock").exists()
    (event,) = read_history(path / "history.jsonl")
    assert (event["event"], event["start"]) == ("start", 1)


def test_no_secret_is_written_anywhere(tmp_path: Path) -> None:
    with open_run(tmp_path / "gpt") as run:
        run.begin(resolution={"x": {"value": "hunter2", "api_token": "hunter2"}}, provenance={"password": "hunter2"})
        run.history.append("note", wandb_api_key="hunter2")
        run.finish(secret="hunter2")
    written = {name for name, data in snapshot(tmp_path).items() if data and b"hunter2" in data}
    assert written == {"gpt/starts/1/resolution.json"}  # where its name says nothing: the resolved value "x"


def test_the_same_fingerprint_continues_with_the_next_start(tmp_path: Path) -> None:
    with open_run(tmp_path / "gpt") as run:
        begin(run)
    later = job(devices=4, max_steps=300)  # both may change
    with open_run(tmp_path / "gpt", later) as run:
        assert run.continued
        assert begin(run) == 2
        assert run.token == "s2"
    written: Any = load_file(tmp_path / "gpt" / "job.yaml").data
    assert written["trainer"]["max_steps"] == 300


def test_another_fingerprint_is_refused_with_the_difference_and_nothing_is_written(tmp_path: Path) -> None:
    with open_run(tmp_path / "gpt", job(precision="bf16-mixed")) as run:
        saved(run)
    before = snapshot(tmp_path)
    with pytest.raises(FingerprintError) as caught:
        open_run(tmp_path / "gpt", job(precision="32-true", devices=8, accumulate_grad_batches=2))
    text = caught.value.block()
    assert "trainer.precision: bf16-mixed -> 32-true" in text
    assert "trainer.accumulate_grad_batches: (not set) -> 2" in text
    assert "devices" not in text
    assert "--resume never" in text
    assert "gpt-2" in text
    assert caught.value.exit_code == 2
    assert snapshot(tmp_path) == before


def test_a_change_that_is_accepted_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    def moved(*accept: str, path: str = "/new", lr: float = 1e-3) -> dict[str, Any]:
        changed = job()
        changed["data"]["args"] = {"path": path}
        changed["model"]["args"]["lr"] = lr
        return {**changed, "run": {**changed["run"], "accept": list(accept)}}

    with open_run(tmp_path / "gpt", moved(path="/old")) as run:
        begin(run)
        saved(run)
    with pytest.raises(FingerprintError, match=r"model\.args\.lr: 0\.001 -> 0\.1\n(?!.*path: )") as refused:
        open_run(tmp_path / "gpt", moved("data.args", lr=0.1))
    assert "--accept model.args.lr" in str(refused.value)
    with open_run(tmp_path / "gpt", moved("data.args.path")) as run:
        begin(run)
    assert read_history(tmp_path / "gpt" / "history.jsonl")[-1]["accepted"] == ["data.args.path: /old -> /new"]
    for accept in ((), ("data.args.path",)):  # the run has them now; a requeued job says it once more
        with open_run(tmp_path / "gpt", moved(*accept)) as run:
            begin(run)
            assert (run.accepted, run.continued) == ((), True)
    with pytest.raises(FingerprintError, match=r"no setting 'data\.args\.pat'[\s\S]*did you mean data\.args\.path"):
        open_run(tmp_path / "gpt", moved("data.args.pat"))


def test_never_makes_siblings_and_overwrites_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path / "gpt"):
        pass
    before = snapshot(tmp_path / "gpt")
    for expected in ("gpt-2", "gpt-3"):
        with open_run(tmp_path / "gpt", resume="never") as run:
            assert run.path.name == expected
            assert not run.continued
    assert snapshot(tmp_path / "gpt") == before


def test_never_also_works_beside_a_damaged_or_foreign_directory(tmp_path: Path) -> None:
    with open_run(tmp_path / "gpt"):
        pass
    (tmp_path / "gpt" / "fingerprint.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="damaged"):
        open_run(tmp_path / "gpt")
    with open_run(tmp_path / "gpt", resume="never") as run:
        assert run.path.name == "gpt-2"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with open_run(tmp_path / "photos", resume="never") as run:
        assert run.path.name == "photos-2"
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_many_jobs_with_never_at_once_get_a_directory_each(tmp_path: Path) -> None:
    runs: list[RunDirectory] = []
    barrier = threading.Barrier(8)

    def one() -> None:
        barrier.wait()
        runs.append(open_run(tmp_path / "gpt", resume="never", owner=LockOwner.here()))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.path.name for run in runs) == ["gpt", *(f"gpt-{n}" for n in range(2, 9))]
    for run in runs:
        run.close()


def test_a_requeued_job_with_never_continues_its_own_sibling(tmp_path: Path) -> None:
    """Its command still says `never`; starting anew after each preemption would never end."""
    with open_run(tmp_path / "gpt") as run:
        begin(run)
    first = LockOwner.here(Job("slurm:7", attempt=0))
    with open_run(tmp_path / "gpt", resume="never", owner=first) as run:
        begin(run)
        assert run.path.name == "gpt-2"
    again = LockOwner.here(Job("slurm:7", attempt=1))
    with open_run(tmp_path / "gpt", resume="never", owner=again) as run:
        assert (run.path.name, run.continued) == ("gpt-2", True)
    with open_run(tmp_path / "gpt", resume="never", owner=LockOwner.here(Job("slurm:8"))) as run:
        assert run.path.name == "gpt-3"


def test_a_path_says_what_to_load_and_another_fingerprint_goes_to_a_sibling(tmp_path: Path) -> None:
    with open_run(tmp_path / "gpt") as run:
        checkpoint = saved(run).path
    with open_run(tmp_path / "gpt", resume=checkpoint) as run:
        assert (run.path.name, run.load, run.continued) == ("gpt", checkpoint, True)
    with open_run(tmp_path / "gpt", job(precision="64-true"), resume=str(checkpoint)) as run:
        assert (run.path.name, run.load, run.continued) == ("gpt-2", checkpoint, False)


def test_a_finished_run_says_so_and_writes_nothing_unless_more_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "gpt"
    with open_run(path) as run:
        begin(run)
        run.finish(step=200, metrics={"loss": 1.5})
    before = snapshot(tmp_path)
    run = open_run(path)
    assert run.finished is not None
    assert run.finished["step"] == 200
    assert run.lock is None
    assert snapshot(tmp_path) == before
    with open_run(path, job(max_steps=400)) as run:
        assert run.finished is None
        begin(run)
    with open_run(path, job(max_steps=400)) as run:  # a start after the end: not finished any more
        assert run.finished is None


HOLD = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_run_directory as t
with t.open_run(Path(sys.argv[1])) as run:
    t.begin(run)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_job_is_refused_and_a_killed_one_is_continued(tmp_path: Path) -> None:
    """Two jobs pointed at one run directory."""
    path = tmp_path / "gpt"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        before = snapshot(tmp_path)
        with pytest.raises(RunLockedError, match=f"process {holder.pid}"):
            open_run(path)
        assert snapshot(tmp_path) == before
        assert state(path).state == "running"
        holder.kill()
    assert state(path).state == "interrupted"
    with open_run(path) as run:
        assert begin(run) == 2


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "gpt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="a file is in the way"):
        open_run(tmp_path / "gpt")
    with pytest.raises(RunDirectoryError, match="a file is in the way"):
        open_run(tmp_path / "gpt" / "below")
    assert snapshot(tmp_path) == {"gpt": b"mine"}


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RunDirectoryError, match=r"it holds thesis\.tex"):
        open_run(tmp_path)
    assert snapshot(tmp_path) == {"thesis.tex": b"..."}


def test_what_a_killed_creation_or_an_earlier_rank_left_is_no_obstacle(tmp_path: Path) -> None:
    rank1 = RunDirectory(tmp_path / "gpt", rank=1)
    rank1.heartbeat(node_rank=0, local_rank=1, rank=1).beat("start", 0)
    (tmp_path / "gpt" / ".tmp-1234").touch()
    (tmp_path / "gpt" / "job.yaml").write_text("half")
    with open_run(tmp_path / "gpt") as run:
        begin(run)
        assert [beat.rank for beat in state(run.path).ranks] == [1]
    with pytest.raises(RunDirectoryError, match="does not hold"):
        begin(rank1)


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "fsync_dir", "rename"])
def test_a_disk_that_refuses_is_reported_with_the_path_and_the_lock_is_released(tmp_path: Path, call: str) -> None:
    failing = Syscalls()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    setattr(failing, call, refuse)
    with pytest.raises(RunDirectoryError) as caught:
        open_run(tmp_path / "gpt", syscalls=failing)
    assert str(tmp_path / "gpt") in caught.value.block()
    assert "read-only" in caught.value.block()
    with open_run(tmp_path / "gpt") as run:
        assert not run.continued
        begin(run)


def test_a_run_that_lost_its_lock_may_not_write(tmp_path: Path) -> None:
    run = open_run(tmp_path / "gpt")
    begin(run)
    other = dataclasses.replace(LockOwner.here(), nonce="other", host="node18")
    atomic_write(run.path / ".lock", other.dump())
    with pytest.raises(RunLockedError, match="node18"):
        run.finish()
    run.close()


def test_changed_code_is_known_from_the_provenance_of_the_starts(tmp_path: Path) -> None:
    changes = []
    for git in ({"commit": "a" * 40, "diff": ""}, {"commit": "a" * 40, "diff": ""}, {"commit": "b" * 40, "diff": ""}):
        with open_run(tmp_path / "gpt") as run:
            begin(run, **git)
            changes.append(run.code.changed)
    assert changes == [None, False, True]
    assert run.code.summary == "the commit changed: aaaaaaaaaaaa -> bbbbbbbbbbbb"
    assert [event["code_changed"] for event in read_history(run.history.path)] == changes


def test_the_job_is_written_with_our_yaml_and_can_be_read_again(tmp_path: Path) -> None:
    from fairlead.yaml import load

    the_job = job()
    run = RunDirectory.open(tmp_path / "gpt", job=the_job, fingerprint=fingerprint(the_job))
    run.close()
    text = (tmp_path / "gpt" / "job.yaml").read_text()
    the_job["model"]["args"]["api_key"] = "<redacted>"
    assert load(text, source="job.yaml").data == the_job


def test_runs_are_listed_among_junk(tmp_path: Path) -> None:
    for name in ("b", "a"):
        with open_run(tmp_path / name) as run:
            begin(run)
            run.finish(step=7, metrics={"loss": 0.5})
    (tmp_path / "notes.txt").touch()
    (tmp_path / "junk").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "fingerprint.json").write_text("{")
    (tmp_path / "damaged" / "history.jsonl").mkdir()
    found = list_runs(tmp_path)
    assert [(run.name, run.state, run.step) for run in found] == [
        ("a", "finished", 7),
        ("b", "finished", 7),
        ("damaged", "unknown", None),
    ]
    assert list_runs(tmp_path / "a") == [found[0]]
    with pytest.raises(RunDirectoryError, match="cannot list"):
        list_runs(tmp_path / "none")


@pytest.mark.parametrize(
    ("event", "fields", "expected", "reason"),
    [
        ("stop", {"reason": "SIGTERM, everything saved"}, "stopped", "SIGTERM, everything saved"),
        ("failed", {"reason": "rank 3: ValueError"}, "failed", "rank 3: ValueError"),
        (
            "checkpoint",
            {"step": 5, "metrics": {"loss": 2.0}},
            "interrupted",
            "it exited without an error report: killed, or",
        ),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, event: str, fields: dict[str, Any], expected: str, reason: str) -> None:
    assert state(tmp_path).state == "unknown"
    with open_run(tmp_path / "gpt") as run:
        assert state(run.path).reason == "starting"
        begin(run)
        beats = [run.heartbeat(node_rank=r // 2, local_rank=r % 2, rank=r) for r in range(4)]
        for rank, beat in enumerate(beats):
            beat.beat("train", 40 + rank)
            beat.close()
        running = state(run.path)
        assert (running.state, running.step, running.starts, len(running.ranks)) == ("running", 43, 1, 4)
        assert running.owner is not None
        assert running.owner.pid == os.getpid()
        run.history.append(event, **fields)
    after = state(run.path)
    assert after.state == expected
    assert after.reason.startswith(reason)
    assert after.owner is None
    assert after.metrics == fields.get("metrics", {})
    later = state(run.path, now=after.ranks[-1].time + 100)
    assert later.heartbeat_age_s == pytest.approx(100, abs=1)


def test_beats_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    """After going from 2 to 1 ranks, rank 1 must not look stuck."""
    with open_run(tmp_path / "gpt") as run:
        begin(run)
        old = run.heartbeat(node_rank=0, local_rank=1, rank=1)
        old._now = lambda: 1000.0
        old.beat("train", 900)
        old.close()
        run.heartbeat(node_rank=0, local_rank=0, rank=0).beat("train", 5)
    assert [beat.rank for beat in state(run.path).ranks] == [0]
    assert state(run.path).step == 5


def test_a_run_without_a_step_and_a_checkpoint_owns_nothing(tmp_path: Path) -> None:
    """A first start that failed in its set-up must not cost the name."""
    path = tmp_path / "gpt"
    with open_run(path) as run:
        begin(run)
        run.heartbeat(node_rank=0, local_rank=0, rank=0, start=1).beat("setup", 0)
        run.history.append("failed", step=0, error="no luck in setup")
    other = job(precision="bf16-mixed")
    with open_run(path), pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
        open_run(path, other)  # not while it lives
    with open_run(path, other) as run:
        assert (run.path, run.continued) == (path, False)
        assert begin(run) == 2
    assert stored_fingerprint(path) == fingerprint(other)
    assert "bf16-mixed" in (path / "job.yaml").read_text()
    with open_run(path, other) as run:
        assert run.continued


@pytest.mark.parametrize("what", ["checkpoint", "finished"])
def test_a_run_with_a_checkpoint_or_an_end_owns_its_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / "gpt"
    with open_run(path) as run:
        begin(run)
        if what == "checkpoint":
            (path / "checkpoints" / "step-00000001").mkdir()  # damaged, but somebody may want it
        else:
            run.history.append("finished", step=1)
    with pytest.raises(FingerprintError, match=r"--accept trainer\.precision"):
        open_run(path, job(precision="bf16-mixed"))


def test_a_run_that_failed_before_it_saved_anything_may_be_repaired(tmp_path: Path) -> None:
    """As one with a typo in EarlyStopping's monitor, which trains an epoch before it is found."""
    path = tmp_path / "gpt"
    with open_run(path) as run:
        begin(run)
        run.heartbeat(node_rank=0, local_rank=0, rank=0, start=1).beat("train", 24)
        (path / "metrics.csv").write_text("step,loss\n0,1.5\n")
        run.history.append("failed", step=24, error="no metric val/los")
    with open_run(path, job(precision="bf16-mixed")) as run:
        assert (run.path, run.continued) == (path, False)
