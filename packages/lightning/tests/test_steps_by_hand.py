"""Modules that step their optimizers themselves: what is saved, and under which name, goes by what was trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import BATCH, SAMPLES, Data, Line, apart, contents, events, latest, make_trainer
from torch import Tensor

EPOCH = SAMPLES // BATCH


class ByHand(Line):
    """Steps in `training_step`, uncounted by Lightning; stops itself behind `stop` batches."""

    resume_attributes: Any = ("batches", "own")
    stop = -1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches = 0

    def raw(self) -> list[Any]:
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.raw():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.update(batch_idx)

    def update(self, batch_idx: int) -> None:
        for optimizer in self.raw():
            optimizer.step()

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        if self.batches == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)


class InAHook(ByHand):
    """Lightning counts its own wrapper's steps in `training_step` alone."""

    def update(self, batch_idx: int) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        super().on_train_batch_end()


class ItsOwn(ByHand):
    """An optimizer that Lightning never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.Adam(self.parameters(), lr=0.05)

    def raw(self) -> list[Any]:
        return [self.own]

    def configure_optimizers(self) -> None: ...


class Both(ByHand):
    """One of two optimizers is counted; an inner loop's, which has none of the weights, is not to be."""

    def update(self, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        counted, other = optimizers
        counted.step()
        other.optimizer.step()
        latent = torch.nn.Parameter(torch.zeros(1))
        latent.grad = torch.ones(1)
        torch.optim.SGD([latent], lr=1.0).step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam([one], lr=0.05) for one in self.net.parameters()]


class Seldom(ByHand):
    """Counted steps, each over `over` batches."""

    over = 5

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(Line.training_step(self, batch, batch_idx))
        optimizer: Any = self.optimizers()
        if (self.batches + 1) % self.over == 0:
            optimizer.step()
            optimizer.zero_grad()


class Never(Seldom):
    """The run is over before the first step, as in an accumulation over very many batches."""

    over = 10_000


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("kind", [ByHand, InAHook, ItsOwn, Both, Seldom, Never])
def test_a_stop_saves_what_was_trained_and_a_resume_goes_on_there(
    tmp_path: Path, kind: type[ByHand], capfd: pytest.CaptureFixture[str]
) -> None:
    def fit(folder: Path, stop: int = -1) -> ByHand:
        model = kind()
        model.stop = stop
        make_trainer(folder, max_epochs=3).fit(model, datamodule=Data())
        return model

    whole = fit(tmp_path / "whole")
    trained = {Both: 6 * EPOCH, Seldom: 3 * EPOCH // 5, Never: 0}.get(kind, 3 * EPOCH)
    assert whole.trainer.global_step == latest(tmp_path / "whole" / "run").step == trained
    assert ("steps-uncounted" in capfd.readouterr().out) == (not issubclass(kind, Seldom))

    stop = EPOCH + 3
    with pytest.raises(SystemExit):
        fit(tmp_path / "cut", stop)
    run = tmp_path / "cut" / "run"
    saved = latest(run)
    state = torch.load(saved.path / "state.ckpt", weights_only=True)
    assert saved.metadata["epoch"] == 1
    assert state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"] == stop

    resumed = fit(tmp_path / "cut")
    assert resumed.batches == 3 * EPOCH
    assert apart(resumed, whole) == 0
    assert latest(run).metadata["epoch"] == 3
    assert events(run, "finished")[-1]["epoch"] == 3
    assert contents(run)["metrics.csv"] == contents(tmp_path / "whole" / "run")["metrics.csv"]


def test_max_steps_counts_them(tmp_path: Path) -> None:
    model = ByHand()
    make_trainer(tmp_path, max_steps=EPOCH + 2, max_epochs=9).fit(model, datamodule=Data())
    assert model.batches == EPOCH + 2
