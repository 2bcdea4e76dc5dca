"""Saving, finding and checking checkpoints without anything going wrong in between; and bad input."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import CheckpointError, MissingDependencyError, RunDirectoryError
from fairlead_runs.commit import (
    Checkpoint,
    FileHash,
    FileWriter,
    Syscalls,
    abandon,
    atomic_write,
    checkpoint_name,
    discard_incomplete,
    hash_file,
    list_checkpoints,
    newest_complete,
    publish,
    read_latest,
    read_manifest,
    stage,
    verify,
    write_file,
)


def save(root: Path, step: int, *, start: int = 1, **metadata: object) -> Checkpoint:
    staged = stage(root, checkpoint_name(step), token=f"s{start}")
    digest = write_file(staged / "state.ckpt", b"state %d" % step)
    return publish(staged, {"step": step, "start": start, **metadata}, hashes={"state.ckpt": digest})


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_published_checkpoint_is_listed_named_by_latest_and_verifies(tmp_path: Path) -> None:
    """What was saved is found, with its sizes, hashes and metadata."""
    root = tmp_path / "runs" / "gpt" / "checkpoints"
    checkpoint = save(root, 200, epoch=3, metrics={"val_loss": 1.5}, world_size=2)

    assert checkpoint.path == root / "step-00000200"
    assert (root / "latest").read_text() == "step-00000200\n"
    assert [item.name for item in list_checkpoints(root)] == ["step-00000200"]
    assert verify(checkpoint.path, deep=True) == []
    assert newest_complete(root).checkpoint == checkpoint
    manifest = read_manifest(checkpoint.path)
    assert manifest.metadata == {"step": 200, "start": 1, "epoch": 3, "metrics": {"val_loss": 1.5}, "world_size": 2}
    assert manifest.files["state.ckpt"].size == manifest.size == 9


def test_ranks_write_their_own_files_into_one_stage(tmp_path: Path) -> None:
    """Per-rank parts are in the same commit, and none may be missing or from an earlier attempt."""
    stages = {stage(tmp_path, checkpoint_name(5), token="s1") for _rank in range(4)}
    (staged,) = stages
    names = [f"rank-{rank:05d}.pt" for rank in range(4)]
    hashes = {name: write_file(staged / name, name.encode()) for name in names}
    write_file(staged / "rank-00004.pt", b"of an attempt with five ranks")

    checkpoint = publish(staged, {"step": 5}, hashes=hashes, files=names)

    assert sorted(checkpoint.manifest.files) == names
    assert sorted(p.name for p in checkpoint.path.iterdir()) == ["manifest.json", *names]


def test_a_missing_rank_file_is_not_published_and_the_previous_one_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    staged = stage(tmp_path, checkpoint_name(2), token="s1")
    write_file(staged / "state.ckpt", b"2")
    with pytest.raises(CheckpointError, match=r"rank-00001\.pt") as caught:
        publish(staged, {"step": 2}, files=["state.ckpt", "rank-00001.pt"])
    assert str(staged) in caught.value.block()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


def test_a_file_that_is_shorter_than_its_writer_reported_is_refused(tmp_path: Path) -> None:
    staged = stage(tmp_path, checkpoint_name(2), token="s1")
    digest = write_file(staged / "state.ckpt", b"whole")
    (staged / "state.ckpt").write_bytes(b"who")
    with pytest.raises(CheckpointError, match="3 bytes, its writer reported 5"):
        publish(staged, {"step": 2}, hashes={"state.ckpt": digest})
    assert list_checkpoints(tmp_path) == []


def test_files_of_engines_that_write_by_themselves_are_hashed_and_synced(tmp_path: Path) -> None:
    """Folders and hidden files, as torch's distributed checkpoint makes them, are part of the commit."""
    synced: list[str] = []

    class Watch(Syscalls):
        def fsync(self, fd: int) -> None:
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            super().fsync(fd)

        def fsync_dir(self, path: Path) -> None:
            synced.append(f"{path.name}/")
            super().fsync_dir(path)

    staged = stage(tmp_path, checkpoint_name(7), token="s1")
    (staged / "model" / "deep").mkdir(parents=True)
    (staged / "model" / ".metadata").write_bytes(b"m")
    (staged / "model" / "deep" / "__0_0.distcp").write_bytes(b"shard")
    checkpoint = publish(staged, {"step": 7}, syscalls=Watch())

    assert sorted(checkpoint.manifest.files) == ["model/.metadata", "model/deep/__0_0.distcp"]
    assert {".metadata", "__0_0.distcp", "model/", "deep/", f"{staged.name}/"} <= set(synced)
    flip_bit(checkpoint.path / "model" / "deep" / "__0_0.distcp")
    (damage,) = verify(checkpoint.path, deep=True)
    assert damage.file == "model/deep/__0_0.distcp"


def test_flipped_bits_and_truncated_files_are_found_and_the_previous_checkpoint_is_used(tmp_path: Path) -> None:
    """Damage is detected, said, and does not stop the run."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    with open(tmp_path / "step-00000003" / "state.ckpt", "r+b") as file:
        file.truncate(4)
    flip_bit(tmp_path / "step-00000002" / "state.ckpt")

    by_size = newest_complete(tmp_path)
    assert by_size.checkpoint is not None
    assert by_size.checkpoint.step == 2
    assert [str(d) for d in by_size.skipped] == ["step-00000003/state.ckpt: 4 bytes, should be 7"]

    deep = newest_complete(tmp_path, deep=True)
    assert deep.checkpoint is not None
    assert deep.checkpoint.step == 1
    assert [d.path.name for d in deep.skipped] == ["step-00000003", "step-00000002"]
    assert "checksum is wrong" in deep.skipped[1].problem


@pytest.mark.parametrize("damage", ["bit", "torn", "empty", "gone", "foreign", "newer"])
def test_a_damaged_manifest_is_reported_and_passed_over(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2).path / "manifest.json"
    match damage:
        case "bit":
            manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
        case "torn":
            manifest.write_bytes(manifest.read_bytes()[:40])
        case "empty":
            manifest.write_bytes(b"")
        case "gone":
            manifest.unlink()
        case "foreign":
            manifest.write_text("[1, 2]")
        case "newer":
            manifest.write_text(json.dumps({"format": 99}))
    newest = newest_complete(tmp_path)
    assert newest.checkpoint is not None
    assert newest.checkpoint.step == 1
    assert [d.path.name for d in newest.skipped] == ["step-00000002"]
    assert verify(manifest.parent) != []
    with pytest.raises(CheckpointError, match="checkpoint"):
        read_manifest(manifest.parent)


def test_latest_is_a_hint_and_never_trusted(tmp_path: Path) -> None:
    """A `latest` that lags, dangles or holds junk changes nothing but what is said."""
    for step in (1, 2):
        save(tmp_path, step)
    for text in ("step-00000001\n", "", "../../etc\n", "step-00000009\n"):
        (tmp_path / "latest").write_text(text)
        assert newest_complete(tmp_path).checkpoint == Checkpoint(tmp_path / "step-00000002", 2)
    assert "not there" in str(newest_complete(tmp_path).skipped[0])
    (tmp_path / "latest").unlink()
    assert read_latest(tmp_path) is None
    assert newest_complete(tmp_path).checkpoint == Checkpoint(tmp_path / "step-00000002", 2)


def test_a_later_start_is_newer_also_at_an_earlier_step(tmp_path: Path) -> None:
    """A run that went back to step 100 (`--resume PATH`) must not jump forward to the abandoned step 500 later."""
    for step in (100, 500):
        save(tmp_path, step, start=1)
    save(tmp_path, 200, start=2)
    assert newest_complete(tmp_path).checkpoint == Checkpoint(tmp_path / "step-00000200", 200)


def test_saving_a_step_again_never_replaces_its_complete_checkpoint(tmp_path: Path) -> None:
    first, second = save(tmp_path, 5), save(tmp_path, 5, start=2)
    assert (first.name, second.name) == ("step-00000005", "step-00000005.2")
    assert verify(first.path, deep=True) == []
    assert newest_complete(tmp_path).checkpoint == second
    (second.path / "state.ckpt").unlink()
    assert save(tmp_path, 5, start=3).name == "step-00000005.2"  # the damaged one gave way


def test_what_only_looks_like_a_checkpoint_is_not_listed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000002").write_text("a file")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "best").symlink_to("step-00000001")
    (tmp_path / "step-00000004").symlink_to("step-00000001")
    assert [item.step for item in list_checkpoints(tmp_path)] == [1]
    newest = newest_complete(tmp_path)
    assert newest.checkpoint is not None
    assert newest.checkpoint.step == 1
    assert [d.path.name for d in newest.skipped if d.path.name != "step-00000002"] == ["step-00000003"]


def test_no_directory_holds_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    assert newest_complete(tmp_path / "none").checkpoint is None
    assert discard_incomplete(tmp_path / "none", token="s1") == []


def test_remains_of_dead_starts_are_deleted_and_live_ones_are_not(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for token in ("s1", "s2"):
        write_file(stage(tmp_path, checkpoint_name(2), token=token) / "state.ckpt", b"half")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".trash-step-00000000.abcd")
    (tmp_path / ".tmp-abc").write_bytes(b"")

    deleted = discard_incomplete(tmp_path, token="s2")
    assert [p.name for p in deleted] == [".stage-step-00000002.s1", ".tmp-abc", ".trash-step-00000000.abcd"]
    assert sorted(os.listdir(tmp_path)) == [".stage-step-00000002.s2", "latest", "step-00000001"]


def test_abandon_frees_the_space_of_a_stage(tmp_path: Path) -> None:
    staged = stage(tmp_path, checkpoint_name(2), token="s1")
    write_file(staged / "state.ckpt", b"x" * 1000)
    abandon(staged)
    abandon(staged)
    assert os.listdir(tmp_path) == []


def test_paths_with_spaces_and_unicode(tmp_path: Path) -> None:
    root = tmp_path / "my runs" / "größe 実験 🚀" / "checkpoints"
    checkpoint = save(root, 1, note="naïve ☃")
    assert newest_complete(root, deep=True).checkpoint == checkpoint
    assert checkpoint.metadata["note"] == "naïve ☃"


def test_nan_metrics_are_written_as_json(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1, metrics={"loss": float("nan"), "peak": float("inf")})
    json.loads((checkpoint.path / "manifest.json").read_bytes(), parse_constant=lambda name: pytest.fail(name))
    assert checkpoint.metadata["metrics"] == {"loss": "nan", "peak": "inf"}


def test_metadata_is_of_primitives_only(tmp_path: Path) -> None:
    """A manifest is read without unpickling anything."""
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="holds a set") as caught:
        save(tmp_path, 2, metrics={"ranks": [{1, 2}]})
    assert caught.value.where == "metrics.ranks.0"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "", "manifest.json"])
def test_names_that_lead_out_of_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    staged = stage(tmp_path, checkpoint_name(1), token="s1")
    with pytest.raises(CheckpointError, match="not a file name"):
        publish(staged, {"step": 1}, hashes={name: FileHash("crc32", "0", 0)})


@pytest.mark.parametrize(("name", "token"), [("best", "s1"), ("step-1", "a/b"), ("step-1", ""), (".step-1", "s1")])
def test_names_and_tokens_are_checked(tmp_path: Path, name: str, token: str) -> None:
    with pytest.raises(CheckpointError, match="name or token"):
        stage(tmp_path, name, token=token)


def test_an_empty_stage_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"):
        publish(stage(tmp_path, checkpoint_name(1), token="s1"), {"step": 1})
    assert list_checkpoints(tmp_path) == []


def test_a_root_deleted_under_us_is_named(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    staged = stage(root, checkpoint_name(1), token="s1")
    shutil.rmtree(root)
    with pytest.raises(CheckpointError) as caught:
        write_file(staged / "state.ckpt", b"1")
    assert str(staged / "state.ckpt") in caught.value.block()
    assert "deleted or moved" in caught.value.block()
    with pytest.raises(CheckpointError, match=r"cannot save a checkpoint|nothing was written"):
        publish(staged, {"step": 1})
    assert save(root, 2).step == 2  # and the next save makes it anew


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "file" / "checkpoints", 1)
    assert "a file is in the way" in caught.value.block()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only")]
)
def test_disk_full_quota_and_read_only_say_what_to_do(tmp_path: Path, number: int, advice: str) -> None:
    class Refusing(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(number, os.strerror(number))

    staged = stage(tmp_path, checkpoint_name(1), token="s1")
    with pytest.raises(CheckpointError) as caught:
        write_file(staged / "state.ckpt", b"1", syscalls=Refusing())
    assert advice in caught.value.block()
    assert os.strerror(number) in caught.value.block()
    assert os.listdir(staged) == []


def test_an_error_of_the_disk_is_reported_though_the_writer_hides_it(tmp_path: Path) -> None:
    """torch.save turns a full disk into a RuntimeError about its zip writer."""

    class Full(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def hiding(file: FileWriter) -> None:
        try:
            file.write(b"x" * (2 << 20))
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None

    with pytest.raises(CheckpointError, match="No space left"):
        write_file(tmp_path / "state.ckpt", hiding, syscalls=Full())


def test_the_disk_begins_before_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the fsync, for which a save waits, finds little to do; a system that knows no such advice saves as well."""
    calls: list[tuple[Any, ...]] = []

    class Watch(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            count = super().write(fd, data)
            calls.append(("write", count))
            return count

        def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
            super().start_writeback(fd, offset, nbytes)
            calls.append(("start", offset, nbytes))

        def fsync(self, fd: int) -> None:
            calls.append(("fsync",))
            super().fsync(fd)

    content = os.urandom(40 << 20)
    digest = write_file(tmp_path / "state.ckpt", content, syscalls=Watch())
    assert (tmp_path / "state.ckpt").read_bytes() == content
    assert calls[0] == ("write", 16 << 20)
    assert [call for call in calls if call[0] != "write"] == [
        ("start", 0, 16 << 20),
        ("start", 16 << 20, 16 << 20),
        ("fsync",),
    ]

    def refuses(*args: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuses)
    assert write_file(tmp_path / "again.ckpt", content) == digest
    monkeypatch.delattr(os, "posix_fadvise")
    assert write_file(tmp_path / "without.ckpt", content) == digest


def test_an_error_of_the_writer_itself_leaves_nothing(tmp_path: Path) -> None:
    def broken(file: FileWriter) -> None:
        file.write(b"half")
        raise TypeError("cannot pickle a generator")

    with pytest.raises(TypeError, match="generator"):
        write_file(tmp_path / "state.ckpt", broken)
    with pytest.raises(TypeError, match="generator"):
        atomic_write(tmp_path / "job.yaml", broken)
    assert os.listdir(tmp_path) == []


def test_short_writes_and_large_writes_give_the_bytes_that_were_given(tmp_path: Path) -> None:
    class Short(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            return super().write(fd, data[: max(1, len(data) // 3)])

    parts: list[bytes | memoryview] = [b"a" * 10, b"b" * (3 << 20), b"", b"c" * 5, memoryview(b"d" * (1 << 20))]

    def content(file: FileWriter) -> None:
        for part in parts:
            assert file.write(part) == len(part)
        assert file.tell() == sum(map(len, parts))

    digest = write_file(tmp_path / "file", content, syscalls=Short())
    assert (tmp_path / "file").read_bytes() == b"".join(bytes(part) for part in parts)
    assert digest == hash_file(tmp_path / "file")


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    class Failing(Syscalls):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "job.yaml"
    atomic_write(path, b"old")
    with pytest.raises(RunDirectoryError, match="cannot write job"):
        atomic_write(path, b"new", error=RunDirectoryError, syscalls=Failing())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["job.yaml"]


@pytest.mark.parametrize("algorithm", ["crc32", "sha256", "xxh3_128"])
def test_each_checksum_is_of_the_content_and_named_in_the_manifest(tmp_path: Path, algorithm: str) -> None:
    if algorithm == "xxh3_128":
        pytest.importorskip("xxhash")
    known = {
        "crc32": "352441c2",
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "xxh3_128": "06b05ab6733a618578af5f94892f3950",
    }
    staged = stage(tmp_path, checkpoint_name(1), token="s1")
    digest = write_file(staged / "state.ckpt", b"abc", algorithm=algorithm)
    assert digest == FileHash(algorithm, known[algorithm], 3)
    checkpoint = publish(staged, {"step": 1}, hashes={"state.ckpt": digest})
    assert verify(checkpoint.path, deep=True) == []
    flip_bit(checkpoint.path / "state.ckpt")
    assert [d.file for d in verify(checkpoint.path, deep=True)] == ["state.ckpt"]


def test_a_checksum_whose_package_is_missing_names_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(tmp_path, checkpoint_name(1), token="s1")
    (staged / "state.ckpt").write_bytes(b"abc")
    checkpoint = publish(
        staged, {"step": 1}, hashes={"state.ckpt": FileHash("xxh3_128", "06b05ab6733a618578af5f94892f3950", 3)}
    )
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    assert verify(checkpoint.path) == []  # sizes can be compared all the same
    with pytest.raises(MissingDependencyError, match="pip install xxhash"):
        verify(checkpoint.path, deep=True)


def test_without_xxhash_checkpoints_are_written_with_crc32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert write_file(tmp_path / "file", b"abc").algorithm == "crc32"


def test_ten_thousand_checkpoints_are_listed_without_reading_their_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(10_000):
        folder = tmp_path / checkpoint_name(step)
        folder.mkdir()
        (folder / "manifest.json").touch()
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"read {self}"))
    found = list_checkpoints(tmp_path)
    assert [item.step for item in found] == list(range(10_000))
