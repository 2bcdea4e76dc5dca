"""What the training changes in its datasets and samplers is there again: of the epoch's beginning, and of the stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import pytest
from test_exact_resume import BATCH, SAMPLES, Net, Noisy, assert_equal, at, exactness, run
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"), pytest.mark.full]


class Curriculum(Noisy):
    """Its samples become harder, as somebody says."""

    level = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * self.level, self.y[index]


class Harder(L.Callback):
    """Makes them harder, behind every other batch or each epoch."""

    def __init__(self, epochs: bool, dataset: Callable[[L.Trainer], Curriculum]) -> None:
        self.epochs, self.dataset = epochs, dataset

    def change(self, trainer: L.Trainer) -> None:
        self.dataset(trainer).level += 0.5

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.epochs and batch_idx % 2:
            self.change(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.epochs:
            self.change(trainer)


WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


def over(kind: Any, settings: dict[str, Any], epochs: bool) -> tuple[Callable[[], Any], Callable[[], list[L.Callback]]]:
    """Loaders over such a dataset, and the callback."""
    datasets: list[Curriculum] = []

    def loaders() -> Any:
        datasets[:] = [Curriculum()]  # as in a process of its own
        return kind(datasets[-1], BATCH, shuffle=True, **settings)

    return loaders, lambda: [Harder(epochs, lambda _: datasets[-1])]


@pytest.mark.parametrize(
    ("kind", "settings", "epochs"),
    [(DataLoader, {}, False), (DataLoader, WORKERS, True), (StatefulDataLoader, {}, False)],
)
def test_a_dataset_that_a_callback_changes(tmp_path: Path, kind: Any, settings: dict[str, Any], epochs: bool) -> None:
    """Workers have a copy of it as it was when they began: when the epoch began."""
    loaders, callbacks = over(kind, settings, epochs)
    assert_equal(tmp_path, loaders, at("train", 5), at("train", 12), callbacks=callbacks)
    assert exactness(tmp_path / "killed")["reasons"] == []


CHANGED = "a dataset or sampler that has changed within an epoch"


@pytest.mark.parametrize(("settings", "epochs"), [(WORKERS, False), (PERSISTENT, True)])
def test_a_change_that_workers_do_not_see_is_named(tmp_path: Path, settings: dict[str, Any], epochs: bool) -> None:
    loaders, callbacks = over(DataLoader, settings, epochs)
    run(tmp_path, loaders, callbacks=callbacks, max_epochs=2)
    assert [reason["what"] for reason in exactness(tmp_path)["reasons"]] == [CHANGED]


class Reloading(Net):
    """Gives a loader for each epoch, over a dataset that it keeps, or over a new one."""

    anew = False

    def setup(self, stage: str) -> None:
        self.dataset = Curriculum()

    def train_dataloader(self) -> Any:
        if self.anew and self.current_epoch == 1:
            self.dataset = Curriculum()
        return DataLoader(self.dataset, BATCH, shuffle=True)


class Renewing(Reloading):
    anew = True


@pytest.mark.parametrize(("net", "epochs"), [(Reloading, False), (Renewing, True)])
def test_a_dataset_that_is_changed_while_loaders_are_made_anew(tmp_path: Path, net: type[Net], epochs: bool) -> None:
    def callbacks() -> list[L.Callback]:
        return [Harder(epochs, lambda trainer: cast("Any", trainer.lightning_module).dataset)]

    settings: dict[str, Any] = {"net": net, "callbacks": callbacks, "reload_dataloaders_every_n_epochs": 1}
    assert_equal(tmp_path, lambda: None, at("train", 5), at("train", 10), at("train", 17), **settings)
    assert exactness(tmp_path / "killed")["reasons"] == []


class Mining(Net):
    """Gives some samples a lower weight behind each epoch, in the sampler of its loader."""

    def lower(self, first: int) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.sampler.weights[first : first + 6] *= 0.1

    def on_train_epoch_end(self) -> None:
        self.lower(4 * self.current_epoch)


class MiningAtOnce(Mining):
    """And within the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lower(batch_idx)


def weighted(workers: int = 0) -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    return DataLoader(Noisy(), BATCH, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_of_a_sampler_that_the_model_changes(tmp_path: Path, workers: int) -> None:
    assert_equal(tmp_path, lambda: weighted(workers), at("train", 5), at("train", 12), net=Mining)
    assert exactness(tmp_path / "killed")["reasons"] == []


def test_weights_that_change_within_an_epoch_are_named(tmp_path: Path) -> None:
    run(tmp_path, weighted, net=MiningAtOnce, max_epochs=1)
    assert [reason["what"] for reason in exactness(tmp_path)["reasons"]] == [CHANGED]


class Rotating(Sampler[int]):
    """Begins where it ended."""

    def __init__(self) -> None:
        self.first = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            self.first = (self.first + 3) % SAMPLES
            yield self.first


def test_a_sampler_without_a_state_is_not_known(tmp_path: Path) -> None:
    """It may depend on more than the epoch; this one goes on where it has drawn ahead."""
    run(tmp_path, lambda: DataLoader(Noisy(), BATCH, sampler=Rotating()), max_epochs=1)
    (reason,) = exactness(tmp_path)["reasons"]
    assert reason["what"] == "the sampler Rotating"
    assert not reason["certain"]


class Stages(Sampler[list[int]]):
    """A batch sampler with a method and an attribute of its own."""

    def __init__(self) -> None:
        self.stage, self.step = 0, 3

    def __len__(self) -> int:
        return 7

    def next_stage(self) -> None:
        self.stage += 1

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(7):
            yield [(number * self.step + offset + self.stage) % SAMPLES for offset in range(BATCH)]


class Staging(Net):
    """Finds its batch sampler where Lightning has it."""

    def on_train_epoch_end(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.batch_sampler.next_stage()
        loader.batch_sampler.step += 2


def test_a_batch_sampler_is_found_in_its_loader(tmp_path: Path) -> None:
    assert_equal(tmp_path, lambda: DataLoader(Noisy(), batch_sampler=Stages()), at("train", 12), net=Staging)
    (reason,) = exactness(tmp_path / "killed")["reasons"]
    assert not reason["certain"]
