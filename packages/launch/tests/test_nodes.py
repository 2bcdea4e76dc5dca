"""Launchers of several nodes, all on this machine: what happens to the others when one fails, goes, comes or stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import FairleadError, RunFailedError
from fairlead_launch.coordinator import Coordinator, Line, packed
from fairlead_launch.participant import Participant
from fairlead_launch.ports import bind_listener, free_port
from fairlead_launch.restarts import Restarts

SCRIPT = """
import os, pathlib, sys, time
folder, rank, start = pathlib.Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT")
said = folder / f"{start}-{rank}.new"
said.write_text(" ".join([str(os.getpid()), *(os.environ[name] for name in names)]))
said.rename(folder / f"{start}-{rank}")
while not (folder / "finish").exists():
    time.sleep(0.02)
"""
ANNOUNCED = """
import os, pathlib, signal, sys
from fairlead_launch import announce_run
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
announce_run(os.environ, pathlib.Path(sys.argv[1]), 1)
"""
"""What a run of Fairlead's does, as far as the launcher sees it: it says where it is, and saves when it is asked to."""


class Job:
    """The launchers of a job, and what their ranks say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.port = free_port()
        self.launchers: list[subprocess.Popen[str]] = []

    def node(self, rank: int, *words: str, nproc: int = 1) -> subprocess.Popen[str]:
        """Starts the launcher of a node."""
        place = ["--nproc", str(nproc), "--node-rank", str(rank), "--main-port", str(self.port)]
        command = [*("-m", "fairlead", "launch", "--start-method", "spawn"), *place, *words]
        launcher = subprocess.Popen(
            [sys.executable, *command, str(self.script), str(self.folder)],
            cwd=self.folder,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.launchers.append(launcher)
        return launcher

    def ranks(self, start: int, count: int) -> list[list[str]]:
        """What the ranks of a start say, once so many are there: PID, RANK, WORLD_SIZE and so on."""
        paths = [self.folder / f"{start}-{rank}" for rank in range(count)]
        until(lambda: all(path.exists() for path in paths))
        return [path.read_text().split() for path in paths]

    def finish(self) -> list[tuple[int, str]]:
        """Lets the ranks end; the exit code of each launcher, and what it has written."""
        (self.folder / "finish").touch()
        return self.ended()

    def ended(self) -> list[tuple[int, str]]:
        """The exit code of each launcher, and what it has written."""
        return [(launcher.wait(30), launcher.stderr.read()) for launcher in self.launchers if launcher.stderr]

    def pids(self) -> list[int]:
        """All ranks that there were."""
        return [int(path.read_text().split()[0]) for path in self.folder.glob("[0-9]-[0-9]")]


def until(true: Callable[[], bool]) -> None:
    """Waits."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for launcher in job.launchers:
        launcher.kill()
        launcher.communicate()
    until(lambda: not any(map(is_running, job.pids())))


def test_a_killed_rank_starts_all_nodes_again(job: Job) -> None:
    """Ranks keep their places, each start has its own port, and all launchers end with the same code."""
    words = ("--nnodes", "2", "--main-address", "localhost")
    with bind_listener((job.port + 1, 0)):  # so that the first start has the port that would be the second one's
        job.node(1, *words, nproc=2)
        job.node(0, *words, nproc=2)  # node 0 may come later
        first = job.ranks(0, 4)
    assert [rank[1:6] for rank in first] == [
        ["0", "4", "0", "0", "2"],
        ["1", "4", "1", "0", "2"],
        ["2", "4", "0", "1", "2"],
        ["3", "4", "1", "1", "2"],
    ]
    assert {rank[6] for rank in first} == {"localhost"}
    os.kill(int(first[3][0]), signal.SIGKILL)
    second = job.ranks(1, 4)
    assert {rank[7] for rank in first}.isdisjoint(rank[7] for rank in second)
    assert [rank[1:6] for rank in second] == [rank[1:6] for rank in first]
    (other, _), (code, lead) = job.finish()
    assert (other, code) == (0, 0)
    assert "failed: rank 3 of 4 was killed by SIGKILL" in lead
    assert "restarting the ranks (1 of 3)" in lead


def test_the_printed_commands_are_those_that_start(job: Job) -> None:
    place = ["--nnodes", "2", "--main-address", "localhost", "--main-port", str(job.port)]
    same = ["--nproc", "1", "--start-method", "spawn"]
    command = [sys.executable, "-m", "fairlead", "launch", *place, *same, "--print-commands"]
    words = [str(job.script), str(job.folder / "a folder")]
    (job.folder / "a folder").mkdir()
    printed = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(printed) == 2
    assert f"--node-rank 1 --main-address localhost --main-port {job.port}" in printed[1]
    (job.folder / "a folder" / "finish").touch()
    nodes = [subprocess.Popen(f"exec {sys.executable} -m {one}", shell=True, cwd=job.folder) for one in printed]
    assert [node.wait(60) for node in nodes] == [0, 0]
    assert {one.name for one in (job.folder / "a folder").glob("0-*")} == {"0-0", "0-1"}


def read_until(launcher: subprocess.Popen[str], words: str) -> str:
    """The first line of a launcher with these words."""
    assert launcher.stderr is not None
    return next(line for line in launcher.stderr if words in line)


def test_a_range_goes_on_with_fewer_nodes_and_ends_as_one_below_its_least(job: Job) -> None:
    words = ("--nnodes", "2:3")
    for _ in range(3):
        job.node(0, *words)
    first = job.ranks(0, 3)
    assert sorted(int(rank[2]) for rank in first) == [3, 3, 3]
    leader = int(first[0][0])
    lead, *others = sorted(job.launchers, key=lambda launcher: _parent(leader) != launcher.pid)
    others[0].kill()
    assert [rank[2] for rank in job.ranks(1, 2)] == ["2", "2"]
    newcomer = job.node(0, *words)
    read_until(newcomer, "if the job runs already, until its ranks save or restart")
    newcomer.terminate()
    assert newcomer.wait(30) == 143  # that is no stop for those who train
    assert not any(launcher.poll() for launcher in (lead, others[1]))
    os.kill(others[1].pid, signal.SIGINT)
    codes = {launcher: (launcher.wait(30), launcher.stderr.read()) for launcher in (lead, others[1]) if launcher.stderr}
    assert [code for code, _ in codes.values()] == [130, 130]
    assert "2 nodes, 3 before: trainer.batch_policy decides" in codes[lead][1]


def test_a_run_saves_and_stops_for_a_node_that_comes(job: Job) -> None:
    job.script.write_text(ANNOUNCED + SCRIPT)
    words = ("--nnodes", "1:2", "--max-restarts", "0")
    job.node(0, *words)
    assert [rank[2] for rank in job.ranks(0, 1)] == ["1"]
    job.node(0, *words)
    assert [rank[2] for rank in job.ranks(1, 2)] == ["2", "2"]
    (code, said), (other, _) = job.finish()
    assert (code, other) == (0, 0)
    assert "has joined: the ranks save, stop, and restart with it" in said
    assert "2 nodes, 1 before: trainer.batch_policy decides" in said


def test_a_fixed_number_ends_without_a_node_and_names_it(job: Job) -> None:
    for node in (0, 1):
        job.node(node, "--nnodes", "2")
    job.ranks(0, 2)
    job.launchers[1].kill()
    (code, said), _ = job.ended()
    assert code == 1
    assert f"error: node 1 on {socket.gethostname()} lost: no other node is left" in said
    assert "again" not in said.partition("error:")[0]


def test_nodes_that_do_not_come_are_named_and_one_too_many_is_refused() -> None:
    port = free_port()

    def come(rank: int) -> str:
        node = Participant(
            "localhost",
            port,
            nodes=(3, 3),
            rank=rank,
            count=1,
            start_s=1.5,
            restarts=Restarts(0, when_saved=True),
            say=lambda text: None,
        )
        try:
            return str(node.next([]))
        except FairleadError as error:
            return error.block()
        finally:
            node.close()

    with ThreadPoolExecutor() as pool:
        first, second, twin = pool.map(come, (0, 1, 1))
    host = socket.gethostname()
    assert first.startswith("2 of 3 nodes came within 1.5 s\n  where: not heard of: node 2\n")
    assert f"there are: node 0 on {host}, node 1 on {host}" in first
    refused, told = sorted((second, twin), key=lambda text: "cannot take part" not in text)
    assert refused.startswith(f"node 1 on {host} cannot take part: node 1 on {host} is there already")
    assert told.splitlines()[:2] == first.splitlines()[:2]
    assert "read the output of node 0" in told


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_only_a_node_that_takes_part_stops_the_job() -> None:
    """Neither a connection that has not introduced itself, nor a node that came too late for this start."""
    listener = bind_listener(host="localhost")
    where = listener.getsockname()[:2]
    said = list[str]()
    restarts = Restarts(1, when_saved=True)
    job = Coordinator(listener, "localhost", nodes=(1, 2), count=1, start_s=20, restarts=restarts, say=said.append)
    same = {"least": 1, "most": 2, "count": 1}

    def connect() -> Line:
        return Line(socket.create_connection(where, timeout=20))

    def come(rank: int) -> Line:
        line = connect()
        line.send({"kind": "hello", "host": "a", "pid": rank, "rank": rank, "lead": not rank, **same})
        return line

    def hear(line: Line, kind: str) -> dict[str, Any]:
        while (messages := line.receive()) is not None:
            for message in messages:
                if message["kind"] == kind:
                    return message
        pytest.fail(f"the connection has ended without {kind}")

    stranger = connect()
    stranger.send({"kind": "stop", "signal": signal.SIGTERM})
    lead, other = come(0), come(1)
    assert hear(lead, "go")["num_nodes"] == 2
    other.close()
    hear(lead, "trouble")
    spare = come(2)
    lost = packed(RunFailedError("x"))
    spare.send({"kind": "stop", "signal": signal.SIGTERM})
    assert hear(spare, "end")["code"] == 143
    lead.send({"kind": "ended", "code": 1, "step": None, "error": lost, "first": False})
    assert hear(lead, "go")["num_nodes"] == 1
    assert "restarting the ranks (1 of 1)" in said[0]
    lead.send({"kind": "stop", "signal": signal.SIGTERM})
    lead.send({"kind": "ended", "code": 143, "step": None, "error": None, "first": True})
    assert hear(lead, "end")["code"] == 143
    for line in (stranger, lead, spare):
        line.close()
    job.close()


def test_a_late_word_on_the_last_start_does_not_end_the_next_one() -> None:
    """A node whose ranks have just ended may be told to take them down: that is not for those of the next start."""
    listener = bind_listener(host="localhost")
    node = Participant(
        "localhost",
        listener.getsockname()[1],
        nodes=(2, 2),
        rank=1,
        count=1,
        start_s=20,
        restarts=Restarts(0, when_saved=True),
        say=lambda text: None,
    )
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(node.next, [])
        lead = Line(listener.accept()[0])
        lead.send({"kind": "trouble", "why": "rank 0 failed"})
        place = {"num_nodes": 2, "node_rank": 1, "address": "localhost", "port": 1}
        lead.send({"kind": "go", **place, "start": 1, "changed": None, "why": None})
        assert not isinstance(waiting.result(20), int)
    assert node.trouble(None) is None
    lead.send({"kind": "trouble", "why": "rank 0 failed again"})
    until(lambda: node.trouble(None) == "rank 0 failed again")
    node.close()
    lead.close()
    listener.close()
