"""From `kill -9` of a rank to the first new step, and whether the first restart was enough; torchrun beside it.

Two processes on gloo train a model whose state is 100 MB (`--quick`: 1 MB), saved at every fifth step. At a random
moment of a step rank 1 is killed. `fairlead fit --max-restarts` starts the ranks again from its newest checkpoint;
torchrun (`--standalone --monitor-interval 0.1`) does so with the script of torch's own tutorial on elastic training:
DDP, and a snapshot that each start loads. Both stop 60 s after the kill: what has taken no step by then counts as
never.

Subtracted in `seconds_beyond_load` is what `torch.load` of the checkpoint's state takes, with every page touched.
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
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, Ratio, options, paired_ratio, report

STEP_S = 0.1
NEVER_S = 60.0
LIMIT_S = 300.0
OURS, PEER = "fairlead fit --max-restarts", "torchrun, torch's elastic tutorial"

NET = """
import os
import time
from pathlib import Path

import torch

WIDTH = int(os.environ["RECOVERY_WIDTH"])


def noted(rank, step):
    folder = Path(os.environ["RECOVERY_FOLDER"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        with (folder / "steps").open("a") as file:
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            file.write(f"{os.getpid()} {step} {time.time()} {restarts}\\n")
"""

MODULE = (
    NET
    + """
import lightning.pytorch as L
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch, index):
        time.sleep(float(os.environ["RECOVERY_STEP"]))
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        noted(self.global_rank, self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4096, WIDTH)), batch_size=2)
"""
)

SCRIPT = (
    NET
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
step, snapshot = 0, Path("snapshot.pt")
if snapshot.exists():
    state = torch.load(snapshot)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
model = DistributedDataParallel(net)
while True:
    time.sleep(float(os.environ["RECOVERY_STEP"]))
    optimizer.zero_grad()
    model(torch.zeros(2, WIDTH)).square().mean().backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 5 == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "snapshot.new")
        os.replace("snapshot.new", snapshot)
    noted(rank, step)
"""
)


def main() -> None:
    given = options(__doc__, rounds=20, quick=2)
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {OURS: [], PEER: []}
    loads: list[float] = []
    first: dict[str, list[int]] = {OURS: [], PEER: []}
    for turn in range(given.rounds):
        later = chance.random() * STEP_S
        for name in (OURS, PEER) if turn % 2 == 0 else (PEER, OURS):
            passed, starts, load = _trial(name, given, later)
            seconds[name].append(passed)
            first[name].append(int(starts == 2 and passed < NEVER_S))
            if name == OURS:
                loads.append(load)
    beyond = [passed - load for passed, load in zip(seconds[OURS], loads, strict=True)]
    share = statistics.mean(first[OURS])
    ratios = {
        "first_restart_share": Ratio(share, share, share),
        "seconds_beyond_load": Ratio(statistics.median(beyond), min(beyond), max(beyond), bound=1.0),
        "median_vs_torchrun": paired_ratio(seconds[OURS], seconds[PEER]),
    }
    peers = statistics.mean(first[PEER])
    raw = {**seconds, "load of the checkpoint": loads}
    report("recovery", ratios, raw, given, first_restart_share_of_torchrun=peers)


def _trial(name: str, given: Options, later: float) -> tuple[float, int, float]:
    """Seconds to the first new step, how many starts it took, and the seconds of a load."""
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        width = "512" if given.quick else "3600"  # weights and momentum of 4 bytes each
        own = {"RECOVERY_WIDTH": width, "RECOVERY_STEP": str(STEP_S), "RECOVERY_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        environ = {**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""}
        command = _ours(cwd) if name == OURS else _peer(cwd)
        with (cwd / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=cwd, env=environ, stdout=output, stderr=output, process_group=0)
            try:
                while not any(step >= 7 for _, step, _, _ in _steps(cwd)):
                    _alive(process, cwd)
                before = {pid for pid, _, _, _ in _steps(cwd)}
                time.sleep(later)
                killed = time.time()
                os.kill(int((cwd / "pid-1").read_text()), signal.SIGKILL)
                new: list[tuple[float, int]] = []
                while not new and time.time() < killed + NEVER_S and process.poll() is None:
                    time.sleep(0.005)
                    new = [(when, count) for pid, _, when, count in _steps(cwd) if pid not in before]
                ours = (cwd / "output").read_text().count("restarting the ranks")
                starts = 1 + (ours if name == OURS or not new else new[0][1])
                load = _load(cwd) if name == OURS else 0.0
            finally:
                _end(process)
        return (new[0][0] - killed if new else NEVER_S), starts, load


def _ours(cwd: Path) -> list[str]:
    job = {
        "run": {"name": "recovery"},
        "model": {"class": "net:Net"},
        "data": {"class": "net:Data"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": 100000,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "checkpoint": {"every_n_steps": 5},
        },
    }
    (cwd / "net.py").write_text(MODULE)
    (cwd / "job.yaml").write_text(json.dumps(job))
    (cwd / "pyproject.toml").touch()
    return [str(Path(sys.executable).with_name("fairlead")), "fit", "job.yaml", "--max-restarts", "10"]


def _peer(cwd: Path) -> list[str]:
    (cwd / "train.py").write_text(SCRIPT)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return [torchrun, "--standalone", "--nproc-per-node=2", "--max-restarts=10", "--monitor-interval=0.1", "train.py"]


def _load(cwd: Path) -> float:
    newest = max((cwd / "runs/recovery/checkpoints").glob("step-*/state.ckpt"))
    began = time.perf_counter()
    state = torch.load(newest, weights_only=False)
    for tensor in state["state_dict"].values():
        float(tensor.sum())
    return time.perf_counter() - began


def _steps(cwd: Path) -> list[tuple[int, int, float, int]]:
    """Process, step, time and torchrun's restarts of each step of rank 0."""
    file = cwd / "steps"
    lines = file.read_text().splitlines() if file.exists() else []
    words = [line.split() for line in lines]
    return [(int(w[0]), int(w[1]), float(w[2]), int(w[3])) for w in words if len(w) == 4]


def _alive(process: subprocess.Popen[bytes], cwd: Path) -> None:
    time.sleep(0.01)
    if process.poll() is not None:
        raise RuntimeError(f"it ended:\n{(cwd / 'output').read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
