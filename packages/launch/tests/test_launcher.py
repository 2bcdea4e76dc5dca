"""`fairlead launch` with real processes of plain Python scripts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from fairlead_launch.launcher import launch_distributed_training
from fairlead_launch.ports import HeldPort
from fairlead_launch.settings import LaunchConfig
from fairlead_launch.supervise import is_left
from fairlead_runs.waiting import parse_ranks

LIMIT_S = 120.0


def write(folder: Path, code: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text("import os, sys, time\n" + textwrap.dedent(code))
    return path


def launch(folder: Path, *words: str, module: str = "fairlead", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *(["launch"] if module == "fairlead" else []), *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "SLURM", "OMP"))}
    return subprocess.run(
        command, cwd=folder, env={**kept, **environ}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def said(shown: str) -> dict[str, set[int]]:
    """Which ranks have said a line; how many of them are shown together depends on when they did."""
    found: dict[str, set[int]] = {}
    for line in shown.splitlines():
        ranks, _, text = line.removeprefix("[rank").lstrip("s").partition("] ")
        found.setdefault(text, set()).update(parse_ranks(ranks))
    return found


@pytest.mark.parametrize("method", ["fork-server", "spawn"])
def test_a_script_runs_on_all_processes_with_its_own_arguments(tmp_path: Path, method: str) -> None:
    write(
        tmp_path,
        """
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NODE_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
        print(*(os.environ[name] for name in names), __name__, os.path.basename(sys.argv[0]), sys.argv[1:])
        print("rank", os.environ["RANK"], "local", os.environ["LOCAL_RANK"], file=sys.stderr)
        """,
    )
    words = (
        "--nproc",
        "3",
        "--start-method",
        method,
        "--main-address",
        "localhost",
        "train.py",
        "--debug",
        "--nproc",
        "x",
    )
    ended = launch(tmp_path, *words, OMP_NUM_THREADS="2")
    assert (ended.returncode, ended.stderr.count("\n")) == (0, 1), ended.stderr
    assert "3 processes on 1 node (3 each: --nproc), Master: localhost:" in ended.stderr
    assert said(ended.stdout) == {
        "3 3 1 0 localhost 2 __main__ train.py ['--debug', '--nproc', 'x']": {0, 1, 2},
        **{f"rank {n} local {n}": {n} for n in range(3)},
    }
    lines = (tmp_path / "logs" / "rank-00002.log").read_text().splitlines()
    assert [line[19:].partition("]")[2] for line in lines] == [
        " INFO: 3 3 1 0 localhost 2 __main__ train.py ['--debug', '--nproc', 'x']",
        " WARNING: rank 2 local 2",
    ]
    assert "[Rank 2]" in lines[0]
    assert lines[0].startswith("20")


def test_the_spellings_of_other_launchers(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    write(tmp_path / "pack", "print(os.environ['WORLD_SIZE'], sys.argv[1:])", "__main__.py")
    write(tmp_path, "print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    behind = ("--nproc_per_node=2", "--nnodes=1", "--node_rank=0", "--master_addr=localhost", "--backend=gloo")
    for words, says in (
        (("train.py", *behind, "--", "--epochs", "3"), "['--epochs', '3']"),
        (("train.py", "--epochs", "3", *behind), "['--epochs', '3']"),
    ):
        ended = launch(tmp_path, *words, module="fairlead.launcher")
        assert (ended.returncode, said(ended.stdout)) == (0, {f"2 {says}": {0, 1}}), ended.stderr
    ended = launch(tmp_path, "--nproc-per-node", "2", "-m", "pack", "-x")
    assert (ended.returncode, said(ended.stdout)) == (0, {"2 ['-x']": {0, 1}}), ended.stderr
    ended = launch(tmp_path, "train.py", "--nprok_per_node=2", "--", module="fairlead.launcher")
    assert (ended.returncode, "unknown option '--nprok_per_node=2'" in ended.stderr) == (2, True)


def test_a_killed_process_is_followed_by_a_whole_new_group(tmp_path: Path) -> None:
    """The first restart is enough, and nobody is left."""
    write(
        tmp_path,
        """
        from pathlib import Path
        rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        Path(f"pid-{rank}-{start}").write_text(str(os.getpid()))
        while not all(Path(f"pid-{n}-{start}").exists() for n in range(3)):
            time.sleep(0.01)
        if start == "0":
            if rank == "1":
                os.kill(os.getpid(), 9)
            os.system("sleep 300 &")
            time.sleep(300)
        print("went on")
        """,
    )
    began = time.monotonic()
    ended = launch(tmp_path, "--nproc", "3", "train.py")
    assert (ended.returncode, said(ended.stdout)) == (0, {"went on": {0, 1, 2}}), ended.stderr
    assert "rank 1 of 3 was killed by SIGKILL" in ended.stderr
    assert ended.stderr.count("restarting the ranks (1 of 3)") == 1
    assert time.monotonic() - began < 60
    groups = [int((tmp_path / f"pid-{rank}-0").read_text()) for rank in range(3)]
    assert not any(map(is_left, groups))  # with the `sleep` that each has started


def test_a_failure_that_comes_again_ends_it_with_its_cause(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        def helper():
            raise ValueError("no luck")
        if os.environ["RANK"] == "1":
            helper()
        time.sleep(300)
        """,
    )
    ended = launch(tmp_path, "--nproc", "2", "--max-restarts", "9", "train.py")
    assert ended.returncode == 1
    assert ended.stderr.count("restarting the ranks") == 2
    error = ended.stderr[ended.stderr.index("\nerror:") :]
    assert "rank 1 of 2 failed" in error
    assert "in helper" in error
    assert "ValueError: no luck" in error
    assert "fairlead_launch" not in error  # only the user's frames
    assert "the same failure 3 times: another restart would not help" in error
    assert "ValueError: no luck" in (tmp_path / "logs" / "rank-00001.log").read_text()
    once = launch(tmp_path, "--nproc", "2", "--max-restarts", "0", "train.py")
    assert (once.returncode, "starting" in once.stderr) == (1, False)


def test_a_script_that_ends_itself_at_the_same_place_is_known_too(tmp_path: Path) -> None:
    """Whatever it prints before; what it was told to end with by an argument parser as well."""
    write(
        tmp_path,
        """
        print(time.time())
        if os.environ["RANK"] == "0":
            sys.exit(3)
        time.sleep(300)
        """,
    )
    ended = launch(tmp_path, "--nproc", "2", "--max-restarts", "9", "train.py")
    assert ended.returncode == 1
    assert ended.stderr.count("restarting the ranks") == 2
    assert "SystemExit: sys.exit(3) at train.py:5, in <module>" in ended.stderr
    assert "the same failure 3 times" in ended.stderr


def test_two_launches_at_one_moment_have_a_port_each() -> None:
    """Held from its choice until rank 0 listens there, as torch's store and this server do."""
    one, other, third = (HeldPort() for _ in range(3))
    candidates = range(29500, 29700)
    with closing(one), closing(other), closing(third):
        ports = [one.hold(candidates), other.hold(candidates)]
        assert len(set(ports)) == 2
        for port in ports:
            with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True) as rank_0:
                socket.create_connection(("127.0.0.1", port)).close()
                assert rank_0.getsockname()[1] == port
                assert third.hold(candidates) not in ports


def test_a_stop_with_everything_saved_is_no_failure(tmp_path: Path) -> None:
    """Ranks that end with 75 are started again without using up a restart, unless the launcher was asked to stop."""
    write(
        tmp_path,
        """
        import signal
        from pathlib import Path
        rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
        from fairlead_launch import announce_run
        from fairlead_runs import Heartbeat, heartbeat_path
        run = Path("run")
        beat = Heartbeat(heartbeat_path(run / "heartbeats", 0), int(rank), int(rank), start=1 + int(start))
        beat.beat("train", 10 * int(start))
        beat.close()
        announce_run(os.environ, run.absolute(), 1 + int(start))
        Path(f"ready-{rank}-{start}").touch()
        while start == "2":
            time.sleep(0.01)
        sys.exit(75)
        """,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "fairlead", "launch", "--nproc", "2", "--max-restarts", "0", "train.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while not all((tmp_path / f"ready-{rank}-2").exists() for rank in range(2)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    assert said.count("the ranks have saved and request a restart") == 2
    assert (tmp_path / "run" / "logs" / "rank-00001.log").exists()  # where the run is, not here
    assert not (tmp_path / "logs").exists()


def test_in_a_schedulers_job_another_start_is_for_the_scheduler(tmp_path: Path) -> None:
    write(tmp_path, "sys.exit(75)")
    ended = launch(tmp_path, "--nproc", "2", "train.py", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1")
    assert (ended.returncode, "restarting the ranks" in ended.stderr) == (75, False), ended.stderr


def test_what_cannot_be_forked_is_said_and_imported_by_each(tmp_path: Path) -> None:
    write(tmp_path, "import threading\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "mine.py")
    write(tmp_path, "me = os.environ.get('LOCAL_RANK')", "asks.py")
    for module, why in (("mine", "importing mine starts 1 thread"), ("asks", "asks reads LOCAL_RANK")):
        (tmp_path / "train.py").write_text(f"import {module}\nprint(getattr({module}, 'me', 'x'))\n")
        ended = launch(tmp_path, "--nproc", "2", "train.py")
        assert ended.returncode == 0
        assert why in ended.stderr
        assert said(ended.stdout) == ({"x": {0, 1}} if module == "mine" else {"0": {0}, "1": {1}})


def test_processes_that_never_come_are_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        from fairlead_launch.reports import say_joining
        if os.environ["RANK"] != "1":
            say_joining(os.environ)
        print("still loading")
        time.sleep(300)
        """,
    )
    ended = launch(tmp_path, "--nproc", "3", "--start-timeout", "0.5", "--max-restarts", "0", "train.py")
    assert ended.returncode == 1
    assert "rank 1 of 3 did not come to the process group within 0.5 s of the first one" in ended.stderr
    assert "still loading" in ended.stderr


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sys.exit(int(sys.argv[2]))")
    assert launch_distributed_training("train.py", "--code", "0", nproc_per_node=2, nnodes=1, backend="gloo") == 0
    assert launch_distributed_training("train.py", "--code", "3", nproc_per_node=2, max_restarts=0) == 1
    assert "SystemExit: sys.exit(3) at train.py:" in capfd.readouterr().err
    assert launch_distributed_training("none.py", nproc_per_node=2) == 2
    assert "there is no script 'none.py'" in capfd.readouterr().err


def test_the_config_has_the_documented_defaults_and_refuses_what_is_wrong() -> None:
    config = LaunchConfig()
    assert (config.max_restarts, config.monitor_interval, config.start_timeout, config.log_dir) == (3, 1.0, 600.0, None)
    assert LaunchConfig(nnodes="2:4").nodes == (2, 4)
    for wrong in (
        {"nproc_per_node": 0},
        {"nnodes": "4:2"},
        {"master_port": 70000},
        {"max_restarts": -1},
        {"tail": "a"},
    ):
        with pytest.raises(ValidationError):
            LaunchConfig(**wrong)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.py",), "there is no script 'none.py'"),
        (("--nproc", "0", "train.py"), "--nproc 0: Input should be greater than 0, or 'auto' or 'gpu'"),
        (("--nproc", "gpu", "train.py"), "there is no GPU on this machine"),
        (("--nnodes", "x", "train.py"), "--nnodes x: 'x' is neither a number of nodes nor a range such as '2:4'"),
        (("--tail", "first", "train.py"), "'first' names no ranks: write them as 0,4-7"),
        ((), "the following arguments are required: SCRIPT"),
    ],
)
def test_a_wrong_call_is_an_error_of_the_call(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    write(tmp_path, "")
    ended = launch(tmp_path, *words)
    assert ended.returncode == 2
    assert says in ended.stderr
