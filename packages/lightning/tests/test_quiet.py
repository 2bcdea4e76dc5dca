"""What Lightning says in every run is hidden, and nothing else."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import ModelSummary
from tiny_job import Data, Line, make_trainer, plain
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Fairlead
from fairlead_distributed.testing import run_ranks
from fairlead_lightning.display.quiet import quiet


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_says_nothing_of_its_own(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without `quiet` the same fit fails here: warnings are errors in these tests."""
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    with quiet(), caplog.at_level(logging.INFO):
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            default_root_dir=tmp_path,
        )
        trainer.fit(Model(), data)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("lightning")] == []


def test_a_summary_has_no_count_that_was_not_made(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Under the callback, in a script that advertises nothing either, and warns of no short epoch."""
    callbacks = [Fairlead(run=tmp_path / "run"), ModelSummary()]
    with caplog.at_level(logging.INFO):
        trainer = plain(max_steps=2, callbacks=callbacks, log_every_n_steps=50, enable_model_summary=True)
        trainer.fit(Line(), datamodule=Data())
    assert "Trainable params" in caplog.text
    assert "Flops" not in caplog.text
    assert "litlogger" not in caplog.text


def test_nor_has_one_that_rich_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    make_trainer(tmp_path, max_steps=1, enable_model_summary=True).fit(Line(), datamodule=Data())
    shown = capsys.readouterr().out
    assert "Trainable params" in shown
    assert "Total FLOPs" not in shown


@pytest.mark.parametrize("kind", ["Trainer", "Fairlead"])
def test_a_resumed_start_does_not_repeat_what_the_first_has_said(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the model's summary nor Lightning's advice; afterwards advice is given as before."""

    shows: dict[str, Any] = {"log_every_n_steps": 50, "enable_model_summary": True}

    def train(steps: int) -> tuple[bool, int]:
        if kind == "Trainer":
            trainer: L.Trainer = make_trainer(tmp_path, max_steps=steps, **shows)
        else:
            trainer = plain(max_steps=steps, callbacks=[Fairlead(run=tmp_path / "run")], **shows)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", PossibleUserWarning)
            trainer.fit(Line(), datamodule=Data())
            warnings.warn("advice", PossibleUserWarning, stacklevel=1)
        assert str(said[-1].message) == "advice"
        text = capsys.readouterr()
        given = sum("smaller than the logging interval" in str(one.message) for one in said)
        return "Trainable params" in text.out + text.err, given

    shown, advice = train(4)
    assert (shown, advice) == (True, 1)
    assert train(6) == (False, 0)


class Warns(Line):
    """Lets torch, Lightning and itself warn of something."""

    def on_train_start(self) -> None:
        for module in ("torch.optim.lr_scheduler", "lightning.pytorch.loops", "torchvision_of_mine", "mine"):
            warnings.warn_explicit(f"of {module}", UserWarning, f"{module}.py", 1, module=module)
        warnings.warn_explicit("a bug", RuntimeWarning, "torch.py", 1, module="torch")


def what_a_rank_shows(rank: int, root: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()  # pytest has set some
        trainer = make_trainer(root, devices=2, strategy="ddp", max_steps=1)
        trainer.fit(Warns(), datamodule=Data())
        assert [one for one in warnings.filters if "torchmetrics" in str(one)] == []
    return [str(one.message) for one in said if str(one.message).startswith(("of ", "a bug"))]


def test_other_ranks_leave_the_warnings_of_engines_to_the_first(tmp_path: Path) -> None:
    """All have the same; what is the user's, or another kind of warning, shows on each."""
    first, second = run_ranks(what_a_rank_shows, 2, tmp_path)
    assert first == ["of torch.optim.lr_scheduler", "of lightning.pytorch.loops", *second]
    assert second == ["of torchvision_of_mine", "of mine", "a bug"]


def test_other_messages_come_through(caplog: pytest.LogCaptureFixture) -> None:
    with quiet(), caplog.at_level(logging.INFO):
        logging.getLogger("lightning.pytorch.utilities.rank_zero").info("GPU temperature is 99 degrees")
        with pytest.warns(UserWarning, match="a user's warning"):
            warnings.warn("a user's warning", stacklevel=1)
    assert "GPU temperature is 99 degrees" in caplog.messages


def test_it_ends_with_its_block(caplog: pytest.LogCaptureFixture) -> None:
    with quiet():
        pass
    with caplog.at_level(logging.INFO):
        logging.getLogger("lightning.pytorch.utilities.rank_zero").info("GPU available: False, used: False")
    assert "GPU available: False, used: False" in caplog.messages
