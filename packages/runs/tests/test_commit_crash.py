"""A failpoint at every system call of a save, as an error and as a death; and SIGKILL at random moments.

A kill cannot prove an fsync, the page cache survives it: `test_commit_replay.py` does that.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import CheckpointError
from fairlead_runs.commit import (
    Checkpoint,
    RetentionPolicy,
    Syscalls,
    checkpoint_name,
    discard_incomplete,
    list_checkpoints,
    newest_complete,
    publish,
    retain,
    stage,
    write_file,
)

KILLS = int(os.environ.get("FAIRLEAD_KILLS", "20"))
CALLS = [name for name in vars(Syscalls) if not name.startswith("_")]


class Failpoint(Syscalls):
    """Does something else at the n-th system call (counted from 0), instead of it or right after it."""

    def __init__(self, at: int, act: Callable[[], None], *, onward: bool = False) -> None:
        self.at = at
        self.act = act
        self.onward = onward
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        real = object.__getattribute__(self, name)
        if name not in CALLS:
            return real

        def call(*args: Any) -> Any:
            hit = self.count == self.at or (self.onward and self.count > self.at and name == "write")
            self.count += 1
            if hit:
                self.act()
            return real(*args)

        return call


def content(step: int, rank: int) -> bytes:
    return b"step %d rank %d " % (step, rank) * 500


def save(root: Path, step: int, syscalls: Syscalls | None = None) -> Checkpoint:
    """One whole save as a backend does it."""
    staged = stage(root, checkpoint_name(step), token=f"s{step}", syscalls=syscalls)
    hashes = {}
    for rank in range(2):
        name = f"rank-{rank}.pt"
        hashes[name] = write_file(staged / name, content(step, rank), syscalls=syscalls)
    del hashes["rank-1.pt"]  # one file that publish has to sync and hash by itself
    checkpoint = publish(staged, {"step": step}, hashes=hashes, files=["rank-0.pt", "rank-1.pt"], syscalls=syscalls)
    retain(root, RetentionPolicy(last=1), syscalls=syscalls)
    return checkpoint


def check(root: Path, at_least: int, at_most: int) -> int:
    """There is a complete newest checkpoint with the right bytes, and nothing that looks like half of one."""
    newest = newest_complete(root, deep=True)
    assert newest.checkpoint is not None
    assert newest.skipped == []
    step = newest.checkpoint.step
    assert at_least <= step <= at_most
    for rank in range(2):
        assert (newest.checkpoint.path / f"rank-{rank}.pt").read_bytes() == content(step, rank)
    return step


def check_next_save_works(root: Path) -> None:
    discard_incomplete(root, token="s9")
    save(root, 9)
    check(root, 9, 9)
    assert sorted(os.listdir(root)) == ["last", "latest", "step-00000009"]


def count_of_calls(root: Path) -> int:
    save(root, 1)
    counting = Failpoint(-1, lambda: None)
    save(root, 2, counting)
    return counting.count


@pytest.mark.parametrize("onward", [False, True], ids=["once", "every-write-from-then-on"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk-full", "io-error"])
def test_an_error_at_every_system_call_loses_nothing(tmp_path: Path, number: int, onward: bool) -> None:
    """The failing save is reported, the previous checkpoint is there, the next save works."""
    total = count_of_calls(tmp_path / "count")
    assert total > 30
    found = []

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at in range(total):
        root = tmp_path / f"at {at}"
        save(root, 1)
        with pytest.raises(CheckpointError) as caught:  # none is swallowed
            save(root, 2, Failpoint(at, fail, onward=onward))
        assert os.strerror(number) in caught.value.block()
        assert str(root) in caught.value.block()
        found.append(check(root, 1, 2))
        check_next_save_works(root)
    assert found == sorted(found)
    assert set(found) == {1, 2}


DEATHS = """
import json, os, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_commit_crash as t

base, at, found = Path(sys.argv[1]), 0, []
while True:
    root = base / f"at {at}"
    t.save(root, 1)
    if (child := os.fork()) == 0:
        t.save(root, 2, t.Failpoint(at, lambda: os._exit(9)))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        break
    assert code == 9, code
    found.append(t.check(root, 1, 2))
    t.check_next_save_works(root)
    at += 1
print(json.dumps(found))
"""


def test_death_at_every_system_call_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """A real process ends with `os._exit` before each system call in turn."""
    total = count_of_calls(tmp_path / "count")
    run = subprocess.run(
        [sys.executable, "-c", DEATHS, str(tmp_path / "deaths"), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == total
    assert found == sorted(found)  # old, old, ..., new, new: one moment decides
    assert set(found) == {1, 2}


SAVING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_commit_crash as t

root = Path(sys.argv[1])
newest = t.newest_complete(root, deep=True)
assert not newest.skipped, newest.skipped
step = newest.checkpoint.step if newest.checkpoint else 0
t.discard_incomplete(root, token=f"s{step + 1}")
while True:
    step += 1
    t.save(root, step)
    print(step, flush=True)
"""


@pytest.mark.full
def test_sigkill_at_random_moments_of_saving_and_retention(tmp_path: Path) -> None:
    """After each of FAIRLEAD_KILLS kills, what was reported as saved is there, or something newer."""
    root = tmp_path / "my runs" / "checkpoints"
    rng = random.Random(20261120)
    saved = 0
    for _ in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(root), str(Path(__file__).parent)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        lines = [first, *process.stdout.read().splitlines(keepends=True)]
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        saved = max([saved, *(int(line) for line in lines if line.endswith(b"\n"))])
        saved = check(root, saved, saved + 1)
    assert saved > KILLS
    check_before = len(list_checkpoints(root))
    assert check_before <= 2
