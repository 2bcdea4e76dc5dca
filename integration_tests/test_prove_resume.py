"""`--prove-resume` of jobs and scripts as people write them: some that are not exact, and some that are."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from integration_tests.jobs import LIMIT_S, Call, start, tree

MODEL = '''
import time

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset

SCALE = {"value": 1.0, "good": 0}


class Samples(Dataset):
    def __init__(self, order=None):
        self.order = order or list(range(24))

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return torch.full((4,), 1 + self.order[index] / 24)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=4, shuffle=True)


class FromASet(Data):
    """The order of what comes from a set depends on the hash seed of the process."""

    def __init__(self):
        super().__init__()
        names = [f"sample-{number}" for number in range(24)]
        self.names = list(set(names))

    def train_dataloader(self):
        return DataLoader(Samples([int(name[7:]) for name in self.names]), batch_size=4)


class Net(L.LightningModule):
    """Dropout, momentum, a schedule: all of them are in the checkpoint."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2))

    def loss(self, batch):
        return self.layer(batch).square().mean() + self.layer[0].weight.square().sum()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Ema(L.Callback):
    """Keeps an average of the weights, and no state_dict."""

    def __init__(self, decay=0.9):
        self.decay = decay
        self.shadow = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                old = self.shadow.get(name, value)
                self.shadow[name] = self.decay * old + (1 - self.decay) * value


class Scaled(Net):
    """A loss scale in a dict of the module, which grows."""

    def loss(self, batch):
        SCALE["good"] += 1
        if SCALE["good"] % 3 == 0:
            SCALE["value"] *= 2
        return super().loss(batch) * SCALE["value"]


class Warming(Net):
    """A rate that rises with the time."""

    def __init__(self):
        super().__init__()
        self.began = time.time()

    def loss(self, batch):
        return super().loss(batch) * (time.time() - self.began)


class Appending(Net):
    """The loss is taken relative to the mean of those before it."""

    def __init__(self):
        super().__init__()
        self.stats = {"x": []}

    def loss(self, batch):
        loss = super().loss(batch)
        self.stats["x"].append(loss.item())
        return loss / (sum(self.stats["x"]) / len(self.stats["x"]))


class Mean:
    """A running mean."""

    def __init__(self):
        self.mean, self.count = 0.0, 0

    def add(self, value):
        self.count += 1
        self.mean += (value - self.mean) / self.count
        return self.mean


class Helped(Net):
    """A helper keeps a running mean."""

    def __init__(self):
        super().__init__()
        self.helper = Mean()

    def loss(self, batch):
        loss = super().loss(batch)
        return loss / self.helper.add(loss.item())
'''
VALIDATED = '''
from lightning.pytorch.callbacks import EarlyStopping


class Long(Data):
    """Epochs of 100 batches, and a validation at the end of each."""

    def train_dataloader(self):
        return DataLoader(Samples([number % 24 for number in range(400)]), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Samples(), batch_size=4)


class Measured(Net):
    def validation_step(self, batch, index):
        self.log("score", self.loss(batch))


class Reduced(Measured):
    """A rate that falls when the score of the validations does not."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=1e3, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}


class Forgetful(EarlyStopping):
    """Its count begins anew in each process."""

    resume_attributes = ()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
'''
# Attributes are saved with a run, unless their class says otherwise.
FORGETFUL = "Ema.resume_attributes = Appending.resume_attributes = Helped.resume_attributes = ()\n"

pytestmark = pytest.mark.slow  # each proof starts three to seven processes, one after the other

ENVIRON = {"PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "1"}


def proved(folder: Path, *words: str, model: str = "Net", data: str = "Data", more: str = "", **trainer: Any) -> Call:
    """Proves a job of 6 batches an epoch; whatever comes out, the run directory of the job is not touched."""
    (folder / "mine.py").write_text(MODEL + more)
    job = {
        "run": {"name": "job", "seed": 1},
        "model": f"mine:{model}",
        "data": f"mine:{data}",
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 1000,
            "enable_model_summary": False,
            **trainer,
        },
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    run = folder / "runs" / "job"
    (run / "checkpoints").mkdir(parents=True)
    before = tree(run)
    call = start("fit", "job.yaml", "--prove-resume", *words, cwd=folder, environ=ENVIRON).end(5 * LIMIT_S)
    assert tree(run) == before
    return call


def differs(call: Call, *, first: str, why: str, do: str, step: int = 4) -> None:
    """It says that the resume differs, what shows first, why, and what to do; and keeps the runs."""
    assert call.code == 1, call.text
    saved = rf"the resume differs: 1 rank, killed after step 6, resumed from the checkpoint of step {step}\n"
    assert re.match(saved, call.out), call.text
    lines = call.out.splitlines()
    assert re.search(first, lines[1]), call.out
    assert re.search(why, "\n".join(line for line in lines if line.startswith("  why:"))), call.out
    assert re.search(do, "\n".join(line for line in lines if line.startswith("  do:"))), call.out
    kept = Path(lines[-1].removeprefix("  files: "))
    assert (kept / "undisturbed" / "run" / "metrics.csv").exists()


@pytest.mark.full
def test_an_average_of_weights_in_a_callback(tmp_path: Path) -> None:
    """The training does not depend on it: only what the callback keeps shows it."""
    call = proved(tmp_path, more=FORGETFUL, callbacks=[{"class": "mine:Ema"}])
    name = r"shadow\['layer\.0\.weight'\] of the callback Ema: "
    differs(call, first=name, why="not restored: shadow of the callback Ema: 6 items became 0", do="state_dict\\(\\)")
    assert "loss" not in call.out.splitlines()[1]


@pytest.mark.full
def test_a_loss_scale_in_a_dict_of_a_module(tmp_path: Path) -> None:
    call = proved(tmp_path, model="Scaled")
    why = r"not restored: SCALE\['value'\] of the module mine: 2\.0 became 1\.0"
    differs(call, first=r"loss: \S+ became \S+ at step 4 \(metrics\.csv\)", why=why, do="keep it in the model")


@pytest.mark.full
def test_a_list_that_the_step_appends_to(tmp_path: Path) -> None:
    call = proved(tmp_path, more=FORGETFUL, model="Appending")
    why = r"not restored: stats\['x'\] of the model Appending: 4 items became 0 items"
    differs(call, first="loss: .* at step 4", why=why, do="on_save_checkpoint")


@pytest.mark.full
def test_a_helper_with_a_running_mean(tmp_path: Path) -> None:
    call = proved(tmp_path, more=FORGETFUL, model="Helped")
    differs(call, first="loss: .* at step 4", why=r"helper\.count of the model Helped: 4 became 0", do="buffer")


@pytest.mark.full
def test_an_order_that_comes_from_a_set(tmp_path: Path) -> None:
    """Not the resume's fault: two undisturbed runs differ, and only the hash seed makes them."""
    call = proved(tmp_path, data="FromASet")
    assert call.code == 1, call.text
    assert call.out.startswith("two undisturbed runs differ: no resume of this job can be exact")
    assert "first: loss: " in call.out
    assert "at step 0 " in call.out
    assert "the order of a set" in call.out
    assert "sorted(set(names))" in call.out


@pytest.mark.full
def test_a_warm_up_by_the_clock(tmp_path: Path) -> None:
    call = proved(tmp_path, model="Warming")
    assert call.code == 1, call.text
    assert call.out.startswith("two undisturbed runs differ: no resume of this job can be exact")
    assert "began of the model Warming" in call.out
    assert "a clock" in call.out


@pytest.mark.parametrize(
    "job",
    [{"callbacks": [{"class": "mine:Ema"}]}, pytest.param({"model": "Helped"}, marks=pytest.mark.full)],
    ids=["averaged weights in a callback", "a helper object"],
)
def test_what_is_kept_in_attributes_is_proven(tmp_path: Path, job: dict[str, Any]) -> None:
    call = proved(tmp_path, "6", **job)
    assert call.code == 0, call.text
    assert call.out.startswith("equal in every bit")


@pytest.mark.full
def test_an_ordinary_job_is_proven(tmp_path: Path) -> None:
    """Dropout, batch norm, momentum, a schedule, shuffled data; and nothing is left behind."""
    call = proved(tmp_path, "6")
    assert call.code == 0, call.text
    said = "equal in every bit: 1 rank, killed after step 4, resumed from the checkpoint of step 3"
    assert call.out.splitlines()[0] == said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["job"]


@pytest.mark.full
def test_two_ranks_are_proven(tmp_path: Path) -> None:
    call = proved(tmp_path, "4", devices=2, strategy="ddp")
    assert call.code == 0, call.text
    assert call.out.startswith(
        "equal in every bit: 2 ranks, killed after step 3, resumed from the checkpoint of step 2"
    )


def stopping(cls: str = "lightning.pytorch.callbacks:EarlyStopping") -> dict[str, Any]:
    return {"callbacks": [{"class": cls, "args": {"monitor": "score", "mode": "max", "patience": 3}}]}


SEVERAL = '''

class Several(L.LightningModule):
    """Three steps of an optimizer to a batch, and a count in a closure, which nothing restores."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        count = [0]

        def counted():
            count[0] += 1
            return count[0]

        self.counted = counted

    def training_step(self, batch, index):
        scale = self.counted()
        for part, optimizer in zip(self.parts, self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(part(batch * scale).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.001) for part in self.parts]
'''


@pytest.mark.full
@pytest.mark.parametrize("io", ["torch", "async"])
def test_several_steps_to_a_batch_go_past_those_of_the_plan(tmp_path: Path, io: str) -> None:
    """The last save is behind the plan's last step: it is waited for, and compared."""
    call = proved(tmp_path, model="Several", more=SEVERAL, checkpoint_io=io)
    assert call.code == 1, call.text
    assert call.out.startswith("the resume differs: 1 rank, killed after step 6, resumed from the checkpoint of step 6")
    assert "state_dict.parts.0.weight" in call.out


# Epochs that end before the checkpoint and behind the kill: what decides at their ends needs its state for the second.
SHORT = ("--set", "trainer.limit_train_batches=3")


@pytest.mark.full
@pytest.mark.parametrize(
    "job",
    [
        stopping(),
        {"model": "Reduced"},
        {"checkpoint": {"monitor": "score"}, "accumulate_grad_batches": 2},
        stopping() | {"checkpoint": {"monitor": "score"}, "val_check_interval": 3},
    ],
    ids=["early stopping", "plateau", "checkpoints", "within an epoch"],
)
def test_decisions_by_a_validation_are_proven(tmp_path: Path, job: dict[str, Any]) -> None:
    call = proved(tmp_path, *SHORT, more=VALIDATED, data="Long", **({"model": "Measured"} | job))
    assert call.code == 0, call.text
    assert call.out.startswith("equal in every bit: 1 rank, killed after step 6"), call.out
    assert "no epoch ended" not in call.out


@pytest.mark.full
def test_a_callback_that_forgets_its_decisions(tmp_path: Path) -> None:
    call = proved(tmp_path, *SHORT, more=VALIDATED, data="Long", model="Measured", **stopping("mine:Forgetful"))
    assert call.code == 1, call.text
    assert call.out.startswith("the resume differs: 1 rank, killed after step 6, resumed from the checkpoint of step 4")
    assert re.search(r"not restored: (best_score|wait_count) of the callback Forgetful", call.out), call.out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("2",), "at least 3 steps"),
        (("--resume", "auto"), "starts from the beginning"),
        (("--set", "trainer.enable_checkpointing=false"), "no checkpoint to resume from"),
        (("--set", "trainer.fast_dev_run=true"), "no checkpoint to resume from"),
        (("--set", "model.class=mine:Nte"), "mine has no 'Nte'"),
    ],
)
def test_what_cannot_be_proven_is_said_at_once(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    call = proved(tmp_path, *words)
    assert call.code == 2, call.text
    assert what in call.err
    assert sorted(os.listdir(tmp_path / "runs")) == ["job"]


@pytest.mark.full
def test_a_job_that_ends_too_early_says_so(tmp_path: Path) -> None:
    """Its own limits hold; a run that was not killed proves nothing."""
    call = proved(tmp_path, "16", max_epochs=1)
    assert call.code == 1, call.text
    assert "before it could be killed" in call.err
    assert "max_epochs" in call.err


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Run
from fairlead_distributed import DistributedDataParallel, process_group

COUNTS = {"steps": 0}
torch.manual_seed(1)
with process_group():
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4, shuffle=True)
    with Run("runs/job", model=model, optimizer=optimizer, max_epochs=100, checkpoint={"every_n_steps": EVERY}) as run:
        run.restore()
        for (x,) in run.batches(loader):
            EACH_STEP
            loss = model(x).square().mean() * (COUNTS["steps"] + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
open("beyond", "w").close()
"""


def proved_script(folder: Path, line: str, *words: str, every: int = 1000) -> Call:
    """Proves a script that would train for 2,400 steps; its own run directory is not there afterwards."""
    (folder / "train.py").write_text(SCRIPT.replace("EACH_STEP", line).replace("EVERY", str(every)))
    call = start("launch", *words, "--prove-resume", "train.py", cwd=folder, environ=ENVIRON).end(5 * LIMIT_S)
    assert not (folder / "runs").exists()
    assert not (folder / "beyond").exists()
    return call


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_script_with_a_run_is_proven(tmp_path: Path, ranks: int) -> None:
    call = proved_script(tmp_path, "pass", "--nproc", str(ranks))
    assert call.code == 0, call.text
    said = f"{ranks} rank{'s'[: ranks > 1]}, killed after step 6, resumed from the checkpoint of step 4"
    lines = call.out.splitlines()
    assert lines[0] == f"equal in every bit: {said}"
    assert "rank-00000.rng.numpy" in lines[1]  # a generator that the script does not seed, and does not use
    assert [one for one in os.listdir(tmp_path) if one[0] != "." or one.startswith(".prove")] == ["train.py"]


@pytest.mark.parametrize("own", [4, pytest.param(5, marks=pytest.mark.full)])
def test_a_script_with_a_counter_in_a_global(tmp_path: Path, own: int) -> None:
    """Also where the script saves by itself behind the step that the proof saves: it resumes from there."""
    call = proved_script(tmp_path, 'COUNTS["steps"] += 1', every=own)
    why = rf"not restored: COUNTS\['steps'\] of the module __main__: {own} became 0"
    first = rf"loss: \S+ became \S+ at step {own + 1} \(metrics\.csv\)"
    differs(call, first=first, why=why, do="keep it in run.state", step=own)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--prove-steps", "2"), "at least 3"),
        (("--nnodes", "2"), "starts its ranks itself, on one machine"),
        ((), "the training has opened no run: there is nothing to resume"),
    ],
)
def test_a_script_that_cannot_be_proven_says_so(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    (tmp_path / "train.py").write_text("print('nothing of Fairlead')")
    call = start("launch", *words, "--prove-resume", "train.py", cwd=tmp_path, environ=ENVIRON).end(LIMIT_S)
    assert call.code == 2, call.text
    assert what in call.err
    assert [one for one in os.listdir(tmp_path) if one[0] != "." or one.startswith(".prove")] == ["train.py"]
