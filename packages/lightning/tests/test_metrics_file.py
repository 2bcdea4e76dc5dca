"""`metrics.csv`: each step once, across starts, kills and columns that appear late."""

from __future__ import annotations

import csv
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fairlead_lightning.metrics.metrics_logger import MetricsLogger
from fairlead_runs.metrics_file import StepTable


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.layer(batch[0]).square().mean(), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


def fit(directory: Path, resume_step: int | None, **arguments: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        logger=MetricsLogger(directory, resume_step=resume_step),
        callbacks=arguments.pop("callbacks", None),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        max_epochs=arguments.pop("max_epochs", 2),
        default_root_dir=directory,
    )
    trainer.fit(Model(), loader(), loader(), **arguments)
    return trainer


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


def test_lightning_s_metrics_have_one_row_a_step(tmp_path: Path) -> None:
    trainer = fit(tmp_path, None)
    found = rows(tmp_path / "metrics.csv")
    assert list(found[0]) == ["step", "epoch", "train/loss", "val/loss"]
    assert [int(row["step"]) for row in found] == list(range(8))
    assert [row["step"] for row in found if row["val/loss"]] == ["3", "7"]
    assert all(row["train/loss"] for row in found), "a step and the validation after it share a row"
    assert [row["epoch"] for row in found] == ["0"] * 4 + ["1"] * 4
    assert trainer.log_dir == str(tmp_path)


def test_values_keep_all_their_digits(tmp_path: Path) -> None:
    file = MetricsLogger(tmp_path, resume_step=None)
    value = 0.1 + 0.2
    file.log_metrics({"a": value, "b": torch.tensor(1 / 3), "n": 7, "bad": float("nan"), "epoch": 2.0}, step=3)
    file.finalize("success")
    (row,) = rows(tmp_path / "metrics.csv")
    assert float(row["a"]) == value
    assert float(row["b"]) == torch.tensor(1 / 3).item()
    assert (row["step"], row["epoch"], row["n"], row["bad"]) == ("3", "2", "7", "nan")


def test_a_column_that_appears_later_widens_every_row(tmp_path: Path) -> None:
    file = MetricsLogger(tmp_path, resume_step=None)
    file.log_metrics({"a": 1}, step=0)
    file.save()
    file.log_metrics({"b, with a comma": 2}, step=1)
    file.save()
    file.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == 'step,epoch,a,"b, with a comma"\n0,,1,\n1,,,2\n'


def test_a_resume_cuts_what_will_be_done_again_and_goes_on(tmp_path: Path) -> None:
    first = MetricsLogger(tmp_path, resume_step=None)
    for step in range(6):
        first.log_metrics({"loss": float(step)}, step=step)
        first.save()
    first.finalize("failed")
    second = MetricsLogger(tmp_path, resume_step=3)
    second.log_metrics({"loss": 33.0, "new": 1}, step=3)
    second.log_metrics({"loss": 44.0}, step=4)
    second.finalize("success")
    assert [(r["step"], r["loss"], r["new"]) for r in rows(tmp_path / "metrics.csv")] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "33.0", "1"),
        ("4", "44.0", ""),
    ]


def test_a_new_start_without_a_checkpoint_begins_a_new_file(tmp_path: Path) -> None:
    for _ in range(2):
        file = MetricsLogger(tmp_path, resume_step=None)
        file.log_metrics({"loss": 1.0}, step=5)
        file.finalize("success")
    assert len(rows(tmp_path / "metrics.csv")) == 1


def test_lightning_resumes_into_the_same_rows_as_without_a_stop(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    torch.manual_seed(1)
    fit(tmp_path / "whole", None, max_epochs=3)
    torch.manual_seed(1)
    trainer = fit(tmp_path / "parts", None, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    more = MetricsLogger(tmp_path / "parts", resume_step=99)  # what a longer first start would have logged
    more.log_metrics({"train/loss": 9.0, "stale": 1.0}, step=4)
    more.log_metrics({"train/loss": 9.0}, step=6)
    more.finalize("success")
    fit(tmp_path / "parts", 4, max_epochs=3, ckpt_path=tmp_path / "state.ckpt", weights_only=True)
    assert (tmp_path / "parts/metrics.csv").read_text() == (tmp_path / "whole/metrics.csv").read_text()


@pytest.mark.parametrize("tail", ["2,1,2.", "2", "\x00\x00\x00", "2,1,2.5,too,many\n", "x,1,2.5\n"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, tail: str) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,epoch,loss\n0,0,4.0\n1,0,3.0\n{tail}")
    file = MetricsLogger(tmp_path, resume_step=9)
    file.log_metrics({"loss": 1.0}, step=5)
    file.finalize("success")
    assert [(r["step"], r["loss"]) for r in rows(tmp_path / "metrics.csv")] == [
        ("0", "4.0"),
        ("1", "3.0"),
        ("5", "1.0"),
    ]


def test_a_file_that_is_no_table_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe nonsense\n1,2\n")
    file = MetricsLogger(tmp_path, resume_step=9)
    file.finalize("success")
    assert (tmp_path / "metrics.csv.damaged").read_bytes() == b"\xff\xfe nonsense\n1,2\n"
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch\n"


def test_values_of_earlier_steps_join_their_rows(tmp_path: Path) -> None:
    generator = random.Random(3)
    calls = [(generator.randrange(20), generator.choice("abc"), generator.random()) for _ in range(200)]
    file = MetricsLogger(tmp_path, resume_step=None)
    expected: dict[int, dict[str, str]] = {}
    for step, name, value in calls:
        file.log_metrics({name: value}, step=step)
        file.save()
        expected.setdefault(step, {})[name] = repr(value)
    file.finalize("success")
    found = {int(r.pop("step")): {k: v for k, v in r.items() if v} for r in rows(tmp_path / "metrics.csv")}
    assert found == expected
    assert list(found) == sorted(expected)


def test_saved_rows_survive_a_kill(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from fairlead_lightning.metrics.metrics_logger import MetricsLogger
file = MetricsLogger(Path({str(tmp_path)!r}), resume_step=None)
for step in range(50):
    file.log_metrics({{"loss": 1.0 / (step + 1)}}, step=step)
    file.save()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [float(r["loss"]) for r in rows(tmp_path / "metrics.csv")] == [1.0 / (n + 1) for n in range(50)]


def test_a_disk_that_refuses_is_a_warning_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsLogger(tmp_path, resume_step=None)
    file.log_metrics({"loss": 1.0}, step=0)
    file.save()

    def full(self: StepTable) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StepTable, "_write", full)
        file.log_metrics({"loss": 2.0}, step=1)
        with pytest.warns(UserWarning, match=r"cannot write metrics.csv: No space left on device.*training continues"):
            file.save()
        for step in (2, 3):
            file.log_metrics({"loss": 3.0}, step=step)  # warned of once only
            file.save()
    file.finalize("success")
    assert [r["loss"] for r in rows(tmp_path / "metrics.csv")] == ["1.0", "2.0", "3.0", "3.0"]


def test_a_spawned_rank_gets_a_file_of_its_own(tmp_path: Path) -> None:
    file = MetricsLogger(tmp_path, resume_step=None)
    file.log_metrics({"loss": 1.0}, step=0)
    file.save()
    copy = pickle.loads(pickle.dumps(file))
    file.finalize("success")
    copy.log_metrics({"loss": 2.0}, step=1)
    copy.finalize("success")
    assert [r["step"] for r in rows(tmp_path / "metrics.csv")] == ["0", "1"]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    file = MetricsLogger(tmp_path, resume_step=None)
    file.log_metrics({"loss": 1.0}, step=0)
    file.save()
    file.finalize("success")
    assert list(tmp_path.iterdir()) == []
