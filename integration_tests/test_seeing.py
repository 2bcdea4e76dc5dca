"""What a user sees of a run while it trains, hangs or is over: step times, `doctor --run`, `top` and `report`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead_runs.goodput import goodput
from fairlead_runs.heartbeat import read_heartbeats
from fairlead_runs.step_times import STEP_PARTS, RankTimes, read_times

LIMIT_S = 120.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

LOOP = """
import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Run
from fairlead_distributed import process_group

HOW = sys.argv[1]


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        if HOW == "slow" and os.environ["RANK"] == "1":
            time.sleep(0.03)
        return self.layer(x)


class Data(TensorDataset):
    def __getitem__(self, index):
        if HOW == "data":
            time.sleep(0.002)
        return super().__getitem__(index)


def stand_for_ever():
    time.sleep(3600)


with process_group():
    torch.manual_seed(0)
    model = DDP(Slow())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Data(torch.randn(4000, 8)), batch_size=8, shuffle=True)
    with Run("runs/loop", model=model, optimizer=optimizer, max_steps=60, check_samples=False) as run:
        run.restore()
        for (x,) in run.batches(loader):
            if HOW == "hang" and run.steps == 20 and os.environ["RANK"] == "1":
                stand_for_ever()
            if HOW == "long":
                time.sleep(1.0)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            if run.due(every=20):
                with run.phase("validate"):
                    time.sleep(0.1)
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(LOOP)
    return subprocess.Popen(
        [*TORCHRUN, "train.py", how],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def trained(folder: Path, how: str) -> list[RankTimes]:
    process = start(folder, how)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return read_times(folder / "runs/loop", 1)


def fairlead(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    trained(folder, "slow")
    return folder


def test_a_slow_rank_is_named_and_the_other_one_waits_for_its_gradients(slow_rank: Path) -> None:
    fast, slow = read_times(slow_rank / "runs/loop", 1)
    assert fast.steps == slow.steps == 59
    assert fast.facts["comm_bytes"] == 72 * 4  # the parameters of a layer of 8 by 8
    assert fast.shares["communication"] > 0.5
    assert slow.shares.get("communication", 0.0) < 0.3
    assert slow.own_s is not None
    assert fast.own_s is not None
    assert slow.own_s > 3 * fast.own_s
    for one in (fast, slow):
        assert 0.3 <= one.seconds["validate"] < 1.0
    shown = fairlead(slow_rank, "doctor", "--run", "loop")
    assert shown.returncode == 0, shown.stderr
    assert "warning[slow-rank]: the others wait for 1 slow rank: rank 1" in shown.stdout


def test_the_time_of_a_run_is_the_sum_of_its_parts(slow_rank: Path) -> None:
    went = goodput(slow_rank / "runs/loop")
    (only,) = went.starts
    assert went.total_s == pytest.approx(only.ended - only.began, abs=0.01)
    assert went.share is not None
    assert 0.1 < went.share < 1.0


def test_top_shows_one_view_where_there_is_no_terminal(slow_rank: Path) -> None:
    shown = fairlead(slow_rank, "top", "loop")
    assert shown.returncode == 0, shown.stderr
    for text in ("loop: finished", "goodput", "data wait", "loss", "rank 1"):
        assert text in shown.stdout


def test_a_loader_that_is_waited_for_is_a_finding(tmp_path: Path) -> None:
    for one in trained(tmp_path, "data"):
        assert one.shares["data"] > 0.5
        assert one.facts["workers"] == 0.0
    shown = fairlead(tmp_path, "doctor", "--run", "loop", "--json")
    (found,) = [one for one in json.loads(shown.stdout)["found"] if one["code"] == "data-wait"]
    assert "0 workers a rank, pinned memory off" in found["why"]
    assert "num_workers=4" in found["do"]
    assert found["row"] == "the training waits for data"


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Path, list[subprocess.Popen[str]]]]:
    processes: list[subprocess.Popen[str]] = []
    yield tmp_path, processes
    for one in processes:
        subprocess.run(["pkill", "-KILL", "-f", f"{tmp_path}|train.py (hang|long)"], check=False)
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        one.communicate()


def until_still(run: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while sum(bool(beat.location) for beat in read_heartbeats(run / "heartbeats")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(4.0)  # a rank is called late after ten seconds


def test_a_hang_is_explained_with_the_line_of_the_rank_that_is_waited_for(
    loop: tuple[Path, list[subprocess.Popen[str]]],
) -> None:
    folder, processes = loop
    processes.append(start(folder, "hang"))
    until_still(folder / "runs/loop")
    shown = fairlead(folder, "doctor", "--run", "loop", "--json")
    assert shown.returncode == 1, shown.stdout + shown.stderr
    document = json.loads(shown.stdout)
    assert document["advances"] is False
    (found,) = [one for one in document["found"] if one["code"] == "hang"]
    assert "rank 1" in found["what"]
    assert "rank 1 is at train.py:" in found["why"]
    assert "in stand_for_ever" in found["why"]
    assert {one["rank"]: one["collective"] for one in document["standing"]} == {0: "backward pass", 1: None}
    reported = fairlead(folder, "report", "loop")
    assert "its times are not recorded" not in reported.stdout
    assert goodput(folder / "runs/loop").total_s > 10, "the time in which nothing moves is time, too"
    assert processes[0].poll() is None  # asking has ended nothing
    assert not (folder / "runs/loop/heartbeats/SHOW-STACKS").exists()


def test_a_run_whose_steps_advance_is_left_alone(loop: tuple[Path, list[subprocess.Popen[str]]]) -> None:
    folder, processes = loop
    processes.append(start(folder, "long"))
    run, deadline = folder / "runs/loop", time.monotonic() + LIMIT_S
    while max((beat.step for beat in read_heartbeats(run / "heartbeats")), default=0) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    shown = fairlead(folder, "doctor", "--run", "loop")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "its steps advance" in shown.stdout
    assert not (run / "stacks").exists()
    screen = watched(folder)
    assert "loop: running" in screen
    assert "step  " in screen
    assert processes[0].poll() is None
    before = max(beat.step for beat in read_heartbeats(run / "heartbeats"))
    time.sleep(2.5)
    assert max(beat.step for beat in read_heartbeats(run / "heartbeats")) > before


def watched(folder: Path) -> str:
    """What `fairlead top` has shown in a terminal until Ctrl-C, which it takes for its end."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "fairlead", "top", "loop", "--interval", "0.3"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    shown, until = b"", time.monotonic() + 4.0
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 1 << 16)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # it has closed the terminal
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=LIMIT_S) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))


TRAINER = """
run: {name: fit}
model: {class: "model:Model"}
data: {class: "model:Data"}
trainer: {accelerator: cpu, devices: 2, max_epochs: 3, enable_progress_bar: false, enable_model_summary: false}
"""
MODEL = """
import time

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(160, 8)), batch_size=4)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        time.sleep(0.01)
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, index):
        time.sleep(0.01)
        self.log("val/loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


def test_a_trainers_steps_are_told_apart_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(textwrap.dedent(TRAINER))
    (tmp_path / "model.py").write_text(MODEL)
    done = fairlead(tmp_path, "fit", "job.yaml")
    assert done.returncode == 0, done.stderr
    ranks = read_times(tmp_path / "runs/fit", 1)
    assert [one.rank for one in ranks] == [0, 1]
    for one in ranks:
        assert one.steps == 59
        assert set(one.shares) >= {"data", "forward", "optimizer", "logging"}
        assert one.seconds["backward"] > 0
        assert one.shares["forward"] > 0.4  # where the module sleeps
        assert one.seconds["validate"] + one.seconds.get("sanity", 0.0) >= 0.06
        in_steps = sum(one.seconds.get(part, 0.0) for part in STEP_PARTS)
        assert one.mean_s == pytest.approx(in_steps / 59, rel=0.25)  # what follows the last step is in the sum
    assert read_times(tmp_path / "runs/fit", 1)[0].facts["comm_bytes"] == 72 * 4
