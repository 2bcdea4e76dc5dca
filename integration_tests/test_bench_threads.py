"""`fairlead bench threads` on a real job: real processes and threads, and nothing left of it. No speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead_diagnostics.bench.cpus import usable_cpus
from integration_tests.jobs import fairlead, repository, tree

CPUS = usable_cpus().count
pytestmark = pytest.mark.skipif(CPUS < 2, reason="there is one CPU, and nothing to divide")

MODEL = """
import json
import os

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):  # five batches of 4 samples, three of 8: it ends before the steps do
        return DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=self.batch_size)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.seen = []

    def training_step(self, batch, index):
        ranks = self.trainer.world_size
        if ranks == 2 and os.environ.get("FAIL"):
            raise ValueError("no luck with two")
        syncs = getattr(self.trainer.strategy.model, "require_backward_grad_sync", None)
        self.seen.append([len(batch[0]), syncs])
        return self.layer(batch[0]).square().mean()

    def on_train_end(self):
        note = [self.trainer.world_size, self.global_rank, torch.get_num_threads(), self.seen]
        with open("seen.jsonl", "a") as file:
            file.write(json.dumps(note) + chr(10))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""
JOB: dict[str, Any] = {
    "run": {"name": "small", "dir": "runs"},
    "model": {"class": "mine.tiny:Net"},
    "data": {"class": "mine.tiny:Data", "args": {"batch_size": 8}},
    "trainer": {"accelerator": "cpu", "max_steps": 2},
}


@pytest.mark.full
@pytest.mark.slow
def test_a_job_is_timed_with_processes_and_threads(tmp_path: Path) -> None:
    """The same batch of all, half of the steps without communication, other threads, and no run directory."""

    file = repository(tmp_path, job=JOB)
    (tmp_path / "mine" / "tiny.py").write_text(MODEL)
    before = tree(tmp_path)
    words = ("bench", "threads", str(file), "--processes", "2", "--rounds", "1", "--steps", "8")
    done = fairlead(*words, "--json", cwd=tmp_path)
    assert done.code == 0, done.text

    document = json.loads(done.out)
    assert document["compared"].startswith("the same batch of 8 in all")
    found = {(one["processes"], one["threads"]): one for one in document["layouts"]}
    assert set(found) == {(1, CPUS), (1, 1), (2, CPUS // 2)}
    two = found[2, CPUS // 2]
    assert two["batch_size"] == 4
    assert 0 <= two["communication"] < 1
    assert all(one["samples_per_s"]["median"] > 0 and one["memory_bytes"] > 0 for one in found.values())
    assert document["advice"]["settings"].keys() == {"trainer.devices", "trainer.threads", "data.args.batch_size"}
    assert not document["advice"]["certain"] or document["advice"]["devices"] == 1, "one round proves nothing"

    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert sorted((ranks, rank, threads) for ranks, rank, threads, _ in seen) == sorted(
        [(1, 0, CPUS)] * 2 + [(1, 0, 1), (2, 0, CPUS // 2), (2, 1, CPUS // 2)]
    )
    for ranks, _, _, steps in seen:
        assert max(size for size, _ in steps) == 8 // ranks
    syncs = [sync for _, sync in next(steps for ranks, _, _, steps in seen if ranks == 2)]
    assert syncs == [True] * 3 + ([True] * 5 + [False] * 5) * 2, "warm-up, and every second block without"
    (tmp_path / "seen.jsonl").unlink()
    assert tree(tmp_path) == before, "something of the trials is left"


@pytest.mark.full
@pytest.mark.slow
def test_what_cannot_be_trained_is_told_and_left_out(tmp_path: Path) -> None:
    """A layout that fails is a row; what fails with one process ends it, with the user's own error."""
    file = repository(tmp_path, job=JOB)
    (tmp_path / "mine" / "tiny.py").write_text(MODEL)
    words = ("bench", "threads", str(file), "--processes", "2", "--rounds", "1", "--steps", "4")
    done = fairlead(*words, cwd=tmp_path, environ={"FAIL": "two"})
    assert done.code == 0, done.text
    assert "no luck with two" in done.err
    assert f"2 x {CPUS // 2}     failed" in " ".join(done.out.split("\n")), done.out
    assert "advice: stay with" in done.out

    (tmp_path / "mine" / "tiny.py").write_text(MODEL.replace("ranks == 2 and", "ranks == 1 and"))
    done = fairlead(*words, cwd=tmp_path, environ={"FAIL": "one"})
    assert done.code == 1, done.text
    assert "no luck with two" in done.err
    assert "to which the others are compared, failed" in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "trainer.accelerator=cuda"), "the job computes on cuda, not on CPUs"),
        (("--set", "data.args.batch_size=7"), "a batch of 7 cannot be divided by 2"),
        (("--set", "data.args={}", "--batch", "global"), "does not say its batch size"),
        (("--processes", "2,none"), "'none' is no number"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """Exit code 2, without torch."""
    file = repository(tmp_path, job=JOB)
    (tmp_path / "mine" / "tiny.py").write_text(MODEL)
    done = fairlead("bench", "threads", str(file), "--processes", "2", *words, cwd=tmp_path)
    assert done.code == 2, done.text
    assert said in done.err


def test_one_of_several_ranks_refuses(tmp_path: Path) -> None:
    """All of them would measure at the same time."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "2"
    done = fairlead("bench", "threads", "job.yaml", cwd=tmp_path, environ=step)
    assert done.code == 2, done.text
    assert "it was started 2 times" in done.err
