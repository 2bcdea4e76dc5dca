"""The lock of a run directory: one holder, whatever crashes, and an error that says who it is."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import RunDirectoryError, RunLockedError
from fairlead.interfaces import Job
from fairlead_runs.commit import Lock, LockOwner, Syscalls, read_lock


def run_python(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def write_lock(path: Path, *, age_s: float = 0.0, **changes: Any) -> LockOwner:
    """A lock file as another process left it."""
    owner = dataclasses.replace(LockOwner.here(), nonce="other", **changes)
    path.write_bytes(owner.dump())
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return owner


HOLD = """
import sys
from pathlib import Path
from fairlead_runs.commit import Lock, LockOwner
from fairlead.interfaces import Job
with Lock(Path(sys.argv[1]), owner=LockOwner.here(Job("slurm:4711", cancel="scancel 4711"))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_holds_it_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with run_python(HOLD, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError) as caught, Lock(path):
            pass
        text = caught.value.block()
        for needed in (str(holder.pid), os.uname().nodename, "slurm:4711", "since 20", "scancel 4711", str(path)):
            assert needed in text
        assert os.listdir(tmp_path) == ["lock"]  # the refused one left nothing
        state = read_lock(path)
        assert state is not None
        assert state.gone is None
        assert state.owner is not None
        assert state.owner.pid == holder.pid
        holder.communicate("")
    assert os.listdir(tmp_path) == []
    with Lock(path) as lock:
        assert lock.held


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with run_python(HOLD, path) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGKILL)
    state = read_lock(path)
    assert state is not None
    assert state.gone == f"process {holder.pid} on this host has ended"
    with Lock(path) as lock:
        lock.fence.check()
        assert json.loads(path.read_bytes())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "age_s", "stale"),
    [
        ({"host": "node17"}, 5.0, False),
        ({"host": "node17"}, 500.0, True),
        ({"host": "node17"}, -3600.0, False),  # the clock went backwards
        ({"host": "node17", "job": "slurm:1", "attempt": 0}, 5.0, True),  # we are its second attempt
        ({"host": "node17", "job": "slurm:1", "attempt": 1}, 5.0, False),  # another step of our own attempt
        ({"host": "node17", "job": "slurm:2", "attempt": 0}, 5.0, False),
        ({"pid_start": 1}, 5.0, True),  # our pid, but of an earlier process
        ({"boot": "of another container with our host name", "pid": 2**22 + 1}, 5.0, False),
        ({"boot": "of another container with our host name", "pid": 2**22 + 1}, 500.0, True),
        ({"pid": 2**22 + 1}, 5.0, True),
        ({"boot": "", "pid": 2**22 + 1}, 5.0, False),  # of some machine with our host name
        ({"boot": "", "pid": 2**22 + 1}, 500.0, True),
    ],
)
def test_when_an_owner_counts_as_dead(tmp_path: Path, changes: dict[str, Any], age_s: float, stale: bool) -> None:
    path = tmp_path / "lock"
    write_lock(path, age_s=age_s, **changes)
    me = LockOwner.here(Job("slurm:1", attempt=1))
    lock = Lock(path, owner=dataclasses.replace(me, boot=changes.get("boot", me.boot) and me.boot))
    if stale:
        lock.acquire()
        assert lock.held
        lock.release()
        assert os.listdir(tmp_path) == []
    else:
        before = path.read_bytes()
        with pytest.raises(RunLockedError):
            lock.acquire()
        assert path.read_bytes() == before
        assert not lock.held


def test_a_write_that_takes_a_part_only_tears_no_lock(tmp_path: Path) -> None:
    class Short(Syscalls):
        def write(self, fd: int, data: memoryview) -> int:
            return super().write(fd, data[:10])

    with Lock(tmp_path / "lock", syscalls=Short()) as lock:
        lock.began(7)
        lock.fence.check()
        state = read_lock(tmp_path / "lock")
    assert state is not None
    assert state.owner is not None
    assert state.owner.start == 7


def test_a_torn_lock_file_is_someone_who_is_just_taking_it_until_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b'{"host": "no')
    with pytest.raises(RunLockedError, match="just taking it"):
        Lock(path).acquire()
    os.utime(path, (0, 0))
    with Lock(path) as lock:
        lock.fence.check()


RACE = """
import dataclasses, os, sys
from pathlib import Path
from fairlead_runs.commit import Lock, LockOwner
from fairlead.errors import RunLockedError

path, rounds, contenders = Path(sys.argv[1]), 30, 6
dead = dataclasses.replace(LockOwner.here(), pid=2**22 + 1, pid_start=None)
for number in range(rounds):
    path.write_bytes(dataclasses.replace(dead, nonce=str(number)).dump())
    go_r, go_w = os.pipe()
    end_r, end_w = os.pipe()
    out_r, out_w = os.pipe()
    children = []
    for _ in range(contenders):
        if (child := os.fork()) == 0:
            os.close(go_w), os.close(end_w)
            lock = Lock(path, owner=LockOwner.here())
            os.read(go_r, 1)
            try:
                lock.acquire()
                os.write(out_w, b"1")
            except RunLockedError:
                os.write(out_w, b"0")
            os.read(end_r, 1)
            os._exit(0)
        children.append(child)
    os.close(go_w)
    answers = b""
    while len(answers) < contenders:
        answers += os.read(out_r, contenders)
    assert sorted(answers.decode()) == list("000001"), answers
    os.close(end_w)
    for child in children:
        os.waitpid(child, 0)
    for fd in (go_r, end_r, out_r, out_w):
        os.close(fd)
print("ok")
"""


def test_exactly_one_of_several_processes_takes_over_a_stale_lock(tmp_path: Path) -> None:
    """Two jobs at once on the directory of a crashed one: never both."""
    with run_python(RACE, tmp_path / "lock") as race:
        out, _ = race.communicate()
    assert out == "ok\n"
    assert race.returncode == 0


CHURN = """
import os, random, sys, time
from pathlib import Path
from fairlead.errors import RunLockedError
from fairlead_runs.commit import Lock, LockOwner

path, inside = Path(sys.argv[1]), Path(sys.argv[1] + ".inside")
children = []
for number in range(4):
    if (child := os.fork()) == 0:
        rng = random.Random(number)
        for turn in range(25):
            lock = Lock(path, owner=LockOwner.here())
            while not lock.held:
                try:
                    lock.acquire()
                except RunLockedError:
                    time.sleep(0.01)
            inside.mkdir()                       # raises when someone else is inside
            inside.rmdir()
            if rng.random() < 0.2:
                if (grandchild := os.fork()) == 0:
                    lock.release()               # must do nothing: it is not the holder
                    os._exit(0)
                os.waitpid(grandchild, 0)
                assert lock.held
            lock.fence.check()
            if turn == 24:
                os._exit(0)                      # dies with the lock held; the others take it over
            lock.release()
        os._exit(1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0] * 4, codes
print("ok")
"""


def test_no_two_processes_are_ever_inside_while_holders_die_and_fork(tmp_path: Path) -> None:
    with run_python(CHURN, tmp_path / "lock") as churn:
        out, _ = churn.communicate()
    assert out == "ok\n"


def test_the_heartbeat_keeps_it_fresh(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    beaten = threading.Event()

    class Watch(Syscalls):
        def touch(self, path: Path) -> None:
            super().touch(path)
            beaten.set()

    with Lock(path, interval_s=0.001, syscalls=Watch()):
        os.utime(path, (0, 0))
        beaten.clear()
        assert beaten.wait(30)
        state = read_lock(path)
        assert state is not None
        assert state.age_s < 3600


@pytest.mark.parametrize("how", ["taken", "deleted"])
def test_a_holder_that_lost_it_notices_and_does_not_release_the_other_ones(tmp_path: Path, how: str) -> None:
    """A job that was suspended for hours must stop writing when it wakes up."""
    path = tmp_path / "lock"
    lock = Lock(path, interval_s=0.001)
    lock.acquire()
    if how == "taken":
        write_lock(tmp_path / "new", host="node18")
        os.rename(tmp_path / "new", path)
    else:
        path.unlink()
    deadline = time.monotonic() + 30
    while lock.held and time.monotonic() < deadline:  # its own thread notices
        time.sleep(0.001)
    assert not lock.held
    with pytest.raises(RunLockedError, match="this start was replaced"):
        lock.fence.check()
    lock.release()
    assert path.exists() == (how == "taken")


def test_release_is_idempotent_and_a_deleted_directory_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = Lock(folder / "lock")
    lock.release()
    lock.acquire()
    lock.acquire()
    (folder / "lock").unlink()
    folder.rmdir()
    lock.release()
    lock.release()
    with pytest.raises(RunDirectoryError, match="cannot lock"):
        lock.acquire()


def test_it_works_on_file_systems_without_hard_links(tmp_path: Path) -> None:
    class NoLinks(Syscalls):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "lock"
    write_lock(path, pid=2**22 + 1)
    with Lock(path, syscalls=NoLinks()) as lock:
        lock.fence.check()
        with pytest.raises(RunLockedError):
            Lock(path, owner=LockOwner.here(), syscalls=NoLinks()).acquire()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_directory_that_is_not_writable_is_named(tmp_path: Path, number: int) -> None:
    class ReadOnly(Syscalls):
        def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
            raise OSError(number, os.strerror(number))

    with pytest.raises(RunDirectoryError) as caught:
        Lock(tmp_path / "lock", syscalls=ReadOnly()).acquire()
    assert os.strerror(number) in caught.value.block()
    assert str(tmp_path) in caught.value.block()


def beats_soon(path: Path, after_s: float) -> threading.Timer:
    """Another host's owner, who gives a sign of life."""
    thread = threading.Timer(after_s, os.utime, [path])
    thread.start()
    return thread


def test_who_waits_takes_over_an_owner_that_stays_silent_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that was killed: the next one does not end with exit code 2, which would be final."""
    path = tmp_path / "lock"
    write_lock(path, age_s=100, host="node17")
    with pytest.raises(RunLockedError, match="another job"):
        Lock(path).acquire()
    lock = Lock(path, stale_after_s=103)
    lock.acquire(wait=True)
    assert lock.held
    assert re.search(r"last sign of life 10\d s ago; without another one it is taken over in \d s", caplog.text)
    assert lock.took_over is not None
    assert "on node17" in lock.took_over
    assert "no sign of life for 10" in lock.took_over
    lock.release()


def test_who_waits_is_refused_as_soon_as_the_owner_gives_a_sign_of_life(tmp_path: Path) -> None:
    """A deliberate second job."""
    path = tmp_path / "lock"
    write_lock(path, age_s=30, host="node17")
    before = path.read_bytes()
    beating, began = beats_soon(path, 1.2), time.monotonic()
    with pytest.raises(RunLockedError, match="another job is using this run directory"):
        Lock(path).acquire(wait=True)
    beating.join()
    assert time.monotonic() - began < 30
    assert path.read_bytes() == before


def test_this_job_is_not_called_another_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    job = Job("slurm:1", cancel="scancel 1")
    write_lock(path, host="node17", job="slurm:1", cancel="scancel 1")
    with pytest.raises(RunLockedError, match="another process of this same job") as caught:
        Lock(path, owner=LockOwner.here(job)).acquire()
    assert "scancel" not in caught.value.block()  # it would end this job, too
