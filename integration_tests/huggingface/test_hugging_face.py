"""The page on Hugging Face's Trainer, run as it stands, in processes that cannot import Lightning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "hugging-face.md"
LIMIT_S = 300


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's `train.py`, with steps slow enough to be stopped in between."""
    found = re.search(r'```python title="train.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    text = found[1].replace('        return {"loss"', '        time.sleep(0.02)\n        return {"loss"', 1)
    path = tmp_path / "train.py"
    path.write_text("import pathlib, time\n" + text.replace("def main() -> None:\n", _SHOW_RANK, 1), encoding="utf-8")
    return path


_SHOW_RANK = """def main() -> None:
    pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
"""


def torchrun(script: Path, cwd: Path, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    cwd.mkdir(exist_ok=True)
    blocked = cwd / "blocked"
    blocked.mkdir(exist_ok=True)
    for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
        (blocked / f"{name}.py").write_text("raise ImportError('this must work without Lightning')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    own = {"PYTHONPATH": str(blocked), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **own, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    return output


def weights(cwd: Path) -> bytes:
    return (cwd / "runs" / "line" / "model" / "model.safetensors").read_bytes()


def test_a_signal_to_one_rank_stops_all_and_nothing_is_lost(script: Path, tmp_path: Path) -> None:
    """Saved at the step of the signal, asked to be started again, and the weights of an undisturbed run."""
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    first = torchrun(script, undisturbed, {})
    output = ended(first)
    assert first.returncode == 0, output

    scripts = tmp_path / "scripts"
    second = torchrun(script, stopped, {"NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR": str(scripts), "SLURM_JOB_ID": "17"})
    deadline = time.monotonic() + LIMIT_S
    while not (stopped / "runs" / "line" / "checkpoint-50").exists():
        assert second.poll() is None, second.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(int((stopped / "pid-1").read_text()), signal.SIGUSR1)
    output = ended(second)
    assert "exitcode  : 75" in output, output
    assert "exec scontrol requeue" in (scripts / "requeue_17.sh").read_text(), output
    steps = sorted(int(path.name.split("-")[1]) for path in (stopped / "runs" / "line").glob("checkpoint-*"))
    assert 50 < steps[-1] < 200
    assert steps[-1] % 50, "saved where it was stopped, not where a save was due"

    third = torchrun(script, stopped, {})
    output = ended(third)
    assert third.returncode == 0, output
    assert weights(stopped) == weights(undisturbed)
