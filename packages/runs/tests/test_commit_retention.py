"""Which checkpoints are kept, and that the newest complete one always is."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from fairlead.errors import CheckpointError, ConfigError
from fairlead_runs.commit import (
    Checkpoint,
    RetentionPolicy,
    Syscalls,
    best,
    best_or_last,
    checkpoint_name,
    discard_incomplete,
    keep_forever,
    list_checkpoints,
    named_checkpoint,
    newest_complete,
    publish,
    retain,
    stage,
    verify,
    write_file,
)


def save(root: Path, step: int, *, start: int = 1, **metadata: object) -> Checkpoint:
    staged = stage(root, checkpoint_name(step), token="t")
    write_file(staged / "state.ckpt", b"state %d" % step)
    return publish(staged, {"step": step, "start": start, **metadata})


def steps(root: Path) -> list[int]:
    return [item.step for item in list_checkpoints(root)]


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    deleted = retain(tmp_path, RetentionPolicy(last=2))
    assert [item.step for item in deleted] == [1, 2, 3]
    assert steps(tmp_path) == [4, 5]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(("mode", "kept"), [("min", [2, 4, 6]), ("max", [1, 5, 6])])
def test_the_best_k_are_kept_by_metric_and_direction(tmp_path: Path, mode: str, kept: list[int]) -> None:
    """Read from the manifests, so also right after a restart."""
    for step, loss in enumerate([0.9, 0.2, 0.5, 0.3, 0.8, float("nan")], start=1):
        save(tmp_path, step, metrics={"loss": loss})
    policy = RetentionPolicy(last=1, best=2, metric="loss", mode=mode)  # type: ignore[arg-type]
    retain(tmp_path, policy)
    assert steps(tmp_path) == kept
    retain(tmp_path, policy)
    assert steps(tmp_path) == kept


def test_of_equally_good_ones_the_older_counts_and_missing_metrics_never_do(tmp_path: Path) -> None:
    save(tmp_path, 1, metrics={})
    save(tmp_path, 2)
    save(tmp_path, 3, metrics={"loss": 0.5})
    save(tmp_path, 4, metrics={"loss": 0.5})
    save(tmp_path, 5, metrics="junk")
    assert [item.step for item in best(list_checkpoints(tmp_path), "loss")] == [3, 4]
    retain(tmp_path, RetentionPolicy(last=1, best=1, metric="loss"))
    assert steps(tmp_path) == [3, 5]


def test_every_n_steps_and_marked_ones_are_kept(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        save(tmp_path, step, keep=step == 10)
    keep_forever(list_checkpoints(tmp_path)[1])
    retain(tmp_path, RetentionPolicy(last=1, every_n_steps=30))
    assert steps(tmp_path) == [10, 20, 30, 60, 70]
    assert verify(tmp_path / "step-00000020", deep=True) == []
    (tmp_path / "step-00000020" / "KEEP").unlink()
    retain(tmp_path, RetentionPolicy(last=1))
    assert steps(tmp_path) == [10, 70]


def test_the_newest_complete_one_is_never_deleted(tmp_path: Path) -> None:
    """Damaged ones do not count: with `last=1` and a damaged newest, the one before it stays."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / "state.ckpt").write_bytes(b"")
    retain(tmp_path, RetentionPolicy(last=0))
    assert steps(tmp_path) == [2, 3]
    newest = newest_complete(tmp_path).checkpoint
    assert newest is not None
    assert newest.step == 2


def test_last_none_keeps_everything(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert retain(tmp_path, RetentionPolicy(last=None)) == []
    assert steps(tmp_path) == [1, 2, 3]


def test_an_older_version_of_a_step_goes_and_an_abandoned_timeline_ages_out(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 500)
    save(tmp_path, 100, start=2)
    save(tmp_path, 200, start=2)
    retain(tmp_path, RetentionPolicy(last=2))
    assert [item.name for item in list_checkpoints(tmp_path)] == ["step-00000100.2", "step-00000200"]


def test_the_third_checkpoint_of_a_step_is_the_newest(tmp_path: Path) -> None:
    """After a step, its validation and the end of its epoch; the first is deleted when the third is saved."""
    for epoch in (0, 1, 2):
        newest = save(tmp_path, 100, epoch=epoch)
        retain(tmp_path, RetentionPolicy(last=2))
    assert newest_complete(tmp_path).checkpoint == newest
    assert (tmp_path / "last").resolve() == newest.path
    assert [item.metadata["epoch"] for item in list_checkpoints(tmp_path)] == [2]


def test_a_deletion_that_fails_half_way_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    class Stuck(Syscalls):
        def rmdir(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    for step in (1, 2):
        save(tmp_path, step)
    with pytest.raises(CheckpointError, match="cannot delete an old checkpoint"):
        retain(tmp_path, RetentionPolicy(last=1), syscalls=Stuck())
    assert steps(tmp_path) == [2]
    assert newest_complete(tmp_path).skipped == []
    assert len(discard_incomplete(tmp_path, token="next")) == 1
    assert sorted(os.listdir(tmp_path)) == ["last", "latest", "step-00000002"]


def test_nothing_to_delete_and_no_directory(tmp_path: Path) -> None:
    assert retain(tmp_path / "none", RetentionPolicy()) == []
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "step-00000001")
    assert retain(tmp_path, RetentionPolicy()) == []


@pytest.mark.parametrize("wrong", [{"best": 1}, {"last": -1}, {"mode": "low"}, {"every_n_steps": 0}])
def test_a_policy_without_meaning_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RetentionPolicy(**wrong)  # type: ignore[arg-type]


def test_last_and_best_are_links_for_people(tmp_path: Path) -> None:
    """They lead to what is kept, also after a restart, and are no checkpoints themselves."""
    policy = RetentionPolicy(last=1, best=1, metric="loss")
    for step, loss in enumerate([0.9, 0.2, 0.5], start=1):
        save(tmp_path, step, metrics={"loss": loss})
        retain(tmp_path, policy)
    assert (tmp_path / "last").readlink() == Path("step-00000003")
    assert (tmp_path / "best").readlink() == Path("step-00000002")
    assert (tmp_path / "best" / "state.ckpt").read_bytes() == b"state 2"
    assert steps(tmp_path) == [2, 3]
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()  # somebody else's
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to("gone")
    retain(tmp_path, policy)
    assert not (tmp_path / "best").is_symlink()
    assert (tmp_path / "last").readlink() == Path("step-00000003")


def test_best_and_last_name_a_checkpoint_without_links_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    root = run / "checkpoints"
    root.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        best_or_last(run / "last")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(root, step, monitor="val/loss", mode="min", metrics={"val/loss": loss})
    assert best_or_last(run / "best") == best_or_last(root / "best") == root / "step-00000002"
    assert best_or_last(run / "last") == root / "step-00000003"
    assert best_or_last(run / "step-00000001") == run / "step-00000001"
    assert named_checkpoint("best", run, tmp_path) == str(root / "step-00000002")
    assert named_checkpoint("run/last", run, tmp_path) == str(root / "step-00000003")
    save(root, 4)
    with pytest.raises(CheckpointError, match="no checkpoint here is the best"):
        best_or_last(run / "best")


def test_a_file_system_without_links_is_no_failure(tmp_path: Path) -> None:
    class WithoutLinks(Syscalls):
        def symlink(self, target: str, link: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

    save(tmp_path, 1)
    save(tmp_path, 2)
    retain(tmp_path, RetentionPolicy(last=1), syscalls=WithoutLinks())
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002"]
