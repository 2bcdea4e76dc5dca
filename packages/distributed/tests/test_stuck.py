"""A rank that fails or hangs: what the other ranks do. Real processes, with the variables of a plain launcher."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from fairlead_distributed import free_port
from fairlead_distributed.alarms import is_requested_stop
from fairlead_distributed.stacks import dump_stacks, flight_recorder_variables
from fairlead_distributed.stuck import RankWatch
from fairlead_distributed.testing import without_gloo
from fairlead_launch.forked_child import run_python
from fairlead_launch.forkserver import ForkedProcess, shared

LIMIT_S = 180.0  # only against a test that would hang for ever; torch's own time-out is longer in most tests

HEAD = """
import ctypes, os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from fairlead_distributed import all_reduce, destroy_process_group, init_process_group
from fairlead_distributed.stacks import dump_flight_recorder, show_stacks_on_signal
from fairlead_distributed.stuck import RankWatch

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
folder = Path(os.environ["FOLDER"])
show_stacks_on_signal()
init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["TIMEOUT"])), device="cpu")


def watch(**more):
    return RankWatch.of_process_group(
        folder / "stacks", flight_recorder=folder / "fr", **{"grace": timedelta(seconds=2), **more}
    )


def meet():
    return all_reduce(torch.ones(1), check=False)  # stands in the collective itself


def never_comes():
    time.sleep(3600)


"""


@dataclass
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str


@dataclass
class Ranks:
    """The processes of a job, each by itself with RANK and WORLD_SIZE; forked, as no test is about their start."""

    folder: Path
    processes: list[ForkedProcess] = field(default_factory=list)

    def start(self, body: str, world_size: int = 3, timeout_s: float = 1200) -> None:
        script = self.folder / "job.py"
        script.write_text(HEAD + textwrap.dedent(body))
        port = free_port()
        for rank in range(world_size):
            mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            environ = {
                **os.environ,
                **{name: str(value) for name, value in mine.items()},
                "MASTER_ADDR": "127.0.0.1",
                "FOLDER": str(self.folder),
                "TIMEOUT": str(timeout_s),
                **flight_recorder_variables(self.folder),
            }
            with self._said(rank, "out").open("w") as out, self._said(rank, "err").open("w") as err:
                fds = {1: out.fileno(), 2: err.fileno()}
                started = shared().start(run_python, str(script), environ=environ, cwd=self.folder, fds=fds)
            self.processes.append(started)

    def end(self) -> list[Ended]:
        """Waits for all."""
        codes = [process.wait(LIMIT_S) for process in self.processes]
        return [
            Ended(code, *(without_gloo(self._said(rank, where).read_text()) for where in ("out", "err")))
            for rank, code in enumerate(codes)
        ]

    def _said(self, rank: int, where: str) -> Path:
        return self.folder / f"rank-{rank}.{where}"

    def until(self, name: str, text: str = "") -> None:
        """Waits for a file that a rank makes, and for a text in it."""
        deadline, path = time.monotonic() + LIMIT_S, self.folder / name
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < deadline, name
            time.sleep(0.05)

    def stacks(self) -> dict[str, str]:
        """What each rank dumped, by file name."""
        return {path.name: path.read_text() for path in sorted((self.folder / "stacks").glob("*"))}


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    job = Ranks(tmp_path)
    yield job
    for process in job.processes:
        process.kill_group()


def first_line(ended: Ended) -> str:
    """The first line that is not torch's own."""
    return next((line for line in ended.err.splitlines() if line.startswith("rank ")), ended.err)


def test_after_a_collectives_time_out_every_rank_has_dumped_its_stacks(ranks: Ranks) -> None:
    """Also the one that is stuck in the user's code, which ends then."""
    ranks.start(
        """
        with watch():
            meet()
            never_comes() if rank == 1 else meet()
        """,
        timeout_s=5,
    )
    ended = ranks.end()
    assert [one.code for one in ended] == [1, 1, 1]
    stacks = ranks.stacks()
    assert list(stacks) == ["rank-00000.txt", "rank-00001.txt", "rank-00002.txt"]
    assert "in never_comes" in stacks["rank-00001.txt"]
    assert "MainThread" in stacks["rank-00001.txt"]
    assert "failed: " in first_line(ended[1])
    assert len({first_line(one) for one in ended}) == 1  # two ranks run into it at once: all name the same one
    assert "rank 1 ends, 2 s after that" in ended[1].err
    first = next(text for name, text in stacks.items() if name != "rank-00001.txt" and "Traceback" in text)
    assert "in meet" in first


@pytest.mark.full
def test_torch_can_read_the_flight_recorder_of_every_rank(ranks: Ranks) -> None:
    ranks.start(
        """
        with watch():
            meet()
            # torch reads its own symbols the first time; a loaded machine is too slow for that when a rank is ending.
            dump_flight_recorder(folder / "warm", rank)
            never_comes() if rank == 1 else meet()
        """,
        world_size=2,
        timeout_s=5,
    )
    assert [one.code for one in ranks.end()] == [1, 1]
    entries = [
        pickle.loads((ranks.folder / "fr" / "gloo" / f"rank_{rank}").read_bytes())["entries"] for rank in range(2)
    ]
    # Rank 0 has begun one more all-reduce than the rank that never came.
    assert [len(one) for one in entries] == [2, 1]
    assert {entry["profiling_name"] for one in entries for entry in one} == {"gloo:all_reduce"}
    if importlib.util.find_spec("torch.distributed.flight_recorder") is None:
        pytest.skip("torch 2.9 has no tool that reads them")
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(ranks.folder / "fr" / "gloo")]
    told = subprocess.run(tool, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "missing ranks: {1}" in told.stdout + told.stderr
    assert f"meet at {ranks.folder}/job.py" in told.stdout + told.stderr


def test_an_exception_on_one_rank_ends_all_and_is_named_first(ranks: Ranks) -> None:
    """Without a supervisor; the others wait in a collective for twenty minutes, or for a lock for ever."""
    ranks.start(
        """
        with watch():
            meet()
            if rank == 2:
                raise ValueError("no luck")
            if rank == 1:
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            meet()
        """
    )
    ended = ranks.end()
    assert [one.code for one in ended] == [1, 1, 1]
    host = os.uname().nodename
    for one in ended:
        assert first_line(one) == f"rank 2 on {host} failed: ValueError: no luck"
    assert [one.err.count("Traceback") for one in ended] == [0, 0, 1]  # thousands of copies would help nobody
    assert [text.count("== ") for text in ranks.stacks().values()] == [1, 1, 1]


def test_a_second_failure_does_not_hide_the_first(ranks: Ranks) -> None:
    """Rank 1 fails of rank 0's absence, before it has heard why; its own error comes second."""
    ranks.start(
        """
        from fairlead_distributed import stuck

        stuck._SECOND_S = stuck._PATIENCE_S = 60.0  # a loaded machine may keep rank 0 from speaking for seconds

        def until(name):
            while not (folder / name).exists():
                time.sleep(0.05)

        watched = watch()
        meet()
        if rank == 0:
            until("second")
            watched.failed(ValueError("the first"))
            until("heard")  # it hosts the store
        else:
            watched.leave()
            threading.Timer(0.5, (folder / "second").touch).start()
            watched.failed(RuntimeError("Connection closed by peer"), secondary=True)
            (folder / "heard").touch()
        os._exit(3)
        """,
        world_size=2,
    )
    ended = ranks.end()
    assert [first_line(one).partition(" failed: ")[2] for one in ended] == ["ValueError: the first"] * 2


@pytest.mark.parametrize(
    "ends",
    [
        "pass",
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("raise SystemExit(75)", "sys.exit(143)", "raise KeyboardInterrupt")
        ),
    ],
)
def test_a_block_that_ends_as_it_should_leaves_nothing(ranks: Ranks, ends: str) -> None:
    """Also where rank 0, which hosts the store, ends long before the others, which had no word for it."""
    ranks.start(
        f"""
        with watch():
            meet()
            if rank == 0:
                {ends}
            else:
                while not (folder / "gone").exists():
                    time.sleep(0.05)
                time.sleep(3)  # longer than the grace
                print("done")
        """
    )
    first = ranks.processes[0]
    first.wait(LIMIT_S)
    (ranks.folder / "gone").touch()
    ended = ranks.end()
    assert [one.code for one in ended[1:]] == [0, 0]
    assert [one.out for one in ended[1:]] == ["done\n"] * 2
    assert ranks.stacks() == {}
    assert not (ranks.folder / "fr").exists()


def test_an_exception_that_the_program_catches_is_none_of_our_business(ranks: Ranks) -> None:
    """In the block, in a forked worker, or in a child that was forked behind Python's back."""
    ranks.start(
        """
        class Bad(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                raise ValueError("in the worker")

        with watch():
            meet()
            try:
                raise ValueError("caught")
            except ValueError:
                pass
            try:
                list(torch.utils.data.DataLoader(Bad(), num_workers=1, multiprocessing_context="fork"))
            except ValueError:
                pass
            child = os.fork()
            if child == 0:
                try:
                    sys.stderr.close()
                    raise RuntimeError("in the child")
                finally:
                    os._exit(1)
            os.waitpid(child, 0)
            time.sleep(3)
            meet()
        print("done")
        """,
        world_size=2,
    )
    assert [(one.code, one.out) for one in ranks.end()] == [(0, "done\n")] * 2
    assert ranks.stacks() == {}


def test_a_child_that_leaves_the_block_by_an_exception_tells_nobody(ranks: Ranks) -> None:
    ranks.start(
        """
        try:
            with watch():
                meet()
                if rank == 1 and os.fork() == 0:
                    raise RuntimeError("in the child")
                time.sleep(3)
                meet()
        except RuntimeError:
            os._exit(0)
        print("done")
        """,
        world_size=2,
    )
    assert [(one.code, one.out) for one in ranks.end()] == [(0, "done\n")] * 2
    assert ranks.stacks() == {}


def test_a_rank_that_left_by_an_exception_that_was_caught_is_not_ended(ranks: Ranks) -> None:
    """It goes on by itself, however long, though another rank has failed."""
    ranks.start(
        """
        watched = watch()
        meet()
        if rank == 1:
            watched.leave()
            while not (folder / "gone").exists():
                time.sleep(0.05)
            time.sleep(3)
            print("done")
        else:
            watched.failed(ValueError("no luck"))
            os._exit(1)
        """,
        world_size=2,
    )
    ranks.processes[0].wait(LIMIT_S)
    (ranks.folder / "gone").touch()
    ended = ranks.end()
    assert (ended[1].code, ended[1].out) == (0, "done\n")


def test_a_rank_that_catches_what_it_raises_of_the_others_absence_is_not_ended(ranks: Ranks) -> None:
    """It has heard of the failure, and leaves the block within the grace."""
    ranks.start(
        """
        heard = threading.Event()
        watched = watch(heard=lambda alarm: heard.set())
        meet()
        if rank == 1:
            heard.wait()
            watched.leave()
            time.sleep(4)
            print("done", flush=True)
        else:
            watched.failed(ValueError("no luck"))
        os._exit(1 - rank)
        """,
        world_size=2,
    )
    assert [(one.code, one.out) for one in ranks.end()] == [(1, ""), (0, "done\n")]


def test_the_death_of_the_rank_that_hosts_the_store_ends_the_others(ranks: Ranks) -> None:
    ranks.start(
        """
        with watch():
            meet()
            os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else never_comes()
        """
    )
    ended = ranks.end()
    assert [one.code for one in ended] == [-signal.SIGKILL, 1, 1]
    for one in ended[1:]:
        assert "the process that hosts this run's store has died" in one.err
    assert list(ranks.stacks()) == ["rank-00001.txt", "rank-00002.txt"]


def test_when_nothing_moves_all_stacks_are_dumped_and_the_run_goes_on(ranks: Ranks) -> None:
    ranks.start(
        """
        def wait_for_release():
            while not (folder / "go").exists():
                time.sleep(0.05)

        steps = [0]
        with watch(progress=lambda: steps[0], hang_after=timedelta(seconds=1)):
            for _ in range(3):
                meet()
                steps[0] += 1
            wait_for_release() if rank == 1 else meet()
            meet() if rank == 1 else None
            meet()
        print("done")
        """
    )
    # A loaded machine may stand still for a second before, too.
    ranks.until("stacks/rank-00001.txt", "in wait_for_release")
    for rank in (0, 2):
        ranks.until(f"stacks/rank-0000{rank}.txt", "in meet")
    (ranks.folder / "go").touch()
    ended = ranks.end()
    assert [(one.code, one.out) for one in ended] == [(0, "done\n")] * 3
    assert sum("does not move: nothing has moved for 1 s" in one.err for one in ended) >= 1


HOLDS_THE_LOCK = """
with watch():
    meet()
    if rank == 1:
        (folder / "holding").touch()
        ctypes.PyDLL(None).sleep(3600)  # C code that keeps the interpreter's lock
    while not (folder / "go").exists():
        time.sleep(0.05)
    raise ValueError("no luck")
"""


def test_a_rank_whose_interpreter_is_locked_is_named(ranks: Ranks) -> None:
    ranks.start(HOLDS_THE_LOCK, world_size=2)
    ranks.until("holding")
    (ranks.folder / "go").touch()
    ranks.processes[0].wait(LIMIT_S)
    ranks.processes[1].kill()
    ended = ranks.end()
    assert ended[0].code == 1
    assert "no stacks of rank 1: it has died, or C code holds the interpreter's lock" in ended[0].err


def test_sigquit_shows_the_stacks_of_a_rank_whose_interpreter_is_locked(ranks: Ranks) -> None:
    ranks.start(HOLDS_THE_LOCK, world_size=2)
    ranks.until("holding")
    for process in ranks.processes:
        process.send_signal(signal.SIGQUIT)  # rank 0 goes on after it
    (ranks.folder / "go").touch()
    ranks.processes[0].wait(LIMIT_S)
    ranks.processes[1].kill()
    ended = ranks.end()
    assert ended[0].code == 1
    assert "most recent call first" in ended[0].err
    assert f'File "{ranks.folder}/job.py"' in ended[1].err


def test_a_process_alone_is_watched_for_hangs_only(tmp_path: Path) -> None:
    heard: list[str] = []
    said: list[str] = []

    with RankWatch(
        tmp_path,
        progress=lambda: 0,
        hang_after=timedelta(seconds=0.2),
        say=said.append,
        heard=lambda alarm: heard.append(alarm.kind),
    ) as watch:
        deadline = time.monotonic() + LIMIT_S
        while not heard and time.monotonic() < deadline:
            time.sleep(0.02)
        assert watch.isolated == "there is no other rank"
    assert heard[0] == "hang"
    assert "test_a_process_alone_is_watched_for_hangs_only" in (tmp_path / "rank-00000.txt").read_text()
    assert said[0].startswith("rank 0 on ")


def test_a_store_that_cannot_be_shared_and_a_full_disk_break_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with RankWatch(tmp_path / "stacks", dist.Store(), 0, 2, say=said.append) as watch:
        assert watch.isolated
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(ValueError, match="mine"), RankWatch(in_the_way / "stacks", say=said.append):
        raise ValueError("mine")
    assert said == [
        f"the stacks of rank 0 are not in {in_the_way}/stacks/rank-00000.txt: " + said[0].partition(": ")[2]
    ]


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (None, True),
        (KeyboardInterrupt(), True),
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(75), True),
        (SystemExit(3), False),
        (SystemExit("a text"), False),
        (ValueError(), False),
    ],
)
def test_what_counts_as_a_stop(error: BaseException | None, stop: bool) -> None:
    assert is_requested_stop(error) == stop


def test_dumps_are_appended_with_why_and_the_names_of_the_threads(tmp_path: Path) -> None:
    path = tmp_path / "a" / "rank-00000.txt"
    for why in ("one", "two"):
        dump_stacks(path, why)
    text = path.read_text()
    assert [line for line in text.splitlines() if line in ("one", "two")] == ["one", "two"]
    assert "MainThread" in text


@pytest.mark.full
def test_a_process_without_a_collective_has_no_record(tmp_path: Path) -> None:
    script = "import pathlib, fairlead_distributed.stacks as s; print(s.dump_flight_recorder(pathlib.Path(), 0))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
    assert set(flight_recorder_variables(tmp_path).values()) == {f"{tmp_path}/nccl/rank_", "2000"}
