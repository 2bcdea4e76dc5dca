from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead_launch.forked_child import run_python
from fairlead_launch.forkserver import ForkServer, shared, start_variables

SCRIPT = """
import json, os, random, signal, sys, threading, numpy, torch
with open("/proc/self/environ") as file:
    shown = dict(one.split("=", 1) for one in file.read().split("\\0") if one)
json.dump({
    "shown": shown, "environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "name": __name__,
    "main": sys.modules["__main__"].__file__, "path": sys.path[0], "group": os.getpgid(0), "pid": os.getpid(),
    "threads": [len(os.listdir("/proc/self/task")), torch.get_num_threads()],
    "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "stdin": sys.stdin.read(), "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "random": [random.random(), float(numpy.random.rand())], "torch": torch.initial_seed(),
    "mine": any(name.startswith(("pytest", "test_")) for name in sys.modules),
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["torch", "numpy", "no_such_module"])
    yield server
    server.close()
    assert not server.alive()


def test_a_forked_process_is_as_a_fresh_one(server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    seen = []
    for number in range(2):
        with (tmp_path / f"out{number}").open("w+") as out:
            environ = {"NUMBER": str(number), "OMP_NUM_THREADS": str(number + 1), "PATH": "/bin"}
            process = server.start(
                run_python, str(script), "a b", environ=environ, cwd=tmp_path, fds={1: out.fileno(), 7: out.fileno()}
            )
            assert process.wait(60) == 0
            out.seek(0)
            one = json.load(out)
        assert one["shown"] == one["environ"] == environ
        assert one["argv"] == [str(script), "a b"]
        assert (one["cwd"], one["path"], one["main"], one["name"]) == (
            str(tmp_path),
            str(tmp_path),
            str(script),
            "__main__",
        )
        assert one["group"] == one["pid"] == process.pid
        assert one["threads"] in ([1, 1], [3, 2])  # one of torch and one of numpy beside the main thread
        assert one["files"] == [0, 1, 2, 7]
        assert (one["stdin"], one["interrupt"], one["mine"]) == ("", True, False)
        seen.append(one)
    assert seen[0]["random"][0] != seen[1]["random"][0]
    assert seen[0]["random"][1] != seen[1]["random"][1]
    assert seen[0]["torch"] != seen[1]["torch"]


@pytest.mark.parametrize(
    ("code", "exits"),
    [("raise SystemExit(75)", 75), ("1 / 0", 1), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_it_ends_as_an_interpreter_does(server: ForkServer, tmp_path: Path, code: str, exits: int) -> None:
    script, err = tmp_path / "script.py", tmp_path / "err"
    script.write_text(f"import atexit\natexit.register(print, 'bye', flush=True)\n{code}\n")
    with (tmp_path / "out").open("w") as out, err.open("w") as errors:
        process = server.start(run_python, str(script), fds={1: out.fileno(), 2: errors.fileno()})
        assert process.wait(60) == process.poll() == process.returncode == exits
    assert (tmp_path / "out").read_text() == ("bye\n" if exits > 0 else "")
    assert ("ZeroDivisionError" in err.read_text()) == (exits == 1)


def test_waiting_has_a_limit_and_a_kill_takes_the_group(server: ForkServer) -> None:
    process = server.start(time.sleep, 600)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert process.poll() is None
    process.kill_group()
    assert process.returncode == -signal.SIGKILL


def test_what_an_interpreter_reads_when_it_starts_has_a_server_of_its_own() -> None:
    one = {**os.environ, "PYTHONHASHSEED": "1", "ANY": "thing"}
    assert start_variables(one) != start_variables(os.environ)
    assert ("ANY", "thing") not in start_variables(one)
    first = shared(one, ["json"])
    assert first is shared({**one, "ANY": "other"}, ["json"])
    assert first is not shared({**one, "PYTHONHASHSEED": "2"}, ["json"])
    assert first.start(sys.exit, hash("text") * 0, environ=one).wait(60) == 0
    first.close()
    assert shared(one, ["json"]) is not first


def test_a_server_that_has_ended_says_so() -> None:
    server = ForkServer()
    server.close()
    with pytest.raises((RuntimeError, OSError)):
        server.start(print)


def test_a_lent_server_that_was_killed_is_known_to_be_gone(tmp_path: Path) -> None:
    server = ForkServer()
    lent = ForkServer(connection=server.lend())
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.getppid(), flush=True)\n")
    with (tmp_path / "out").open("w") as out:
        assert lent.start(run_python, str(script), fds={1: out.fileno()}).wait(60) == 0
    assert lent.alive()
    os.kill(int((tmp_path / "out").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while lent.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.alive()
    lent.close()
    server.close()


NANOBIND = """
import atexit, gc, sys, types

class Builder:  # as nanobind makes it: its metaclass is of the module `nanobind`
    pass

kind = type("nb_type_0", (type,), {"__module__": "nanobind"})
binding = types.ModuleType("triton._C.libtriton")
binding.ir = types.SimpleNamespace(builder=kind("Builder", (), {}) if {NANOBIND} else Builder)
sys.modules["triton._C.libtriton"] = binding
import fairlead_launch.forkserver as server
atexit.register(lambda: print(gc.get_freeze_count() > 0))
atexit.register(server.thaw_for_nanobind)
gc.freeze()
"""


@pytest.mark.parametrize("nanobind", [True, False])
def test_what_is_frozen_is_freed_where_nanobind_would_call_it_leaked(nanobind: bool) -> None:
    """With torch 2.15 each rank printed thirty lines of triton's; freeing takes time, so only there."""
    source = NANOBIND.replace("{NANOBIND}", str(nanobind))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == f"{not nanobind}\n"
