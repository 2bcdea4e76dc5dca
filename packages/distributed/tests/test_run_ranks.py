from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_distributed import (
    RankFailedError,
    RendezvousError,
    all_reduce,
    get_distributed_info,
    init_process_group,
    startup_lines,
    testing,
)
from fairlead_distributed.testing import run_ranks


@dataclass
class Answer:
    """Of this file, which is not importable by name in the processes."""

    total: int
    pid: int


def total(rank: int, answer: Answer) -> tuple[Answer, dict[str, object], list[str]]:
    with pytest.raises(UserWarning):  # an error in this test run, so in the ranks too
        warnings.warn("seen", stacklevel=1)
    summed = Answer(int(all_reduce(torch.tensor(rank + answer.total)).item()), os.getpid())
    return summed, dict(get_distributed_info()), startup_lines()


def test_results_come_by_rank_from_processes_that_are_gone() -> None:
    """The real backend's name, and the lines of a start."""
    got = run_ranks(total, 2, Answer(10, 0))
    assert [one.total for one, _, _ in got] == [21, 21]
    assert [info for _, info, _ in got] == [
        {"available": True, "initialized": True, "world_size": 2, "rank": rank, "backend": "gloo"} for rank in (0, 1)
    ]
    lines = got[0][2]
    assert lines[0] == "Distributed training initialized: gloo backend, 2 processes"
    assert lines[1].startswith("Master: 127.0.0.1:")
    assert lines[2] == "[Rank 0] local rank 0, world size 2"
    assert got[1][2] == ["[Rank 1] local rank 1, world size 2"]
    for one, _, _ in got:
        with pytest.raises(ProcessLookupError):
            os.kill(one.pid, 0)


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    all_reduce(torch.ones(1))


def one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(torch.ones(1))


def one_hangs(rank: int, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    if rank == 0:
        all_reduce(torch.ones(1))
    else:
        wait_for_ever()


def wait_for_ever() -> None:
    while True:
        time.sleep(0.05)


def test_the_rank_that_raised_comes_first() -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: the reason") as caught:
        run_ranks(one_raises, 2)
    assert caught.value.rank == 1
    assert "in one_raises" in str(caught.value)


def refused(rank: int) -> None:
    raise RendezvousError(f"rank {rank} was refused", why="the port is closed", fix="open it")


def test_an_error_is_named_by_what_it_says_not_by_its_last_hint() -> None:
    with pytest.raises(
        RankFailedError, match=r"rank \d of 2 failed: .*RendezvousError: rank \d was refused\n"
    ) as caught:
        run_ranks(refused, 2)
    assert "do:    open it" in str(caught.value)


class Late:
    """An argument that keeps rank 1 from being connected for a second: it is unpickled before that."""

    def __reduce__(self) -> tuple[Callable[[], list[float]], tuple[()]]:
        return connect_late, ()


def connect_late() -> list[float]:
    connect, connected = init_process_group, list[float]()

    def late(*args: Any, **options: Any) -> None:
        connect(*args, **options)
        if os.environ["RANK"] == "1":
            time.sleep(1)
        connected.append(time.monotonic())

    vars(testing)["init_process_group"] = late
    return connected


def times(rank: int, connected: list[float]) -> tuple[float, float]:
    return connected[0], time.monotonic()


def test_no_rank_begins_before_all_are_connected() -> None:
    """One that is done at once would leave while another still connects to it."""
    (early, begun), (late, _) = run_ranks(times, 2, Late())
    assert early < late <= begun


def test_a_killed_rank_is_named_before_those_that_missed_it() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed.*SIGKILL") as caught:
        run_ranks(one_dies, 2)
    assert caught.value.rank == 1


def test_a_hang_ends_with_the_place_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="not done after 6 s") as caught:
        run_ranks(one_hangs, 2, str(tmp_path), timeout=6)
    assert "in wait_for_ever" in str(caught.value)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.full
def test_the_processes_end_with_a_killed_caller(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from fairlead_distributed.testing import run_ranks\n"
        "def stay(rank, folder):\n"
        "    Path(folder, f'pid{os.getpid()}').touch()\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(stay, 2, sys.argv[1], timeout=600)\n"
    )
    caller = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    while len(pids := [int(path.name[3:]) for path in tmp_path.glob("pid*")]) < 2:
        assert caller.poll() is None
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    give_up = time.monotonic() + 20
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]:
        assert time.monotonic() < give_up, f"still alive: {alive}"
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
