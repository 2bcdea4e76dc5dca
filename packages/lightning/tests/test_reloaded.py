"""`train_dataloader` that asks the trainer where it is, in a fit that resumes: it hears where it was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_job import BATCH, SAMPLES, Data, Line, apart, make_trainer, samples
from torch.utils.data import DataLoader, TensorDataset

EPOCH = SAMPLES // BATCH


class ByEpoch(Data):
    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        shift = trainer.current_epoch + 0.01 * trainer.global_step
        moved = [one + 0.01 * shift for one in samples().tensors]
        return DataLoader(TensorDataset(*moved), BATCH, shuffle=True)


@pytest.mark.parametrize("every", [2, *(pytest.param(every, marks=pytest.mark.full) for every in (0, 1, 3))])
def test_a_resume_in_any_epoch_of_a_period_is_given_the_same_loader(tmp_path: Path, every: int) -> None:
    """In its first and its last epoch, between two epochs, and in the next period."""

    def fit(folder: Path, steps: int) -> Line:
        model = Line()
        settings: dict[str, Any] = {"max_steps": steps, "reload_dataloaders_every_n_epochs": every}
        make_trainer(folder, {"seed": 1}, **settings).fit(model, datamodule=ByEpoch())
        return model

    whole = fit(tmp_path / "whole", 5 * EPOCH)
    for steps in (3, EPOCH + 2, 2 * EPOCH, 2 * EPOCH + 5, 3 * EPOCH, 4 * EPOCH + 1, 5 * EPOCH):
        resumed = fit(tmp_path / "cut", steps)
    assert apart(resumed, whole) == 0


class Counting(Data):
    """Has a state that its own loaders change: how many it has made, and the batches that were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.batches = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.made += 1
        # As in Lightning's page on data modules: of an interrupted epoch the rest.
        moved = [one[self.batches % EPOCH * BATCH :] + 0.01 * self.made for one in samples().tensors]
        return DataLoader(TensorDataset(*moved), BATCH, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        trainer: Any = self.trainer
        self.batches += trainer.training
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made, "batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made, self.batches = state_dict["made"], state_dict["batches"]


@pytest.mark.parametrize("every", [0, 1])
def test_a_data_module_with_a_state_makes_the_loader_that_it_had_made(tmp_path: Path, every: int) -> None:
    """Within an epoch Lightning has loaded what it was at the checkpoint, which is behind the making of that loader."""

    def fit(folder: Path, steps: int) -> tuple[Line, dict[str, Any]]:
        model, data = Line(), Counting()
        settings: dict[str, Any] = {"max_steps": steps, "reload_dataloaders_every_n_epochs": every}
        make_trainer(folder, {"seed": 1}, **settings).fit(model, datamodule=data)
        return model, data.state_dict()

    undisturbed, state = fit(tmp_path / "undisturbed", 3 * EPOCH)
    for steps in (3, EPOCH, 2 * EPOCH + 2, 3 * EPOCH):
        resumed, found = fit(tmp_path / "cut", steps)
    assert apart(resumed, undisturbed) == 0
    assert found == state
