"""Checkpoints on a real S3 server, disturbed as networks, stores and people do (issue 5)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead.errors import CheckpointError, MissingDependencyError
from fairlead.install import install_line
from fairlead_runs.commit import Checkpoint, RetentionPolicy, checkpoint_name, publish, stage, write_file
from fairlead_runs.commit import list_checkpoints as local
from fairlead_runs.remote import (
    DamagedCopyError,
    Store,
    discard_incomplete,
    download,
    fetch,
    list_checkpoints,
    newest_complete,
    retain,
    upload,
    verify,
)
from integration_tests.jobs import JOB, changed, events, fairlead, repository, start
from integration_tests.s3 import S3, s3_server

PART = 5 << 20
LARGE = 2 * PART + 12345  # three parts
QUICK = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[S3]:
    """The server with no faults and an empty bucket `runs`."""
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    server.faults.clear()
    server.call("POST", "moto-api/reset")
    server.call("PUT", "runs-bucket")
    yield server
    server.faults.clear()


@pytest.fixture
def store(s3: S3) -> Store:
    return Store.open("s3://runs-bucket/prefix/gpt", tries=QUICK, part_mib=5)


def saved(root: Path, step: int, size: int = 1000, start: int = 1, **metrics: float) -> Checkpoint:
    """A checkpoint of two files."""
    staged = stage(root, checkpoint_name(step), token="s1")
    (staged / "ranks").mkdir()
    content = (step.to_bytes(4, "big") + os.urandom(60)) * (size // 64 + 1)
    hashes = {name: write_file(staged / name, content[:size]) for name in ("state.ckpt", "ranks/rank-00000.pt")}
    return publish(staged, {"step": step, "start": start, "metrics": metrics}, hashes=hashes)


def names(store: Store) -> list[str]:
    return [item.name for item in list_checkpoints(store)]


def content(path: Path) -> dict[str, bytes]:
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in files.items() if name != "manifest.json"}


def test_what_is_uploaded_in_parts_comes_back_bit_for_bit(store: Store, s3: S3, tmp_path: Path) -> None:
    """Save, list, verify, load and retention over an URL; the manifest is the last object that is written."""
    here = saved(tmp_path / "a", 200, LARGE)
    copy = upload(here.path, store)
    assert copy.url == "s3://runs-bucket/prefix/gpt/step-00000200"
    writes = [r for r in s3.faults.requests if r.startswith(("PUT", "POST"))]
    assert sum("partNumber=" in request for request in writes) == 6
    assert [request.rpartition("/")[2] for request in writes[-2:]] == ["manifest.json", "latest"]
    assert verify(store, newest_complete(store).checkpoint or copy, deep=True) == []
    back = fetch(copy.url, tmp_path / "b", store=store)
    assert content(back.path) == content(here.path)
    assert back.metadata == here.metadata


@pytest.mark.parametrize("how", ["503", "500", "reset", "truncate", "flip"])
def test_a_part_that_fails_is_sent_again(store: Store, s3: S3, tmp_path: Path, how: Any) -> None:
    """A full answer for half an object, or for other bytes, is noticed by size and by the store's checksum."""
    here = saved(tmp_path / "a", 1, LARGE)
    part = 3 if how == "truncate" else 2  # a store refuses a part in the middle that is too small
    fault = s3.faults.add(how, "PUT", rf"state\.ckpt.*partNumber={part}")
    before = random.getstate()
    upload(here.path, store)
    assert fault.met.is_set()
    assert random.getstate() == before, "the pauses of the store's library draw from a generator of their own"
    assert content(download(store, list_checkpoints(store)[0], tmp_path / "b").path) == content(here.path)


def test_a_store_that_does_not_answer_times_out(s3: S3, tmp_path: Path) -> None:
    here = saved(tmp_path / "a", 1)
    options = {"config_kwargs": {"read_timeout": 1}}
    store = Store.open("s3://runs-bucket/hang", options, tries=QUICK)
    fault = s3.faults.add("hang", "PUT", "state.ckpt", times=1)
    upload(here.path, store)
    assert fault.met.is_set()
    assert names(store) == ["step-00000001"]


@pytest.mark.full
def test_a_store_that_stays_away_is_an_error_that_says_so_and_leaves_no_checkpoint(
    store: Store, s3: S3, tmp_path: Path
) -> None:
    old, new = saved(tmp_path / "a", 1), saved(tmp_path / "a", 2)
    upload(old.path, store)
    s3.faults.add("500", "PUT", r"step-00000002/ranks", times=1000)
    with pytest.raises(CheckpointError, match="cannot write an object") as raised:
        upload(new.path, store)
    assert "internal error" in str(raised.value)
    newest = newest_complete(store)
    assert newest.checkpoint is not None
    assert newest.checkpoint.name == "step-00000001"
    s3.faults.clear()
    assert "step-00000002/state.ckpt" in store.list()
    assert discard_incomplete(store) == ["step-00000002"]
    assert not [name for name in store.list() if name.startswith("step-00000002")]


@pytest.mark.full
def test_what_an_earlier_attempt_has_uploaded_is_not_sent_again(store: Store, s3: S3, tmp_path: Path) -> None:
    here = saved(tmp_path / "a", 1, LARGE)
    s3.faults.add("500", "PUT", r"state\.ckpt", times=1000)
    with pytest.raises(CheckpointError):
        upload(here.path, store, threads=1)
    s3.faults.clear()
    upload(here.path, store)
    assert not [r for r in s3.faults.requests if r.startswith("PUT") and "ranks" in r]
    assert verify(store, list_checkpoints(store)[0], deep=True) == []


def test_a_damaged_or_half_deleted_copy_is_passed_over(store: Store, tmp_path: Path) -> None:
    """A missing object, another size, flipped bits and a torn manifest, each with its reason."""
    for step in (1, 2, 3, 4, 5):
        upload(saved(tmp_path / "a", step).path, store)
    store.write("step-00000005/manifest.json", b'{"format": 1, "fi')
    store.delete(["step-00000004/state.ckpt"])
    store.write("step-00000003/state.ckpt", b"short")
    newest = newest_complete(store)
    assert newest.checkpoint is not None
    assert newest.checkpoint.name == "step-00000002"
    assert [str(damage) for damage in newest.skipped] == [
        "step-00000004/state.ckpt: missing",
        "step-00000003/state.ckpt: 5 bytes, should be 1000",
    ]
    assert "not JSON" in str(list_checkpoints(store)[-1].problem)
    store.write("step-00000002/state.ckpt", b"x" * 1000)
    assert "checksum is wrong" in str(verify(store, newest.checkpoint, deep=True))
    with pytest.raises(DamagedCopyError, match=r"state\.ckpt: its \w+ checksum is wrong"):
        download(store, newest.checkpoint, tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


def test_a_checkpoint_that_is_damaged_here_is_not_uploaded(store: Store, tmp_path: Path) -> None:
    here = saved(tmp_path / "a", 1)
    (here.path / "state.ckpt").write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match="damaged and was not uploaded"):
        upload(here.path, store)
    assert names(store) == []


def test_retention_deletes_manifests_first_and_keeps_the_newest_and_the_best(
    store: Store, s3: S3, tmp_path: Path
) -> None:
    for step, loss in ((1, 0.1), (2, 0.9), (3, 0.8), (4, 0.7)):
        upload(saved(tmp_path / "a", step, loss=loss).path, store)
    store.write("step-00000002/KEEP", b"")
    store.delete(["step-00000004/state.ckpt"])  # damaged: it counts as nothing, and its remains stay
    s3.faults.clear()
    deleted = retain(store, RetentionPolicy(last=1, best=1, metric="loss"))
    assert deleted == []
    upload(saved(tmp_path / "a", 5, loss=0.6).path, store)
    s3.faults.clear()
    assert [item.name for item in retain(store, RetentionPolicy(last=1, best=1, metric="loss"))] == ["step-00000003"]
    deletes = [request for request in s3.faults.requests if request.startswith(("DELETE", "POST"))]
    assert deletes[0] == "DELETE /runs-bucket/prefix/gpt/step-00000003/manifest.json"
    assert names(store) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]


def test_another_checkpoint_of_a_step_does_not_replace_the_one_there(store: Store, tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", 1), saved(tmp_path / "b", 1, start=2)
    assert [upload(c.path, store).name for c in (first, first, second, second)] == [
        "step-00000001",
        "step-00000001",
        "step-00000001.2",
        "step-00000001.2",
    ]
    newest = newest_complete(store).checkpoint
    assert newest is not None
    assert newest.metadata["start"] == 2


UPLOADER = """
import sys
from pathlib import Path
from fairlead_runs.remote import Store, upload
upload(Path(sys.argv[1]), Store.open("s3://runs-bucket/prefix/gpt", part_mib=5), threads=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("at", [r"partNumber=1&", r"partNumber=3&", r"state\.ckpt\?uploadId", "manifest", "latest"])
def test_a_process_killed_in_an_upload_leaves_the_one_before(store: Store, s3: S3, tmp_path: Path, at: str) -> None:
    """SIGKILL of a real process at each stage; then the same checkpoint is uploaded to its end."""
    upload(saved(tmp_path / "a", 1).path, store)
    here = saved(tmp_path / "a", 2, LARGE)
    method = "POST" if "uploadId" in at else "PUT"
    held = s3.faults.add("hang", method, at)
    process = subprocess.Popen([sys.executable, "-c", UPLOADER, str(here.path)])
    assert held.met.wait(120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    visible = newest_complete(store)
    assert visible.skipped == []
    assert visible.checkpoint is not None
    assert visible.checkpoint.name == ("step-00000002" if at == "latest" else "step-00000001")
    s3.faults.clear()
    upload(here.path, store)
    found = newest_complete(store).checkpoint
    assert found is not None
    assert found.name == "step-00000002"
    assert verify(store, found, deep=True) == []


def test_a_wrong_bucket_says_so(s3: S3, tmp_path: Path) -> None:
    store = Store.open("s3://no-such-bucket/x", tries=QUICK)
    with pytest.raises(CheckpointError) as raised:
        upload(saved(tmp_path / "a", 1).path, store)
    assert "make the bucket, or correct the URL" in str(raised.value)
    assert "no-such-bucket" in str(raised.value)


def test_wrong_credentials_say_so_and_show_nothing(s3: S3, tmp_path: Path) -> None:
    s3.check_credentials_after(0)
    try:
        with pytest.raises(CheckpointError) as raised:
            Store.open("s3://runs-bucket/x", tries=QUICK).write("latest", b"x")
    finally:
        s3.check_credentials_after(float("inf"))
    assert "check the credentials of this machine" in str(raised.value)
    assert "hidden-secret-value" not in str(raised.value)


def test_no_credentials_say_so(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CheckpointError) as raised:
        Store.open("s3://runs-bucket/x", tries=QUICK).write("latest", b"x")
    assert "check the credentials of this machine" in str(raised.value)


def test_no_network_says_so(monkeypatch: pytest.MonkeyPatch, s3: S3) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(CheckpointError) as raised:
        Store.open("s3://runs-bucket/x", tries=QUICK).list()
    assert "check the network" in str(raised.value)


def test_a_missing_library_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependencyError) as raised:
        Store.open("gs://bucket/prefix")
    assert raised.value.fix == install_line("remote", "gcsfs")


def own_events(run: Path, pid: int) -> list[str]:
    """What one process has written into a history that came from the store."""
    return [event["event"] for event in events(run) if event["pid"] == pid]


@pytest.mark.slow
def test_a_job_goes_on_from_the_store_on_a_machine_that_has_nothing(s3: S3, tmp_path: Path) -> None:
    """Killed in an upload, stopped, each time on a new machine: the same weights and metrics, bit for bit."""
    trainer = {"devices": 1, "strategy": "auto"}
    model = {"args": {"width": 4, "delay": 0.8}}
    plain = changed(JOB, trainer=trainer, model=model)
    remote = {"name": "remote", "url": "s3://runs-bucket/prefix", "inner": "async", "part_mib": 5}
    job = repository(tmp_path / "user", job=changed(plain, trainer={**trainer, "checkpoint_io": remote}))
    environ = {**s3.environ, "WEIGHTS": "1"}

    def machine(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    reference = repository(tmp_path / "reference", job=plain).parent
    assert fairlead("fit", "job.yaml", cwd=reference, environ=environ).code == 0

    first = machine("first")
    held = s3.faults.add("hang", "PUT", r"small/step-00000004/manifest")
    running = start("fit", str(job), cwd=first, environ=environ)
    running.until(held.met.is_set, "the upload of step 4")
    running.process.kill()
    running.end()
    s3.faults.clear()
    assert (first / "runs/small/checkpoints/step-00000004").is_dir()

    second = machine("second")
    running = start("fit", str(job), cwd=second, environ=environ)
    running.until(lambda: "uploaded" in own_events(second / "runs/small", running.process.pid), "an upload")
    running.process.send_signal(signal.SIGTERM)
    stopped = running.end()
    assert stopped.code == 143, stopped.text
    assert "downloaded step-00000002 from s3://runs-bucket/prefix/small" in stopped.text
    assert "yet:" not in stopped.text
    assert own_events(second / "runs/small", running.process.pid).count("uploaded") >= 2  # the last one at the stop

    third = machine("third")
    ended = fairlead("fit", str(job), cwd=third, environ=environ)
    assert ended.code == 0, ended.text
    assert [event["start"] for event in events(third / "runs/small") if event["event"] == "start"][-1] == 3
    weights, expected = (torch.load(folder / "weights-0.pt") for folder in (third, reference))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    rows, its = ((folder / "runs/small/metrics.csv").read_text() for folder in (third, reference))
    assert rows == its
    found = list_checkpoints(Store.open("s3://runs-bucket/prefix/small"))
    assert [item.step for item in found] == [checkpoint.step for checkpoint in local(third / "runs/small/checkpoints")]
    for folder in (first, second, third):
        files = [file for file in (folder / "runs").rglob("*") if file.is_file()]
        assert not [file for file in files if s3.environ["AWS_SECRET_ACCESS_KEY"].encode() in file.read_bytes()]

    fourth = machine("fourth")
    url = "s3://runs-bucket/prefix/small/step-00000008"
    words = ("--set", "run.name=other", "--set", "trainer.checkpoint_io=torch", "--set", "trainer.max_steps=9")
    other = fairlead("fit", str(job), *words, "--resume", url, cwd=fourth, environ=environ)
    assert other.code == 0, other.text
    assert [event["step"] for event in events(fourth / "runs/other") if event["event"] == "training"] == [8]

    begun = ("--set", f"run.ckpt_path={url}", "--set", "run.name=begun", *words[2:])
    assert fairlead("fit", str(job), *begun, cwd=fourth, environ=environ).code == 0
    assert [event["step"] for event in events(fourth / "runs/begun") if event["event"] == "training"] == [8]
    of_folder, of_url = (
        fairlead("validate", str(job), "--resume", name, cwd=third, environ=environ)
        for name in ("runs/small/checkpoints/step-00000008", url)
    )
    assert of_url.code == 0, of_url.text
    assert "val/loss" in of_url.out
    assert of_url.out.splitlines()[0] == f"weights     {url}"
    assert of_url.out.splitlines()[1:] == of_folder.out.splitlines()[1:]

    fifth = machine("fifth")
    refused = fairlead("fit", str(job), "--set", "model.args.lr=0.5", cwd=fifth, environ=environ)
    assert refused.code == 2, refused.text
    assert "the URL belongs to a run with other settings" in refused.text
    assert "model.args.lr" in refused.text


LOOP = """
import os, sys, torch
sys.modules["lightning"] = None
from fairlead import Run

torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(48, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
settings = dict(checkpoint={"every_n_steps": 2}, max_epochs=1, log_every_n_steps=1, copy_to=os.environ.get("STORE"))
with Run("runs/loop", model=model, optimizer=optimizer, **settings) as run:
    run.restore()
    for (x,) in run.batches(loader):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        if os.environ.get("DIE") == str(run.steps):
            os.kill(os.getpid(), 15)
torch.save(model.state_dict(), "weights.pt")
"""


@pytest.mark.full
def test_a_loop_of_torch_goes_on_from_the_store_on_a_machine_that_has_nothing(s3: S3, tmp_path: Path) -> None:
    """Without Lightning: stopped at a step, which waits for the upload, and resumed where nothing is."""

    def run(folder: str, **environ: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(LOOP)
        return subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path / folder,
            env={**os.environ, **s3.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )

    store = "s3://runs-bucket/loops"
    whole = run("whole")
    assert whole.returncode == 0, whole.stderr
    stopped = run("first", STORE=store, DIE="5")
    assert stopped.returncode == 143, stopped.stderr
    assert "everything is saved" in stopped.stdout
    resumed = run("second", STORE=store)
    assert resumed.returncode == 0, resumed.stderr
    assert f"downloaded step-00000005 from {store}/loop" in resumed.stdout
    weights, expected = (torch.load(tmp_path / folder / "weights.pt") for folder in ("second", "whole"))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    rows, its = ((tmp_path / folder / "runs/loop/metrics.csv").read_text() for folder in ("second", "whole"))
    assert rows == its
    assert max(item.step for item in list_checkpoints(Store.open(f"{store}/loop"))) == 12

    wrong = run("wrong", STORE="s3:/runs-bucket")
    assert wrong.returncode == 1
    assert "copy_to" in wrong.stderr
    assert "s3:/runs-bucket" in wrong.stderr
    absent = run("absent", STORE="s3://no-such-bucket/loops")
    assert absent.returncode == 1
    assert "no-such-bucket" in absent.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_failed_before_its_first_step_keeps_its_name_from_nobody(s3: S3, tmp_path: Path) -> None:
    """The mistake is corrected, and the next start is on another machine: the name at the URL is free."""
    remote = {"name": "remote", "url": "s3://runs-bucket/early", "inner": "torch"}
    trainer = {"devices": 1, "strategy": "auto", "checkpoint_io": remote}
    job = repository(tmp_path / "user", job=changed(JOB, trainer=trainer))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    failing = {**s3.environ, "FAIL": "raise:0:0"}
    failed = fairlead("fit", str(job), cwd=tmp_path / "first", environ=failing)
    assert failed.code == 1, failed.text
    words = ("--set", "model.args.width=5")
    ended = fairlead("fit", str(job), *words, cwd=tmp_path / "second", environ=s3.environ)
    assert ended.code == 0, ended.text
    (tmp_path / "third").mkdir()
    refused = fairlead("fit", str(job), cwd=tmp_path / "third", environ=s3.environ)
    assert refused.code == 2, refused.text
    assert "the URL belongs to a run with other settings" in refused.text


@pytest.mark.full
@pytest.mark.slow
def test_a_stop_ends_in_time_though_the_store_hangs_and_the_next_start_uploads(s3: S3, tmp_path: Path) -> None:
    """The notice is short. What is saved here is said not to be there yet, and is there after the next start."""
    remote = {"name": "remote", "url": "s3://runs-bucket/slow", "inner": "torch", "stop_wait_s": 2.0}
    trainer = {"devices": 1, "strategy": "auto", "checkpoint_io": remote}
    job = repository(tmp_path / "user", job=changed(JOB, trainer=trainer, model={"args": {"width": 4, "delay": 0.4}}))
    held = s3.faults.add("hang", "PUT", r"small/step-\d+/state", times=100)
    running = start("fit", str(job), cwd=tmp_path, environ=s3.environ)
    running.until(held.met.is_set, "an upload")
    stopped_at = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    stopped = running.end()
    assert stopped.code == 143, stopped.text
    assert time.monotonic() - stopped_at < 30, "what the store still keeps waiting is not waited for"
    assert "is not on s3://runs-bucket/slow/small yet: not finished within" in stopped.text
    saved = [checkpoint.step for checkpoint in local(tmp_path / "runs/small/checkpoints")]
    assert saved
    assert list_checkpoints(Store.open("s3://runs-bucket/slow/small")) == []
    s3.faults.clear()
    ended = fairlead("fit", str(job), cwd=tmp_path, environ=s3.environ)
    assert ended.code == 0, ended.text
    found = [item.step for item in list_checkpoints(Store.open("s3://runs-bucket/slow/small"))]
    assert found == [checkpoint.step for checkpoint in local(tmp_path / "runs/small/checkpoints")]
