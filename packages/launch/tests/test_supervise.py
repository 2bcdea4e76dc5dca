"""Ranks that really run, fail, hang and are asked to stop."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from fairlead.errors import RunFailedError
from fairlead_launch import rank_environment, spawn, supervise
from fairlead_launch.processes import Starter
from fairlead_launch.supervise import is_left

RANK = """
import os, signal, sys, time
from pathlib import Path
from fairlead_launch import send_report, watch_supervisor
watch_supervisor(os.environ)
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
"""


def ranks(count: int) -> list[dict[str, str]]:
    return [
        rank_environment(
            os.environ,
            local_rank=n,
            devices=count,
            num_nodes=1,
            node_rank=0,
            address="127.0.0.1",
            port=29500,
            threads=1,
        )
        for n in range(count)
    ]


def command(code: str, folder: Path) -> Starter:
    return spawn([sys.executable, "-c", RANK + textwrap.dedent(code), str(folder)])


def is_running(folder: Path, rank: int) -> bool:
    try:
        os.kill(int((folder / f"pid-{rank}").read_text()), 0)
    except (ProcessLookupError, FileNotFoundError):  # ended, or ended before it could write its number
        return False
    return True


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    code = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "OMP_NUM_THREADS")
    (folder / str(rank)).write_text(" ".join(os.environ[name] for name in names))
    """
    environments = [{**e, "OMP_NUM_THREADS": "1"} for e in ranks(2)]
    assert supervise(command(code, tmp_path), environments, stderr=io.StringIO()) == 0
    assert [(tmp_path / str(n)).read_text() for n in range(2)] == ["0 0 2 2 0 1 1", "1 1 2 2 0 1 1"]


@pytest.mark.parametrize("recorded", [True, False])
def test_ranks_that_only_lost_one_of_another_node_are_not_blamed(tmp_path: Path, recorded: bool) -> None:
    history = tmp_path / "history.jsonl"
    lines = [{"event": "start"}, *([{"event": "failed", "rank": 7, "host": "n2", "error": "no luck"}] * recorded)]
    history.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code = """
    from fairlead_launch import announce_run
    announce_run(os.environ, folder, 1)
    send_report(os.environ, "RuntimeError: Connection closed by peer", 1, lost_a_peer=True)
    sys.exit(1)
    """
    with pytest.raises(RunFailedError, match="a rank of another node failed first") as caught:
        supervise(command(code, tmp_path), ranks(2), stderr=io.StringIO())
    said = caught.value.block()
    assert ("rank 7 on n2: no luck" if recorded else "exited without an error report") in said
    assert "Connection" not in said
    assert len(history.read_text().splitlines()) == len(lines)


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit()", "sys.exit(0)"])
def test_a_rank_that_leaves_with_code_0_is_named(tmp_path: Path, leave: str) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text('{"event": "start", "start": 1}\n')
    code = f"""
    from fairlead_launch import announce_run
    announce_run(os.environ, folder, 1)
    if rank == 1:
        (folder / "leaves").touch()
        {leave}
    while not (folder / "leaves").exists():
        time.sleep(0.05)
    time.sleep(1)
    send_report(os.environ, "RuntimeError: Connection closed by peer", 1, lost_a_peer=True)
    sys.exit(1)
    """
    with pytest.raises(RunFailedError, match="rank 1 of 2 exited with code 0 before the end of the job") as caught:
        supervise(command(code, tmp_path), ranks(2), stderr=io.StringIO())
    assert "os._exit() or sys.exit()" in caught.value.block()
    assert "another node" not in caught.value.block()
    (_, failed) = map(json.loads, history.read_text().splitlines())
    assert (failed["event"], failed["rank"]) == ("failed", 1)


def test_the_rank_that_failed_first_is_named_and_none_is_left(tmp_path: Path) -> None:
    code = """
    if rank == 1:
        send_report(os.environ, "ValueError: no luck", 1)
        sys.exit(1)
    time.sleep(600)
    """
    with pytest.raises(RunFailedError, match="rank 1 of 3 failed") as caught:
        supervise(command(code, tmp_path), ranks(3), stderr=io.StringIO())
    assert "no luck" in str(caught.value)
    assert not any(is_running(tmp_path, rank) for rank in range(3))


def test_an_error_that_does_not_fit_into_the_pipe_arrives_whole(tmp_path: Path) -> None:
    code = """
    send_report(os.environ, "\N{FOUR LEAF CLOVER}" * 7_900 + " luck", 1)  # 12 bytes each as a message, of 64 KiB
    sys.exit(1)
    """
    with pytest.raises(RunFailedError, match="rank 0 of 1 failed") as caught:
        supervise(command(code, tmp_path), ranks(1), stderr=io.StringIO())
    assert caught.value.why == "\N{FOUR LEAF CLOVER}" * 7_900 + " luck"


def test_a_killed_rank_takes_the_others_down(tmp_path: Path) -> None:
    code = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    with pytest.raises(RunFailedError, match=r"rank 0 of 2 .*SIGKILL"):
        supervise(command(code, tmp_path), ranks(2), stderr=io.StringIO())
    assert not is_running(tmp_path, 1)


def test_what_has_ended_is_not_left_though_nobody_reaps_it() -> None:
    """As in a container, where the orphans' new parent is no `init`: no restart waits for them."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"], process_group=0)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    lives = subprocess.Popen(["sleep", "60"], process_group=0)
    try:
        assert not is_left(ended.pid)
        assert is_left(lives.pid)
    finally:
        lives.kill()
        lives.wait()
        ended.wait()


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    """They stop in order; as none of them had a run yet, nothing is lost and no start is wanted."""
    code = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / f"ready-{rank}").touch()
    time.sleep(600)
    """

    def stop() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all((tmp_path / f"ready-{n}").exists() for n in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    shown = io.StringIO()
    assert supervise(command(code, tmp_path), ranks(2), stderr=shown) == 143
    thread.join()
    assert "before it began" in shown.getvalue()


def test_ranks_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "supervisor.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_supervise as t\nfrom pathlib import Path\n"
        f"t.supervise(t.command('time.sleep(600)', Path({str(tmp_path)!r})), t.ranks(2), stderr=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, str(program)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all((tmp_path / f"pid-{n}").exists() for n in range(2)):
        time.sleep(0.05)
    time.sleep(0.2)
    process.kill()
    process.wait()
    while any(is_running(tmp_path, n) for n in range(2)):
        assert time.monotonic() < deadline, "a rank outlived its supervisor"
        time.sleep(0.05)
