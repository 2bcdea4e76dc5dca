"""`fairlead launch` on nodes with a network each, as by hand: a node comes, and the network of one goes silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from integration_tests.jobs import changed
from integration_tests.jobs import fairlead as one_process
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.system import run, wait_until
from integration_tests.slurm.training import history
from integration_tests.test_world_size import JOB

pytestmark = [pytest.mark.slow, pytest.mark.full]

MODEL = """
import os
import time

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.arange(48.0), batch_size=2, shuffle=True)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, index):
        time.sleep(0.5 if os.path.exists("slow") else 0)
        return (self.weight - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_end(self):
        if self.global_rank == 0:
            torch.save(self.weight.detach(), "weight.pt")
"""
RUN = Path("runs/small")
PORT = 29500  # of a network of its own


def repository(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    (folder / "model.py").write_text(MODEL)
    trainer = {
        "max_epochs": 16,
        "devices": 1,
        "num_nodes": "auto",
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 1,
        "checkpoint": {"every_n_steps": 2},
    }
    (folder / "job.json").write_text(json.dumps(changed(JOB, trainer=trainer)))
    return folder


class Launchers:
    """Those of a job, one for each node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        place = ["--nproc", "1", "--nnodes", "1:2", "--main-address", "n1", "--main-port", str(PORT)]
        command = [sys.executable, "-m", "fairlead", "launch", *place, "-m", "fairlead", "fit", "job.json"]
        with (self.folder / f"{node}.log").open("wb") as log:
            self.started[node] = subprocess.Popen(
                self.cluster.on(node, *command, cwd=self.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "OMP_NUM_THREADS": "1"},
            )

    def said(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text()

    def end(self, node: str) -> int:
        return self.started[node].wait(120)

    def until_saved(self, more: int, starts: int) -> None:
        """Until this start has gone so many steps beyond where it began, and saved them."""

        def saved() -> bool:
            begun = history(self.folder, "training", run=self.folder / RUN)
            at = history(self.folder, "checkpoint", run=self.folder / RUN)
            assert self.started["n1"].poll() is None, self.said("n1")
            return len(begun) == starts and any(event["step"] >= begun[-1]["step"] + more for event in at)

        wait_until(f"start {starts} has saved {more} steps", saved, 120)

    @contextmanager
    def silent(self, node: str) -> Iterator[None]:
        """No packet reaches the node, and none comes from it: nobody is told, as when a switch fails.

        Where the nodes share a network, its processes are frozen.
        """
        bridge = self.cluster.plan.bridge
        if bridge is None:
            begin, end = (self.cluster.on(node, "pkill", f"-{name}", "-f", "fairlead") for name in ("STOP", "CONT"))
        else:
            begin, end = (["ip", "link", "set", f"{bridge}-{node}", state] for state in ("down", "up"))
        run(*begin)
        try:
            yield
        finally:
            run(*end)
            self.started[node].send_signal(signal.SIGCONT)  # nsenter stops with what it runs


@pytest.fixture
def launchers(cluster: Cluster, tmp_path: Path) -> Iterator[Launchers]:
    if cluster.plan.isolation == "none":
        pytest.skip("the nodes share their processes")
    launchers = Launchers(cluster, repository(tmp_path / "launched"))
    yield launchers
    for process in launchers.started.values():
        process.kill()
        process.wait()
    for node in launchers.started:
        cluster.run(*cluster.on(node, "sh", "-c", "pkill -KILL -f '[f]airlead' || true"))


def test_a_training_takes_in_a_node_that_comes_and_goes_on_without_one_that_is_silent(launchers: Launchers) -> None:
    """Of one node, then two, then one again: no step is lost where one comes, and the weight is that of one process."""
    folder, run_folder = launchers.folder, launchers.folder / RUN
    (folder / "slow").touch()
    launchers.start("n1")
    launchers.until_saved(2, starts=1)
    launchers.start("n2")
    launchers.until_saved(4, starts=2)
    with launchers.silent("n2"):
        launchers.until_saved(4, starts=3)
        (folder / "slow").unlink()
        assert launchers.end("n1") == 0, launchers.said("n1")
    assert launchers.end("n2") != 0  # nobody was left who could tell it the end; its ranks end with it
    said = launchers.said("n1")
    assert "has joined: the ranks save, stop, and restart with it" in said
    assert "nothing was heard of it for 10 s: its machine or the network went down" in said
    worlds = [event["world_size"] for event in history(folder, "start", run=run_folder)]
    assert worlds == [1, 2, 1], said
    begun = [event["step"] for event in history(folder, "training", run=run_folder)]
    (stop,) = history(folder, "stop", run=run_folder)
    assert begun[1] == stop["step"]
    alone = repository(folder.parent / "alone")
    ended = one_process("fit", "job.json", cwd=alone)
    assert ended.code == 0, ended.text
    weights = [torch.load(one / "weight.pt") for one in (folder, alone)]
    torch.testing.assert_close(*weights, rtol=1e-6, atol=0)
