"""`checkpoint_io: remote`: what is committed is copied, nothing is deleted before, and everything is said."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fairlead import PluginManager, TrainerConfig
from fairlead.checks import check_trainer
from fairlead.errors import CheckpointError, FingerprintError, RunLockedError
from fairlead.exactness import device_reasons
from fairlead.testing import FakeEnviron
from fairlead_checkpoint_io import (
    AsyncCheckpointIOConfig,
    DistributedCheckpointIOConfig,
    RemoteCheckpointIOConfig,
    TorchCheckpointIOConfig,
)
from fairlead_checkpoint_io.distributed_shards.runtime import DistributedCheckpointIO
from fairlead_checkpoint_io.remote.runtime import RemoteCheckpointIO, RemoteShardsIO, build
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_runs import fingerprint
from fairlead_runs.checkpoint_io import CheckpointCopies, DurableSaves, ShardedLoads, ShardedSaves
from fairlead_runs.commit import (
    Checkpoint,
    Fence,
    LockOwner,
    RetentionPolicy,
    Syscalls,
    checkpoint_name,
    list_checkpoints,
    publish,
    stage,
    write_file,
)
from fairlead_runs.remote import Store
from fairlead_runs.remote import list_checkpoints as copies

JOB = {"trainer": {"precision": "32-true"}}
MIB = 1 << 20


class Gate:
    """Lets the uploads of a store pass, hold, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.failing = False
        put = Store.put

        def gated(store: Store, files: Mapping[str, Path], **settings: Any) -> None:
            self.begun.set()
            assert self.open.wait(60)
            if self.failing:
                raise CheckpointError("cannot write an object", where=store.url, why="the store is away")
            put(store, files, **settings)

        monkeypatch.setattr(Store, "put", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def remote(url: str, **settings: Any) -> RemoteCheckpointIO:
    config = RemoteCheckpointIOConfig(url=url, **settings)
    return RemoteCheckpointIO(config, TorchFileCheckpointIO(TorchCheckpointIOConfig()))


def begun(io: RemoteCheckpointIO, run: Path, start: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """A start of a run; the events that it will have."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "fingerprint.json").write_bytes(fingerprint(JOB).dump())
    events: list[tuple[str, dict[str, Any]]] = []
    io.open(run.name, fingerprint(JOB))
    io.fetch(run)
    owner = LockOwner.here()
    (run / ".lock").write_bytes(owner.dump())
    fence = Fence(run / ".lock", owner.nonce)
    io.begin(run, start, lambda name, **fields: events.append((name, fields)), fence)
    return events


def saved(run: Path, step: int, size: int = 100, start: int = 1) -> Checkpoint:
    staged = stage(run / "checkpoints", checkpoint_name(step), token="s1")
    digest = write_file(staged / "state.ckpt", bytes([step]) * size)
    return publish(staged, {"step": step, "start": start}, hashes={"state.ckpt": digest})


def here(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")]


def there(url: str, name: str = "gpt") -> list[int]:
    return [checkpoint.step for checkpoint in copies(Store.open(f"{url}/{name}"))]


def test_a_committed_checkpoint_is_copied_and_retention_is_the_same_there(url: str, tmp_path: Path) -> None:
    io, run = remote(url), tmp_path / "gpt"
    events = begun(io, run)
    for step in (1, 2, 3):
        io.committed(saved(run, step), RetentionPolicy(last=2))
        assert io.wait_uploaded() is None
    assert here(run) == there(url) == [2, 3]
    assert [name for name, _ in events] == ["uploaded"] * 3
    assert isinstance(io, CheckpointCopies)
    assert isinstance(io, DurableSaves)
    io.teardown()


def test_the_one_being_uploaded_stays_and_one_that_was_replaced_is_not_uploaded(
    url: str, tmp_path: Path, gate: Gate
) -> None:
    io, run = remote(url), tmp_path / "gpt"
    events = begun(io, run)
    gate.open.clear()
    io.committed(saved(run, 1), RetentionPolicy(last=1))
    assert gate.begun.wait(60)
    for step in (2, 3):
        io.committed(saved(run, step), RetentionPolicy(last=1))
    assert here(run) == [1, 3]
    gate.open.set()
    assert io.wait_uploaded() is None
    assert [fields["checkpoint"] for _, fields in events] == ["step-00000001", "step-00000003"]
    assert there(url) == [3]
    io.teardown()


def test_no_upload_begins_of_what_is_being_deleted(
    url: str, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before is done just then, and the deletion is held up until an upload of step 2 begins."""
    io, run = remote(url), tmp_path / "gpt"
    begun(io, run)
    second, deleted = threading.Event(), threading.Event()
    put, mkdir = Store.put, Syscalls.mkdir

    def held_up(store: Store, files: Mapping[str, Path], **settings: Any) -> None:
        if any("step-00000002" in str(path) for path in files.values()):
            second.set()
            assert deleted.wait(60)
        put(store, files, **settings)

    def deleting(system: Syscalls, path: Path) -> None:
        if "step-00000002" in path.name:
            gate.open.set()
            second.wait(0.3)
        mkdir(system, path)

    gate.open.clear()
    io.committed(saved(run, 1), RetentionPolicy(last=5))
    assert gate.begun.wait(60)
    io.committed(saved(run, 2), RetentionPolicy(last=5))
    third = saved(run, 3)
    monkeypatch.setattr(Store, "put", held_up)
    monkeypatch.setattr(Syscalls, "mkdir", deleting)
    io.committed(third, RetentionPolicy(last=1))
    deleted.set()
    assert io.wait_uploaded() is None
    assert (here(run), there(url)[-1]) == ([1, 3], 3)
    io.teardown()


def test_an_upload_that_failed_is_said_and_tried_again(url: str, tmp_path: Path, gate: Gate) -> None:
    io, run = remote(url), tmp_path / "gpt"
    events = begun(io, run)
    gate.failing = True
    for step in (1, 2):
        io.committed(saved(run, step, MIB), RetentionPolicy(last=5))
    lacking = io.wait_uploaded()
    assert lacking is not None
    assert "the store is away" in lacking
    assert here(run) == [1, 2]
    assert ("upload-failed", "step-00000002") in [(name, fields["checkpoint"]) for name, fields in events]
    gate.failing = False
    assert io.wait_uploaded() is None  # tried again
    assert there(url) == [1, 2]
    io.teardown()


def test_a_stop_that_is_short_of_time_says_what_is_lacking_and_the_next_start_uploads_it(
    url: str, tmp_path: Path, gate: Gate
) -> None:
    io, run = remote(url), tmp_path / "gpt"
    begun(io, run)
    gate.open.clear()
    io.committed(saved(run, 1), RetentionPolicy(last=1))
    lacking = io.wait_uploaded(0.1)
    assert lacking is not None
    assert f"step-00000001 is not on {url}/gpt yet: not finished within 0.1 s" in lacking
    io.teardown()  # does not wait again
    gate.open.set()
    again = remote(url)
    begun(again, run, start=2)
    assert again.wait_uploaded() is None
    assert there(url) == [1]
    again.teardown()


def test_a_machine_without_the_run_gets_the_newest_sound_checkpoint_and_the_records(url: str, tmp_path: Path) -> None:
    io, run = remote(url), tmp_path / "a" / "gpt"
    begun(io, run)
    (run / "metrics.csv").write_text("step,loss\n1,2\n")
    for step in (1, 2, 3):
        io.committed(saved(run, step), RetentionPolicy(last=5))
        assert io.wait_uploaded() is None
    io.teardown()
    Store.open(f"{url}/gpt").write("step-00000003/state.ckpt", b"x" * 100)
    other = tmp_path / "b" / "gpt"
    (other / "checkpoints").mkdir(parents=True)
    fresh = remote(url)
    fresh.open("gpt", fingerprint(JOB))
    said = fresh.fetch(other)
    assert "step-00000003: state.ckpt: its" in said[0]
    assert "the checkpoint before it is used" in said[0]
    assert said[1].startswith(f"downloaded step-00000002 from {url}/gpt")
    assert here(other) == [2]
    assert (other / "metrics.csv").read_text() == "step,loss\n1,2\n"
    assert fresh.fetch(other) == said[:1]  # nothing newer that is sound


def test_an_earlier_start_that_still_lives_uploads_nothing_more(url: str, tmp_path: Path) -> None:
    old, new = remote(url), remote(url)
    begun(old, tmp_path / "a" / "gpt", start=1)
    begun(new, tmp_path / "b" / "gpt", start=2)
    with contextlib.suppress(RunLockedError):  # the thread that uploads may see it while this one still tidies up
        old.committed(saved(tmp_path / "a" / "gpt", 7), RetentionPolicy())
    lacking = old.wait_uploaded()
    assert lacking is not None
    assert "this start was replaced: another one of this run writes to the store now" in lacking
    assert "start 2 on" in lacking
    assert there(url) == []
    old.teardown()
    new.teardown()


def test_the_number_of_an_owner_rises_and_an_older_start_does_not_take_the_place(url: str, tmp_path: Path) -> None:
    """It was frozen before it claimed the place: the later one keeps it."""
    assert remote(url).open("gpt", fingerprint(JOB)) == 0
    new = remote(url)
    begun(new, tmp_path / "b" / "gpt", start=2)
    assert remote(url).open("gpt", fingerprint(JOB)) == 2
    with pytest.raises(RunLockedError, match="this start was replaced") as caught:
        begun(remote(url), tmp_path / "a" / "gpt", start=2)
    assert "start 2 on" in caught.value.block()
    new.committed(saved(tmp_path / "b" / "gpt", 7, start=2), RetentionPolicy())
    assert new.wait_uploaded() is None
    assert there(url) == [7]
    new.teardown()


def test_a_replaced_start_deletes_nothing_there_and_ends_the_training(url: str, tmp_path: Path) -> None:
    old, new = remote(url), remote(url)
    run = tmp_path / "a" / "gpt"
    begun(old, run, start=1)
    old.committed(saved(run, 1), RetentionPolicy(last=1))
    assert old.wait_uploaded() is None
    begun(new, tmp_path / "b" / "gpt", start=2)
    (tmp_path / "b" / "gpt" / "history.jsonl").write_text("of the new one\n")
    new.committed(saved(tmp_path / "b" / "gpt", 2, start=2), RetentionPolicy(last=5))
    assert new.wait_uploaded() is None
    mirror = old._mirror
    assert mirror is not None
    (run / "history.jsonl").write_text("of the old one\n")
    assert old.wait_uploaded() is None  # nothing is left to upload, and its last records stay here
    assert Store.open(f"{url}/gpt").read("history.jsonl") == b"of the new one\n"
    assert mirror._fence is not None
    assert isinstance(mirror._fence.lost, RunLockedError)
    assert there(url) == [1, 2]
    old.teardown()
    new.teardown()


def test_a_place_of_another_run_is_refused(url: str, tmp_path: Path) -> None:
    io = remote(url)
    begun(io, tmp_path / "gpt")
    with pytest.raises(FingerprintError, match="32-true -> 16-mixed"):
        remote(url).open("gpt", fingerprint({"trainer": {"precision": "16-mixed"}}))
    with pytest.raises(FingerprintError, match="holds a run already"):
        remote(url).open("gpt", fingerprint(JOB), new=True)
    io.teardown()


def test_a_run_that_ended_before_its_first_checkpoint_keeps_its_name_from_nobody(url: str, tmp_path: Path) -> None:
    """As for directories: the next start may have other settings, on any machine."""
    other = fingerprint({"trainer": {"precision": "16-mixed"}})
    io = remote(url)
    begun(io, tmp_path / "gpt")
    with pytest.raises(FingerprintError):  # it may be training
        remote(url).open("gpt", other)
    io.teardown()
    assert remote(url).open("gpt", other) == 1
    with pytest.raises(FingerprintError, match="holds a run already"):
        remote(url).open("gpt", other, new=True)
    begun(later := remote(url), tmp_path / "elsewhere" / "gpt", start=2)
    with pytest.raises(FingerprintError):  # what the first one said is not true of the second
        remote(url).open("gpt", other)
    io.teardown()
    with pytest.raises(FingerprintError):
        remote(url).open("gpt", other)
    later.teardown()


@pytest.mark.parametrize("what", ["a checkpoint here", "a checkpoint there", "a part of one there"])
def test_a_run_that_has_something_keeps_its_name(url: str, tmp_path: Path, what: str) -> None:
    io, run = remote(url), tmp_path / "gpt"
    begun(io, run)
    if what == "a checkpoint here":
        saved(run, 1)
    else:
        store = Store.open(f"{url}/gpt")
        store.write("step-00000001/state.ckpt", b"x")
        if what == "a checkpoint there":
            store.write("step-00000001/manifest.json", b"{}")
    io.teardown()
    with pytest.raises(FingerprintError, match="belongs to a run with other settings"):
        remote(url).open("gpt", fingerprint({"trainer": {"precision": "16-mixed"}}))


def test_a_url_is_loaded_and_a_damaged_one_is_not(url: str, tmp_path: Path) -> None:
    io, run = remote(url), tmp_path / "gpt"
    begun(io, run)
    staged = stage(run / "checkpoints", checkpoint_name(1), token="s1")
    io.save_checkpoint({"w": torch.arange(3)}, staged / "state.ckpt")
    io.committed(publish(staged, {"step": 1}), RetentionPolicy())
    assert io.wait_uploaded() is None
    assert torch.equal(io.load_checkpoint(f"{url}/gpt/step-00000001")["w"], torch.arange(3))
    with pytest.raises(CheckpointError, match="there are: step-00000001"):
        io.load_checkpoint(f"{url}/gpt/step-00000009")
    store = Store.open(f"{url}/gpt")
    store.write("step-00000001/state.ckpt", b"x" * (store.list()["step-00000001/state.ckpt"].size))
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        io.load_checkpoint(f"{url}/gpt/step-00000001")
    io.teardown()


def test_shards_are_read_through_an_inner_backend_that_can(url: str, tmp_path: Path) -> None:
    """`torch` around the store reads what `distributed` wrote; a backend that cannot says so."""
    io, run = remote(url), tmp_path / "gpt"
    begun(io, run)
    staged = stage(run / "checkpoints", checkpoint_name(1), token="s1")
    state = {"state_dict": {"w": torch.arange(3)}, "epoch": 4}
    DistributedCheckpointIO(DistributedCheckpointIOConfig()).save_checkpoint(state, staged / "state.ckpt")
    here = publish(staged, {"step": 1})
    io.committed(here, RetentionPolicy())
    assert io.wait_uploaded() is None
    into = torch.zeros(3, dtype=torch.int64)
    found = io.load_shards(here.path / "state.ckpt", lambda where, size, dtype: into)
    assert found is not None
    assert found["state_dict"]["w"] is into
    assert (into.tolist(), found["epoch"]) == ([0, 1, 2], 4)
    whole = io.load_checkpoint(f"{url}/gpt/step-00000001")
    assert (whole["state_dict"]["w"].tolist(), whole["epoch"]) == ([0, 1, 2], 4)
    plain: Any = object()
    assert RemoteCheckpointIO(RemoteCheckpointIOConfig(url=url), plain).load_shards("x", lambda *_: None) is None
    io.teardown()


class Shards:
    """A backend that saves on all ranks, as `distributed` does, and says when it was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def meet(self) -> None:
        self.calls.append("meet")

    def submit_shards(self, checkpoint: Any, path: Any, then: Any, *, names: Any) -> None:
        self.calls.append("submit")
        then({})

    def wait(self) -> None:
        self.calls.append("wait")


def test_it_saves_shards_where_its_inner_backend_does(url: str) -> None:
    """Strategies ask the config, whoever saves asks the runtime: the answers are the same."""
    context: Any = SimpleNamespace(plugins=PluginManager(), engine="trainer")
    for inner in ("torch", "async", "distributed"):
        config = RemoteCheckpointIOConfig.model_validate({"url": url, "inner": inner})
        io = build(config, context)
        assert config.saves_shards is isinstance(io, ShardedSaves) is (inner == "distributed")
        assert isinstance(io, CheckpointCopies)
        assert isinstance(io, ShardedLoads)
    with pytest.raises(ValidationError, match="inner: async"):
        AsyncCheckpointIOConfig.model_validate({"inner": {"name": "remote", "url": url, "inner": "distributed"}})


def test_what_the_inner_backend_does_not_go_with_is_said_of_it(url: str) -> None:
    """The table's rows of `distributed` hold inside `remote`, too, and so does what is known of an exact resume."""
    inside = RemoteCheckpointIOConfig.model_validate({"url": url, "inner": "distributed"})
    trainer = TrainerConfig(accelerator="cpu", devices=1, strategy="deepspeed", checkpoint_io=inside)
    resolution, findings = check_trainer(trainer, environ=FakeEnviron({}), plugins=PluginManager())
    assert ("checkpoint_io 'distributed' does not work with strategy 'deepspeed'", "trainer.checkpoint_io.inner") in [
        (finding.what, str(finding.where).split(",")[0]) for finding in findings
    ]
    assert not [one for one in device_reasons(resolution, PluginManager()) if "checkpoint_io" in one.what]


def test_waiting_for_shards_is_waiting_for_the_inner_backend(url: str) -> None:
    inner: Any = Shards()
    io = RemoteShardsIO(RemoteCheckpointIOConfig(url=url), inner)
    io.submit_shards({}, "x", lambda hashes: None, names=[])
    io.wait()
    assert inner.calls == ["submit", "wait"]


def test_a_directory_as_store_that_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Syscalls, fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Syscalls, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot write an object") as raised:
        Store.open(f"file://{tmp_path}/store").write("latest", b"x")
    assert (raised.value.where, raised.value.fix) == (f"file://{tmp_path}/store/latest", "free some space")


def test_a_manifest_of_a_stranger_cannot_write_elsewhere(url: str, tmp_path: Path) -> None:
    made = saved(tmp_path / "gpt", 1)
    (made.path / "state.ckpt").rename(tmp_path / "evil")
    digest = made.manifest.files["state.ckpt"]
    text = type(made.manifest).now({"../../../evil": digest}, {"step": 1}).dump()
    store = Store.open(f"{url}/gpt")
    store.write("step-00000001/manifest.json", text)
    io = remote(url)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        io.load_checkpoint(f"{url}/gpt/step-00000001")


def test_a_ranks_copy_of_the_backend_has_no_thread(url: str, tmp_path: Path) -> None:
    io = remote(url)
    begun(io, tmp_path / "gpt")
    assert pickle.loads(pickle.dumps(io)).wait_uploaded() is None
    io.teardown()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "runs/gpt"}, "is no URL"),
        ({"url": "s3://"}, "names no location"),
        ({"url": "s3://me:hidden@bucket/x"}, "holds a user or a password"),
        ({"url": "s3://bucket/../x"}, "has a `.`"),
        ({"url": "s3://b/x", "storage_options": {"secret": "hidden"}}, "is a secret"),
        ({"url": "s3://b/x", "storage_options": {"client_kwargs": {"aws_session_token": "hidden"}}}, "is a secret"),
        ({"url": "s3://b/x", "part_mib": 1}, "greater than or equal to 5"),
        ({"url": "s3://b/x", "inner": {"name": "remote", "url": "s3://b/y"}}, "cannot write through itself"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RemoteCheckpointIOConfig(**settings)
    assert said in str(raised.value)


def test_async_around_remote_is_told_the_other_way_round() -> None:
    with pytest.raises(ValidationError, match="inner: async"):
        AsyncCheckpointIOConfig.model_validate({"inner": {"name": "remote", "url": "s3://b/x"}})
