"""The page on custom training loops, run as it stands, in processes that cannot import Lightning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fairlead_runs import read_history
from fairlead_runs.commit import Checkpoint, newest_complete

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "custom-loop.md"
LIMIT_S = 240
STEPS = "60"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shown = r"^```python title=\"train.py\"\n(.*?)^```$"
    found = re.search(shown, PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    folder = tmp_path_factory.mktemp("script")
    for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
        (folder / f"{name}.py").write_text("raise ImportError('this must work without Lightning')\n")
    path = folder / "train.py"
    path.write_text(found[1])
    return path


STARTED_BY = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "mpirun": [*("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"), sys.executable],
    "launch": [sys.executable, "-m", "fairlead", "launch", "--nproc", "2"],
}


def start(script: Path, cwd: Path, launcher: str) -> subprocess.Popen[str]:
    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*STARTED_BY[launcher], str(script), "--max-steps", STEPS],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(script.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output


def result(cwd: Path) -> tuple[dict[str, torch.Tensor], bytes]:
    newest = newest_complete(cwd / "runs/gpt/checkpoints").checkpoint
    assert newest is not None
    state = torch.load(newest.path / "state.ckpt", weights_only=True)
    return state["model"], (cwd / "runs/gpt/metrics.csv").read_bytes()


def assert_same(one: Path, other: Path) -> None:
    (weights, rows), (weights_too, rows_too) = result(one), result(other)
    assert weights.keys() == weights_too.keys()
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)
    assert rows == rows_too


def until_step(cwd: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Waits until metrics.csv has a row of that step."""
    file, deadline = cwd / "runs/gpt/metrics.csv", time.monotonic() + LIMIT_S
    while not (file.exists() and re.search(rf"^{step},", file.read_text(), re.MULTILINE)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "launcher", ["torchrun", *(pytest.param(name, marks=pytest.mark.full) for name in ("python", "mpirun", "launch"))]
)
def test_killed_and_stopped_it_ends_with_the_same_bits(script: Path, tmp_path: Path, launcher: str) -> None:
    """SIGKILL loses the steps behind the last checkpoint, and trains them again; SIGTERM to one rank loses none."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "is finished: step 60" in ended(start(script, whole, launcher))

    process = start(script, parts, launcher)
    until_step(parts, 50, process)
    while newest_complete(parts / "runs/gpt/checkpoints").checkpoint is None:  # that of the validation
        time.sleep(0.01)
    subprocess.run(["pkill", "-KILL", "-f", str(script)], check=True)  # torchrun's ranks are in sessions of their own
    process.communicate()

    process = start(script, parts, launcher)
    pids = parts / "runs/gpt/history.jsonl"
    while len([one for one in read_history(pids) if one["event"] == "training"]) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    first = next(one for one in reversed(read_history(pids)) if one["event"] == "training")
    os.kill(int(first["pid"]), signal.SIGTERM)  # rank 0; torchrun itself hears nothing
    said = ended(process)
    assert "everything is saved" in said, said
    newest = newest_complete(parts / "runs/gpt/checkpoints").checkpoint
    assert isinstance(newest, Checkpoint)
    assert newest.step >= 50

    assert "is finished: step 60" in ended(start(script, parts, launcher))
    assert_same(whole, parts)
