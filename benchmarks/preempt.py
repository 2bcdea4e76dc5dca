"""From a warning signal to the call that has the job started again: what it takes, and what is lost.

Two processes of `fairlead fit` on gloo train a model whose state is 100 MB (`--quick`: 1 MB); at a random moment of
a step the job gets SIGUSR1. What is counted: seconds until the requeuer is called, which it is only when the checkpoint
is durable, against one step, the durable save itself and one second; and the steps that were done but not saved.
Beside it plain Lightning's SLURM plugin on one process, with a FAKE `scontrol` that notes when it is called. It saves
at once, in the signal handler, and does not wait until the file is durable; on two processes its handler starts a
collective in the middle of another one, and the job mostly hangs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, Ratio, options, paired_ratio, report

STEP_S = 0.2
LIMIT_S = 300.0
OURS, PEER = "Fairlead, 2 processes", "Lightning's SLURM plugin, 1 process"

MODEL = """
import os
import time
from pathlib import Path

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

WIDTH = int(os.environ["PREEMPT_WIDTH"])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, index):
        time.sleep(float(os.environ["PREEMPT_STEP"]))
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            Path("steps").write_text(str(self.trainer.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4096, WIDTH)), batch_size=2)
"""

PEER_SCRIPT = """
import lightning.pytorch as L
from lightning.pytorch.plugins.environments import SLURMEnvironment

from net import Data, Net

trainer = L.Trainer(
    accelerator="cpu", devices=1, max_steps=100000, logger=False, enable_progress_bar=False, enable_model_summary=False,
    plugins=[SLURMEnvironment(auto_requeue=True)], enable_checkpointing=False,
)
trainer.fit(Net(), datamodule=Data())
"""

# One task of a job: where Lightning looks for SLURM.
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "preempt",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}


def main() -> None:
    given = options(__doc__, rounds=10, quick=1)
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {OURS: [], PEER: []}
    allowed: list[float] = []
    lost: list[float] = []
    for turn in range(given.rounds):
        later = chance.random() * STEP_S
        sides = [lambda at=later: _ours(given, at, lost, allowed), lambda at=later: _peer(given, at)]
        named = list(zip((OURS, PEER), sides, strict=True))
        for name, measure in named if turn % 2 == 0 else reversed(named):
            seconds[name].append(measure())
    ratios = {
        "steps_lost": Ratio(statistics.median(lost), min(lost), max(lost), bound=0.5),  # a number of steps: none
        "seconds_vs_step_plus_save": paired_ratio(seconds[OURS], allowed, bound=1.0),
        "seconds_vs_lightning": paired_ratio(seconds[OURS], seconds[PEER]),
    }
    report("preempt", ratios, {**seconds, "one step, the save and a second": allowed}, given, steps_lost=lost)


def _ours(given: Options, later: float, lost: list[float], allowed: list[float]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        _write(cwd)
        job = {
            "run": {"name": "preempt"},
            "model": {"class": "net:Net"},
            "data": {"class": "net:Data"},
            "trainer": {
                "accelerator": "cpu",
                "devices": 2,
                "max_steps": 100000,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "requeue": {"name": "command", "argv": [str(cwd / "scontrol")]},
                "checkpoint": {"every_n_epochs": None},
            },
        }
        (cwd / "job.yaml").write_text(json.dumps(job))
        (cwd / "pyproject.toml").touch()
        command = [str(Path(sys.executable).with_name("fairlead")), "fit", "job.yaml"]
        passed = _until_requeued(command, cwd, _environ(given, cwd), later, ends_by_itself=True)
        events = [json.loads(line) for line in (cwd / "runs/preempt/history.jsonl").read_text().splitlines()]
        saved = next(event for event in reversed(events) if event["event"] == "checkpoint")
        lost.append(int((cwd / "steps").read_text()) - saved["step"])
        allowed.append(STEP_S + saved["seconds"] + 1.0)
        return passed


def _peer(given: Options, later: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        _write(cwd)
        (cwd / "peer.py").write_text(PEER_SCRIPT)
        environ = {**_environ(given, cwd), **SLURM}
        return _until_requeued([sys.executable, "peer.py"], cwd, environ, later, ends_by_itself=False)


def _write(cwd: Path) -> None:
    (cwd / "net.py").write_text(MODEL)
    fake = cwd / "scontrol"  # FAKE: notes when it is called
    fake.write_text(f"#!/bin/sh\ndate +%s.%N > {cwd}/requeued.new && mv {cwd}/requeued.new {cwd}/requeued\n")
    fake.chmod(0o755)


def _environ(given: Options, cwd: Path) -> dict[str, str]:
    width = "512" if given.quick else "3600"  # weights and momentum of 4 bytes each
    path = f"{cwd}{os.pathsep}{os.environ['PATH']}"
    own = {"PREEMPT_WIDTH": width, "PREEMPT_STEP": str(STEP_S), "OMP_NUM_THREADS": "1", "PATH": path}
    return {**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""}


def _until_requeued(
    command: list[str], cwd: Path, environ: Mapping[str, str], later: float, *, ends_by_itself: bool
) -> float:
    """Seconds from the signal to the requeue."""
    with (cwd / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=dict(environ), stdout=output, stderr=output)
        try:
            _wait(lambda: _steps(cwd) >= 5, process, cwd)
            time.sleep(later)
            asked = time.time()
            process.send_signal(signal.SIGUSR1)
            _wait(lambda: (cwd / "requeued").exists(), None if ends_by_itself else process, cwd)
            if ends_by_itself:
                process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
    return float((cwd / "requeued").read_text()) - asked


def _steps(cwd: Path) -> int:
    file = cwd / "steps"
    text = file.read_text() if file.exists() else ""
    return int(text or 0)


def _wait(there: Callable[[], Any], process: subprocess.Popen[bytes] | None, cwd: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"{'it ended' if ended else 'nothing came'}:\n{(cwd / 'output').read_text()[-4000:]}")
        time.sleep(0.005)


if __name__ == "__main__":
    main()
