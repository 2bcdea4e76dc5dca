"""`fairlead verify JOB` as a user calls it: right, with a fault in the ranks, and where nothing can be said."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from integration_tests.jobs import Call, fairlead

pytestmark = pytest.mark.slow  # each call starts the ranks, and one process after them

ROOT = Path(__file__).parents[2]
MODEL = """
import os

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=generator), "y": torch.randn(2, generator=generator), "name": str(index)}


class Data(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=self.batch_size, shuffle=True)


class Model(L.LightningModule):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.rate = dropout
        self.head = torch.nn.Linear(6, 2)
        fault = os.environ.get("FAULT")
        if fault and os.environ.get("WORLD_SIZE", "1") != "1":  # in the ranks, not in the one process
            from integration_tests.verify import mutations

            self.fault = getattr(mutations, fault)()
            self.fault.__enter__()

    def training_step(self, batch, index):
        x = batch["x"]
        for block in self.blocks:
            x = x + torch.nn.functional.dropout(block(x).tanh(), self.rate, self.training)
        return torch.nn.functional.mse_loss(self.head(x), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Chain(L.LightningModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        layers = (torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        self.net = torch.nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)

    def pipeline_loss(self, output, y):
        return torch.nn.functional.mse_loss(output, y)

    def training_step(self, batch, index):
        return self.pipeline_loss(self(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Waits(Model):
    def training_step(self, batch, index):
        if self.global_rank == 0 and index == 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()
        return super().training_step(batch, index)


class Halved(Model):
    def on_before_optimizer_step(self, optimizer):
        if torch.distributed.is_initialized():
            for p in self.parameters():
                p.grad *= torch.distributed.get_world_size() / 2


class Asks(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.trainer.fit_loop.setup_data()
        loader = self.trainer.train_dataloader
        assert isinstance(loader, DataLoader) and len(loader.dataset) == 64 and len(loader) == 8
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=len(loader))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Scaled(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01 * self.trainer.world_size)


class OwnOrder(Data):
    def train_dataloader(self):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.trainer.global_rank)).tolist()
        return DataLoader(torch.utils.data.Subset(Samples(), order), batch_size=self.batch_size)


class Broken(Model):
    def training_step(self, batch, index):
        raise ValueError("no luck in the step")
"""


def verified(
    folder: Path, *words: str, fault: str = "", model: str = "Model", dropout: float = 0.0, **trainer: Any
) -> Call:
    """Verifies a job; whatever comes out, nothing is left of it."""
    (folder / "mine.py").write_text(MODEL)
    job = {
        "run": {"name": "job", "seed": 1},
        "model": {"class": f"mine:{model}", "args": {"dropout": dropout}},
        "data": "mine:Data",
        "trainer": {"accelerator": "cpu", "devices": 2, "gradient_clip_val": 0.5, "max_steps": 1000, **trainer},
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"OMP_NUM_THREADS": "1", **({"FAULT": fault, "PYTHONPATH": path} if fault else {})}
    call = fairlead("verify", "job.yaml", *words, cwd=folder, environ=environ)
    kept = "its output is in" in call.err  # the log that an error names
    assert (folder / "runs").exists() == kept
    return call


def test_a_right_layout(tmp_path: Path) -> None:
    """Eight ranks on two nodes become two, bf16 becomes 32-true; a ModelCheckpoint is left out; all of it is said."""
    checkpoint = {"class": "lightning.pytorch.callbacks:ModelCheckpoint", "args": {"monitor": "val"}}
    call = verified(
        tmp_path,
        strategy={"name": "fsdp2", "shard": 8},
        devices=4,
        num_nodes=2,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        callbacks=[checkpoint],
    )
    assert call.code == 0, call.text
    lines = call.out.splitlines()
    assert lines[0] == "layout   fsdp2 on 3 ranks: shard 3"
    assert lines[1].strip() == "scaled down from 8 ranks (shard 8 -> 3); --full verifies all of them"
    assert lines[2].strip() == "verified in 32-true, not in bf16-mixed: rounding would hide what is wrong"
    assert lines[-1] == (
        "equal: the model, split like this, is still the model, on 2 and 3 ranks in 3 steps; "
        "not compared: the job's 8 ranks (--full), rounding in bf16-mixed, later steps than 3"
    )
    assert len(lines) < 28


def test_a_fault_in_the_ranks_is_red(tmp_path: Path) -> None:
    call = verified(tmp_path, "--json", "--steps", "2", "--repeats", "1", fault="summed_over_replicas", strategy="ddp")
    assert call.code == 1, call.text
    found = json.loads(call.out)
    assert found["ok"] is False
    assert found["first"]["name"] == "blocks.0.weight"
    assert found["causes"] == ["all gradients are 2 x those of one process: summed over the 2 replicas"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("nothing_reduced", "only the batch of replica 0 is in it: not reduced over the replicas"),
        ("step_lost", "rank 1 and rank 0 do not hold the same weights any more"),
    ],
)
def test_ranks_that_come_apart_are_red(tmp_path: Path, fault: str, cause: str) -> None:
    """A fit would end with an error there."""
    call = verified(tmp_path, "--json", "--repeats", "1", fault=fault, strategy="ddp")
    assert call.code == 1, call.text
    assert cause in json.loads(call.out)["causes"][0]


@pytest.mark.full
def test_a_rate_that_is_made_of_the_ranks_is_said(tmp_path: Path) -> None:
    call = verified(tmp_path, model="Scaled", strategy="ddp", gradient_clip_val=None)
    assert call.code == 0, call.text
    assert "learning rates are 0.02 on 2 ranks and 0.01 in one process, made of the number of ranks" in call.out
    assert call.out.splitlines()[-1].endswith("learning rates, which are made of the number of ranks")


@pytest.mark.full
def test_samples_that_no_rank_reads_are_red(tmp_path: Path) -> None:
    call = verified(tmp_path, "--json", "--set", "data=mine:OwnOrder", strategy="ddp")
    assert call.code == 1, call.text
    assert any(one.startswith("samples are missing: of Subset") for one in json.loads(call.out)["wrong"])


PLAN = {"net.0": "colwise", "net.2": "rowwise"}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"name": "ddp"}),
    "fsdp": (2, {"name": "fsdp", "auto_wrap_policy": ["torch.nn:Linear"]}),
    "fsdp2": (2, {"name": "fsdp2"}),
    "tensor": (2, {"name": "tensor_parallel", "plan": PLAN}),
    "hybrid": (4, {"name": "hybrid", "shard": 2, "tensor": 2, "plan": PLAN}),
    "replicate and shard": (4, {"name": "hybrid", "replicate": 2, "shard": 2}),
    "pipeline": (2, {"name": "pipeline_parallel"}),
    "interleaved": (2, {"name": "pipeline_parallel", "schedule": "interleaved_1f1b"}),
    "pipeline and shard": (4, {"name": "hybrid", "pipeline": 2, "shard": 2}),
    "stage 1": (2, {"name": "deepspeed"}),
    "stage 2": (2, {"name": "deepspeed_stage_2"}),
    "stage 3": (2, {"name": "deepspeed_stage_3", "stage3_param_persistence_threshold": 0}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_each_strategy_is_equal(tmp_path: Path, name: str) -> None:
    """Accumulating and clipping."""
    devices, strategy = STRATEGIES[name]
    call = verified(tmp_path, "--json", model="Chain", strategy=strategy, devices=devices, accumulate_grad_batches=2)
    assert call.code == 0, call.text
    found = json.loads(call.out)
    assert found["layout"]["ranks"] == devices
    assert found["alive"]["moved"] == 6
    counts = {kind: one["count"] for kind, one in found["compared"].items() if kind not in ("losses", "learning rates")}
    assert "what the optimizer holds" not in found["not_compared"]
    # DeepSpeed's optimizers count the steps of flat parts.
    assert counts.pop("optimizer state") == (12 if name.startswith("stage") else 18)
    if name.startswith("stage"):  # DeepSpeed's own optimizers take no hooks
        counts.pop("to the optimizer", 0)
    else:
        assert counts.pop("to the optimizer") == 6
    assert counts == {"gradients": 6, "clipping norm": devices, "weights, step 1": 6, "weights": 6}


@pytest.mark.full  # what is refused, the tests of the comparing functions show too
def test_random_numbers_are_refused(tmp_path: Path) -> None:
    """A rate that no name tells of."""
    call = verified(tmp_path, strategy="ddp", dropout=0.3)
    assert call.code == 2, call.text
    assert "it draws random numbers in its training step" in call.err


@pytest.mark.full
def test_an_error_of_the_job_is_shown_as_fit_shows_it(tmp_path: Path) -> None:
    call = verified(tmp_path, model="Broken", strategy="ddp")
    assert call.code == 2, call.text
    assert call.err.startswith("error: ")
    assert "ValueError: no luck in the step" in call.err
    assert 'mine.py", line' in call.err
    log = re.search(r"its output is in (\S+)", call.err)
    assert log is not None
    assert "no luck in the step" in (tmp_path / log[1]).read_text()


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_shown_and_ended(tmp_path: Path) -> None:
    """A barrier that rank 0 alone calls: after 10 s it says where each rank stands."""
    call = verified(tmp_path, model="Waits", strategy="ddp")
    assert call.code == 2, call.text
    assert "nothing has moved for 10 s; the ranks stand at:" in call.err
    assert "in training_step (barrier)" in call.err
    assert "the ranks wait for each other" in call.err


@pytest.mark.full
def test_a_right_number_for_two_ranks_is_wrong_for_three(tmp_path: Path) -> None:
    call = verified(tmp_path, "--json", model="Halved", strategy="ddp", devices=8)
    assert call.code == 1, call.text
    assert json.loads(call.out)["ranks"] == [2, 3]


@pytest.mark.full
def test_the_loader_is_the_users_own(tmp_path: Path) -> None:
    """Its length, dataset and type, as a schedule asks for them."""
    call = verified(tmp_path, model="Asks", strategy="ddp")
    assert call.code == 0, call.text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--set", "trainer.devices=1"), "nothing is split"),
        (("--steps", "0"), "--steps needs at least 1"),
        (("--set", "model.class=mine:Modle"), "mine has no 'Modle'"),
    ],
)
def test_a_wrong_call_is_said_at_once(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    call = verified(tmp_path, *words)
    assert call.code == 2, call.text
    assert what in call.err
