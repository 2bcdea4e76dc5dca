"""A check that hangs, crashes or raises is a failure of its own; one that is slow is not."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fairlead_diagnostics.checking import Bench, Check, Requested, Result
from fairlead_diagnostics.checks import HERE
from fairlead_diagnostics.worker import Worker


def stuck(bench: Bench) -> Result:
    bench.progress()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(3600)
    return Result(True, "never")


def slow(bench: Bench) -> Result:
    for _ in range(6):
        time.sleep(0.6)
        bench.progress()
    return Result(True, "slow but advancing")


def killed(bench: Bench) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return Result(True, "never")


def wrong(bench: Bench) -> Result:
    bench.cache["was"] = "here"
    raise OSError(5, "Input/output error")


def keeps(bench: Bench) -> Result:
    return Result(True, f"was {bench.cache.get('was')}, asked for {bench.requested.count}")


def test_checks_that_hang_crash_or_raise_and_those_behind_them() -> None:
    def check(name: str) -> Check:
        return Check(name, f"{__name__}:{name}", limit_s=3.0)

    with Worker(Requested(count=3), os.environ) as worker:
        began = time.monotonic()
        assert worker.run(check("wrong")) == Result(False, "OSError: [Errno 5] Input/output error")
        assert worker.run(check("keeps")).detail == "was here, asked for 3"
        assert worker.run(check("slow")) == Result(True, "slow but advancing")  # longer than its limit in all
        hung = worker.run(check("stuck"))
        assert (hung.ok, hung.detail) == (False, "nothing happened for 3 s, after 1 parts of it: it hangs")
        assert worker.run(check("killed")) == Result(False, "its process was killed by SIGKILL")
        assert worker.run(check("keeps")).detail == "was None, asked for 3"  # a new process
        assert time.monotonic() - began < 60


def test_a_process_that_starts_slowly_is_no_fault_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(1.5)\n")
    check = Check("keeps", f"{__name__}:keeps", limit_s=1.0)
    with Worker(Requested(count=3), {**os.environ, "PYTHONPATH": str(tmp_path)}) as worker:
        assert worker.run(check).detail == "was None, asked for 3"
    monkeypatch.setattr("fairlead_diagnostics.worker._START_S", 0.5)
    with Worker(Requested(count=3), {**os.environ, "PYTHONPATH": str(tmp_path)}) as worker:
        assert worker.run(check) == Result(False, "its process did not start within 0.5 s")


def test_a_check_that_lacks_a_folder_or_torch_is_not_made_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with Worker(Requested(), os.environ) as worker:
        said = {check.name: worker.run(check) for check in HERE if check.torch or check.folder}
    assert {result.ok for result in said.values()} == {None}
    assert said["matmul"].detail == "torch is not installed"
    assert said["write"].detail == "no run was named, so that there is no folder to look at"
