"""What monitors a metric that is never logged is told so, with the names that are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from tiny_job import Line, events, make_trainer, samples
from torch.utils.data import DataLoader

from fairlead.errors import RunFailedError
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import list_checkpoints


class Plateau(Line):
    def __init__(self, monitor: str, strict: bool = True) -> None:
        super().__init__()
        self.monitor, self.strict_schedule = monitor, strict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor, "strict": self.strict_schedule},
        }


class Own(L.Callback):
    """A user's own, which reads its metric if it is there."""

    monitor = "val/los"


def fit(root: Path, model: L.LightningModule | None = None, **given: Any) -> list[str]:
    validates, callbacks = given.pop("validates", True), given.pop("callbacks", [])
    trainer: Any = make_trainer(root, **{"max_epochs": 2, **given})
    trainer.callbacks.extend(callbacks)
    loaders: list[Any] = [DataLoader(samples(16), batch_size=4), *[DataLoader(samples(8), batch_size=4)] * validates]
    trainer.fit(model or Line(), *loaders)
    return [event["what"] for event in events(root / "run", "monitor-not-logged")]


def best(monitor: str) -> dict[str, Any]:
    return {"checkpoint": {"monitor": monitor}}


@pytest.mark.parametrize(
    ("given", "model", "owner"),
    [
        (best("val/los"), None, "trainer.checkpoint"),
        ({"callbacks": [EarlyStopping("val/los")]}, None, "EarlyStopping"),
        ({"callbacks": [EarlyStopping("val/los", check_on_train_epoch_end=False)]}, None, "EarlyStopping"),
        ({"callbacks": [ModelCheckpoint(monitor="val/los")]}, None, "ModelCheckpoint"),
        ({}, Plateau("val/los"), "ReduceLROnPlateau"),
    ],
)
def test_a_typo_is_an_error_that_names_the_metric(
    tmp_path: Path, given: dict[str, Any], model: L.LightningModule | None, owner: str
) -> None:
    with pytest.raises(RunFailedError, match=f"{owner} monitors 'val/los', which is not logged") as error:
        fit(tmp_path, model, max_epochs=4, **given)
    assert error.value.why == "logged are: train/loss, val/loss"
    assert error.value.fix is not None
    assert error.value.fix.startswith("did you mean 'val/loss'?")
    assert all(one.step <= 4 for one in list_checkpoints(tmp_path / "run" / "checkpoints"))  # in the first epoch


def test_what_it_has_trained_is_saved_and_goes_on_with_the_right_name(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError):
        fit(tmp_path, **best("val/los"))
    assert [one.step for one in list_checkpoints(tmp_path / "run" / "checkpoints")] == [4]
    assert fit(tmp_path, **best("val/loss")) == []


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_without_a_validation(tmp_path: Path) -> None:
    """Lightning warns of a ModelCheckpoint's, and trains to the end."""
    with pytest.raises(RunFailedError, match="ModelCheckpoint monitors 'val/loss'") as error:
        fit(tmp_path, validates=False, max_epochs=1, callbacks=[ModelCheckpoint(monitor="val/loss")])
    assert "train/loss" in str(error.value)


@pytest.mark.parametrize(
    ("given", "model", "said"),
    [
        ({"callbacks": [EarlyStopping("val/los", strict=False)]}, None, "EarlyStopping monitors 'val/los'"),
        ({"callbacks": [Own()]}, None, "Own monitors 'val/los'"),
        ({}, Plateau("val/los", strict=False), "ReduceLROnPlateau monitors 'val/los'"),
        # The training ends before its first validation.
        ({**best("val/loss"), "check_val_every_n_epoch": 3}, None, "trainer.checkpoint mon"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Lightning's own, at each epoch
def test_what_need_not_be_there_is_said_once(
    tmp_path: Path, given: dict[str, Any], model: L.LightningModule | None, said: str
) -> None:
    (found,) = fit(tmp_path, model, **given)
    assert found.startswith(said)


class EpochEnd(Line):
    """Logs at the end of an epoch, on rank 0 alone."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("epochs", torch.tensor(float(self.current_epoch)), rank_zero_only=True)


def on_two_ranks(rank: int, root: Path) -> list[str]:
    return fit(root, EpochEnd(), **best("epochs"), devices=2, strategy="ddp")


def test_right_ones_are_left_alone(tmp_path: Path) -> None:
    assert run_ranks(on_two_ranks, 2, tmp_path / "ranks", timeout=120) == [[], []]
    stops = [EarlyStopping("val/loss"), ModelCheckpoint(monitor="train/loss")]
    assert fit(tmp_path / "callbacks", callbacks=stops, check_val_every_n_epoch=2) == []
    assert fit(tmp_path / "plateau", Plateau("val/loss")) == []


class EveryTen(L.Callback):
    """A user's own, which does something at an interval."""

    def __init__(self) -> None:
        self.every_n_steps = 10


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=9)]}, ["ModelCheckpoint(every_n_train_steps=9)"]),
        ({"callbacks": [ModelCheckpoint(every_n_epochs=3)]}, ["ModelCheckpoint(every_n_epochs=3)"]),
        ({"callbacks": [EveryTen()]}, ["EveryTen(every_n_steps=10)"]),
        ({"callbacks": [EveryTen()], "max_epochs": 3}, []),
        ({"check_val_every_n_epoch": 5}, ["the validation(check_val_every_n_epoch=5)"]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 7}, []),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, ["the validation(val_check_interval=9)"]),
    ],
)
def test_an_interval_that_never_comes(tmp_path: Path, given: dict[str, Any], said: list[str]) -> None:
    """Two epochs of four steps each, unless it says otherwise."""
    fit(tmp_path, **given)
    found = events(tmp_path / "run", "interval-never-comes")
    assert [event["what"] for event in found] == [f"{one} never comes" for one in said]


class OfEachRank(Plateau):
    """Logs the loss of a step, which is another one on each rank, or its mean over the epoch."""

    def __init__(self, of_epoch: bool) -> None:
        super().__init__("own")
        self.of_epoch = of_epoch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss, on_step=not self.of_epoch, on_epoch=self.of_epoch)
        return loss


def decide(rank: int, root: Path) -> list[list[str]]:
    said = []
    for of_epoch in (False, True):
        folder = root / str(of_epoch)
        fit(folder, OfEachRank(of_epoch), devices=2, strategy="ddp", callbacks=[EarlyStopping("own")])
        said.append([event["what"] for event in events(folder / "run", "metric-differs")])
    return said


def test_ranks_that_decide_by_numbers_of_their_own(tmp_path: Path) -> None:
    (said, _) = run_ranks(decide, 2, tmp_path, timeout=120)
    assert said == [["the metric 'own' of EarlyStopping and ReduceLROnPlateau differs over the ranks"], []]


class ByHand(Line):
    """Changes its weights itself, or never gives a loss."""

    def __init__(self, steps: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if self.steps:
            self.optimizers().step()  # type: ignore[union-attr]
            return None
        with torch.no_grad():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
        return None


@pytest.mark.parametrize("steps", [True, False])
def test_a_training_without_a_step_is_said(tmp_path: Path, steps: bool) -> None:
    fit(tmp_path, ByHand(steps))
    said = [event.get("what") for event in events(tmp_path / "run", "no-optimizer-step")]
    assert said == ([] if steps else ["no optimizer has stepped in the first 4 batches"])
