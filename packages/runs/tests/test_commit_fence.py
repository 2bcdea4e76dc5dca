"""A start that is frozen at any system call, and replaced meanwhile, changes nothing when it goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import CheckpointError, RunLockedError
from fairlead_runs import RunDirectory, fingerprint, read_history, state
from fairlead_runs.commit import (
    RetentionPolicy,
    Syscalls,
    checkpoint_name,
    list_checkpoints,
    newest_complete,
    publish,
    retain,
    stage,
    write_file,
)

JOB: dict[str, Any] = {"model": {"class": "gpt:GPT"}, "trainer": {"max_steps": 9}}
LONGER: dict[str, Any] = {**JOB, "trainer": {"max_steps": 99}}
CALLS = [name for name in vars(Syscalls) if not name.startswith("_")]


class Freezing(Syscalls):
    """Calls `meanwhile` before the n-th call, once."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.meanwhile: Callable[[], None] = lambda: None

    def counted(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.meanwhile()


def _freezing(name: str) -> Callable[..., Any]:
    def call(self: Freezing, *args: Any) -> Any:
        self.counted()
        return getattr(Syscalls, name)(self, *args)

    return call


for each in CALLS:
    setattr(Freezing, each, _freezing(each))


def opened(path: Path, system: Syscalls | None = None, job: dict[str, Any] = JOB) -> RunDirectory:
    run = RunDirectory.open(path, job=job, fingerprint=fingerprint(job), syscalls=system)
    run.begin(resolution={}, provenance={})
    return run


def trains(run: RunDirectory, step: int, system: Syscalls | None = None, keep: int = 1) -> None:
    """Saves a checkpoint, which leaves `keep`, and says so."""
    staged = stage(run.checkpoints, checkpoint_name(step), token=run.token, syscalls=system)
    digest = write_file(staged / "state.ckpt", b"state %d" % step, syscalls=system)
    metadata = {"step": step, "start": run.start}
    publish(staged, metadata, hashes={"state.ckpt": digest}, fence=run.fence, syscalls=system)
    run.history.append("checkpoint", step=step)
    retain(run.checkpoints, RetentionPolicy(last=keep), fence=run.fence, syscalls=system)


def replaced_by_another(path: Path) -> RunDirectory:
    """Another start finds the lock silent, and goes on."""
    os.utime(path / ".lock", (0, 0))
    other = opened(path, job=LONGER)  # the first may just have finished
    trains(other, 2, keep=5)  # what the first one still wants to delete
    return other


def seen(path: Path) -> dict[str, Any]:
    """What anybody sees of a run; the manifests are read, too."""
    root = path / "checkpoints"
    return {
        "checkpoints": {one.name: one.manifest for one in list_checkpoints(root)},
        "newest": newest_complete(root, deep=True),
        "latest": (root / "latest").read_text(),
        "last": os.readlink(root / "last"),
        "events": read_history(path / "history.jsonl"),
        "state": (state(path).state, state(path).step),
        "starts": sorted(os.listdir(path / "starts")),
    }


def disturbed(path: Path, at: int | None) -> int:
    """A start that saves, deletes and finishes, and is replaced before its call number `at`; the number of calls."""
    system = Freezing()
    run = opened(path, system)
    trains(run, 1, system)
    system.calls, system.at = 0, at
    others: list[RunDirectory] = []
    views: list[dict[str, Any]] = []

    def meanwhile() -> None:
        others.append(replaced_by_another(path))
        views.append(seen(path))

    system.meanwhile = meanwhile
    failed = False
    try:
        trains(run, 3, system)
        run.finish(step=3)
    except (RunLockedError, CheckpointError):  # the next owner has deleted what it was writing
        failed = True
        assert run.fence is not None
        assert run.fence.why_lost() is not None
    calls = system.calls
    if at is not None:
        assert seen(path) == views[0], f"call {at} of {calls}"
        assert failed or at >= calls - 3, f"call {at} of {calls}"  # in the line that it had finished
        with pytest.raises(RunLockedError, match="this start was replaced"):
            run.finish(step=3)
        trains(others[0], 4)
        run.close()
        assert others[0].lock is not None
        others[0].lock.fence.check()  # the other one's was not released
        others[0].finish(step=4)
        others[0].close()
        assert state(path).state == "finished"
    run.close()
    return calls


def test_whenever_it_is_frozen(tmp_path: Path) -> None:
    """Between the look at the lock and each rename or write, too."""
    calls = disturbed(tmp_path / "undisturbed", None)
    assert calls > 30
    for at in range(1, calls + 1):
        disturbed(tmp_path / str(at), at)


def test_its_number_rises_with_each_owner_and_is_in_lock_history_and_manifest(tmp_path: Path) -> None:
    path = tmp_path / "gpt"
    for number in (1, 2):
        with opened(path) as run:
            assert run.lock is not None
            assert f'"start": {number}' in (path / ".lock").read_text()
            trains(run, number)
    (path / "starts" / "1").rename(tmp_path / "gone")  # people tidy up
    with opened(path) as run:
        trains(run, 3)
        assert run.start == 3
    assert [event["start"] for event in read_history(path / "history.jsonl")] == [1, 1, 2, 2, 3, 3]
    (newest,) = list_checkpoints(path / "checkpoints")
    assert newest.metadata["start"] == 3


def test_what_a_replaced_start_has_written_too_late_is_not_believed(tmp_path: Path) -> None:
    """It had looked at the lock, and was frozen before its line was written."""
    path = tmp_path / "gpt"
    with opened(path) as run:
        trains(run, 1)
    with opened(path) as run:
        trains(run, 2)
        with (path / "history.jsonl").open("a") as file:
            file.write('{"event": "finished", "start": 1, "limits": {"max_steps": 9}, "step": 9}\n')
        assert state(path).state == "running"
    run = RunDirectory.open(path, job=JOB, fingerprint=fingerprint(JOB))
    assert run.finished is None
    run.close()
