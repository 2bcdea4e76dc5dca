"""A run that is killed and started again ends with the bits of one that was not: each kind of loader, each place."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, StochasticWeightAveraging
from tiny_job import contents
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)
from torchdata import nodes  # type: ignore[import-untyped]
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from fairlead import RunConfig, Trainer, TrainerConfig

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

SAMPLES, BATCH = 26, 4  # seven batches an epoch, the last of two samples


class KilledError(Exception):
    """What ends a run here; nothing of it is caught, and nothing of it is saved."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from all three global generators."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(6) * random.random() * np.random.rand()
        return self.x[index] + noise, self.y[index]


class Quiet(Noisy):
    """Samples without noise."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Net(L.LightningModule):
    """Everything that is easily lost: dropout, batch norm, epoch means, a metric, a plateau schedule on the mean."""

    def __init__(self, kill: Callable[[Net, str, int], bool]) -> None:
        super().__init__()
        self.kill = kill
        parts = (torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 2))
        self.net = torch.nn.Sequential(*parts)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        out = self.net(x)
        return torch.nn.functional.cross_entropy(out, y), out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else [batch]
        loss, out = self._loss(batches[0])
        for more in batches[1:]:
            loss = loss + self._loss(more)[0]
        self.accuracy(out, batches[0][1])
        self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(out))
        if self.kill(self, "train", batch_idx):
            raise KilledError
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.kill(self, "validate", batch_idx):
            raise KilledError
        self.log("val/loss", self._loss(batch)[0] + 0.01 * torch.rand(()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tag"] = random.random() * float(torch.rand(()))  # a run that resumes here draws it no more

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train/loss_epoch"}}


def never(model: Net, phase: str, batch_idx: int) -> bool:
    return False


def at(phase: str, step: int) -> Callable[[Net, str, int], bool]:
    """In the step after `step` of them, or in the second batch of the validation behind it."""

    def kill(model: Net, now: str, batch_idx: int) -> bool:
        wanted = now == phase and model.trainer.global_step == step and not model.trainer.sanity_checking
        return wanted and (phase == "train" or batch_idx == 1)

    return kill


def make_trainer(root: Path, **config: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "val_check_interval": 0.5,
        "log_every_n_steps": 1,
        "checkpoint": {"every_n_steps": 1, "keep_last": 2},
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        TrainerConfig.model_validate({**settings, **config}), run=RunConfig(name="run", dir=str(root), seed=7)
    )


def run(root: Path, loaders: Callable[[], Any], kill: Callable[[Net, str, int], bool] = never, **config: Any) -> Any:
    """One start; the weights at its end, and the rows of metrics.csv."""
    L.seed_everything(7, workers=True, verbose=False)
    callbacks = config.pop("callbacks", list)
    model, trainer = config.pop("net", Net)(kill), make_trainer(root, **config)
    vars(trainer)["callbacks"] += callbacks()
    data = loaders()
    if isinstance(data, L.LightningDataModule):
        trainer.fit(model, datamodule=data)
    else:
        trainer.fit(model, data, DataLoader(Noisy(10), batch_size=3))
    return {name: value.clone() for name, value in model.state_dict().items()}, (root / "run/metrics.csv").read_bytes()


def assert_equal(
    root: Path, loaders: Callable[[], Any], *kills: Callable[[Net, str, int], bool], **config: Any
) -> None:
    """KilledError at each of these places, one start after the other, the run ends as the undisturbed one."""
    weights, rows = run(root / "undisturbed", loaders, **config)
    for kill in kills:
        with pytest.raises(KilledError):
            run(root / "killed", loaders, kill, **config)
    again, rows_again = run(root / "killed", loaders, **config)
    assert [name for name, value in weights.items() if not torch.equal(value, again[name])] == []
    assert rows_again.decode().splitlines() == rows.decode().splitlines()


def exactness(root: Path) -> dict[str, Any]:
    """What the last start has seen."""
    starts = sorted((root / "run/starts").iterdir(), key=lambda p: int(p.name))
    found: dict[str, Any] = json.loads((starts[-1] / "exactness.json").read_text())
    return found


def shuffled(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=workers)


def weighted(workers: int = 0) -> DataLoader[Any]:
    weights = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(3))
    sampler = WeightedRandomSampler(weights.tolist(), SAMPLES)
    return DataLoader(Noisy(), batch_size=BATCH, sampler=sampler, num_workers=workers)


def two(workers: int = 0) -> dict[str, DataLoader[Any]]:
    """The shorter one is gone through more than once an epoch."""
    return {"long": shuffled(workers), "short": DataLoader(Noisy(10), batch_size=BATCH, shuffle=True)}


def explicit(workers: int = 0) -> DataLoader[Any]:
    """The default, written out; with a generator of its own, as tutorials have it."""
    generator = torch.Generator().manual_seed(5)
    sampler = BatchSampler(RandomSampler(range(SAMPLES), generator=generator), BATCH, drop_last=False)
    return DataLoader(Noisy(), batch_sampler=sampler, num_workers=workers)


class Own(Sampler[list[int]]):
    """A batch sampler of the user's, with a state: it goes through the data in one order that never ends."""

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(7):
            self.drawn += 1
            yield [(self.drawn * 5 + offset * 3) % SAMPLES for offset in range(BATCH)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": np.int64(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])


def own(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_sampler=Own(), num_workers=workers)


def stateful(workers: int = 0) -> Any:
    dataset = Quiet() if workers else Noisy()  # its workers' generators are not in its state
    return StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Without a length; its place is its state."""

    def __init__(self) -> None:
        self.given = 0

    data: type[Noisy] = Noisy

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.data()
        while self.given < SAMPLES:
            self.given += 1
            yield data[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def stream(workers: int = 0) -> Any:
    return StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=workers)


KINDS = (shuffled, weighted, two, own, explicit)


IN_FULL = [pytest.param(kind, marks=pytest.mark.full) for kind in KINDS if kind is not shuffled]


@pytest.mark.parametrize("loaders", [shuffled, *IN_FULL, stateful])
def test_killed_in_a_step(tmp_path: Path, loaders: Callable[[], Any]) -> None:
    """In the first, a middle and the last step of an epoch, and in validations; a start behind the other.

    A validation that is due is run from its start, so that the metrics have no gap. The kill in step 10 comes when it
    was saved behind such a one, and no batch had been drawn since the start.
    """
    places = [("train", 1), ("validate", 3), ("validate", 10), ("train", 10), ("validate", 13), ("train", 13)]
    assert_equal(tmp_path, loaders, *(at(phase, step) for phase, step in places))
    assert exactness(tmp_path / "killed")["exact"]


@pytest.mark.parametrize("loaders", [shuffled, *(pytest.param(kind, marks=pytest.mark.full) for kind in (two, own))])
def test_killed_in_a_step_with_workers(tmp_path: Path, loaders: Callable[[int], Any]) -> None:
    """Workers draw ahead, and make random samples: the position counts what was trained on."""
    assert_equal(tmp_path, lambda: loaders(2), at("train", 4), at("train", 13))


@pytest.mark.parametrize("loaders", [shuffled, two, stateful])
def test_stopped_behind_the_last_batch_of_an_epoch(tmp_path: Path, loaders: Callable[[], Any]) -> None:
    """SIGTERM: that batch is saved, the validation behind it is not waited for."""
    weights, rows = run(tmp_path / "undisturbed", loaders, val_check_interval=1.0)

    def stop(model: Net, phase: str, batch_idx: int) -> bool:
        if phase == "train" and model.trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    with pytest.raises(SystemExit):
        run(tmp_path / "stopped", loaders, stop, val_check_interval=1.0)
    again, rows_again = run(tmp_path / "stopped", loaders, val_check_interval=1.0)
    assert [name for name, value in weights.items() if not torch.equal(value, again[name])] == []
    assert rows_again.decode().splitlines() == rows.decode().splitlines()


@pytest.mark.parametrize("loaders", [stateful, stream])
def test_loaders_with_a_state_are_carried(tmp_path: Path, loaders: Callable[[], Any]) -> None:
    """torchdata's StatefulDataLoader, with a length and without."""
    config = {"val_check_interval": 1.0} if loaders is stream else {}
    assert_equal(tmp_path, loaders, at("train", 4), at("train", 13), **config)
    assert exactness(tmp_path / "killed")["exact"] is (loaders is stateful)  # a stream's own state is trusted


@pytest.mark.full
def test_a_loader_with_a_state_and_workers_is_carried(tmp_path: Path) -> None:
    assert_equal(tmp_path, lambda: stateful(2), at("train", 4), at("train", 13))
    assert not exactness(tmp_path / "killed")["exact"]  # nobody knows whether its samples are random


def test_killed_while_gradients_accumulate(tmp_path: Path) -> None:
    """Three micro-batches a step, and one in an epoch's last: nothing is saved between them."""
    kills = [at("train", step) for step in (1, 2, 3, 4, 5)]
    assert_equal(tmp_path, shuffled, *kills, accumulate_grad_batches=3, val_check_interval=1.0)


@pytest.mark.full
@pytest.mark.parametrize("place", [at("validate", 1), at("train", 4)])
def test_killed_at_a_validation_between_micro_batches(tmp_path: Path, place: Callable[[Net, str, int], bool]) -> None:
    """It is due behind every second batch of seven, three of which make a step: nothing is saved in between."""
    assert_equal(tmp_path, shuffled, place, accumulate_grad_batches=3, val_check_interval=2)
    saved = contents_of_history(tmp_path / "undisturbed")
    assert {event["reason"] for event in saved} >= {"validation"}


def contents_of_history(root: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (root / "run/history.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "checkpoint"]


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 5])
def test_killed_under_a_schedule_of_accumulation(tmp_path: Path, step: int) -> None:
    """Lightning sets what holds for an epoch where one begins; a run that goes on inside it begins none."""
    assert_equal(
        tmp_path,
        shuffled,
        at("train", step),
        val_check_interval=1.0,
        callbacks=lambda: [GradientAccumulationScheduler({0: 2, 1: 3})],
    )


class Manual(Net):
    """It steps after every second batch of all, so that a gradient waits from one epoch of seven for the next."""

    def __init__(self, kill: Callable[[Net, str, int], bool]) -> None:
        super().__init__(kill)
        self.automatic_optimization = False
        self.batches = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        self.batches += 1
        optimizer: Any = self.optimizers()
        if self.batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("step", [5])
def test_killed_while_a_loop_accumulates_by_itself(tmp_path: Path, step: int) -> None:
    checkpoint = {"every_n_steps": None, "every_n_epochs": 1, "on_validation": False}
    assert_equal(tmp_path, shuffled, at("train", step), net=Manual, checkpoint=checkpoint)


def test_killed_with_a_limit_of_steps(tmp_path: Path) -> None:
    """The limit is inside an epoch."""
    assert_equal(tmp_path, shuffled, at("train", 9), at("train", 14), max_epochs=-1, max_steps=17)


def test_killed_between_rare_checkpoints(tmp_path: Path) -> None:
    """Steps that are done again do not appear twice in metrics.csv."""
    rare = {"every_n_steps": 5, "every_n_epochs": None, "on_validation": False}
    assert_equal(tmp_path, shuffled, at("train", 4), at("train", 12), checkpoint=rare)


@pytest.mark.full
def test_killed_with_fewer_batches_than_the_data_have(tmp_path: Path) -> None:
    assert_equal(tmp_path, shuffled, at("train", 7), at("train", 12), limit_train_batches=5, val_check_interval=1.0)


def test_every_module_comes_back_in_its_mode(tmp_path: Path) -> None:
    """A hook that has frozen a part at the start of the epoch is not called again inside it."""

    class Freezes(Net):
        def on_train_epoch_start(self) -> None:
            self.net[1].eval()
            self.net[0].requires_grad_(False)

    def one(root: Path, kill: Callable[[Net, str, int], bool] = never) -> Any:
        L.seed_everything(7, workers=True, verbose=False)
        model = Freezes(kill)
        make_trainer(root, max_epochs=1).fit(model, shuffled(), DataLoader(Noisy(10), batch_size=3))
        return model.state_dict()

    weights = one(tmp_path / "undisturbed")
    with pytest.raises(KilledError):
        one(tmp_path / "killed", at("train", 4))
    again = one(tmp_path / "killed")
    assert [name for name, value in weights.items() if not torch.equal(value, again[name])] == []


# -- what cannot be gone on with is never called exact


class Unknown(Sampler[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class UnknownBatches(BatchSampler):
    """Derives from torch's, but nobody knows what it adds."""


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = Noisy()
        return (data[index] for index in range(SAMPLES))


class OwnGenerator(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.rng.normal(), self.y[index]


class Batches:
    """A loader that is no DataLoader."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(BATCH, 6), torch.zeros(BATCH, dtype=torch.long))] * 3)


class Cutting(DataLoader[Any]):
    """Does something to the batches."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


class Unwritable(Own):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


@pytest.mark.parametrize(
    ("loaders", "what"),
    [
        (lambda: DataLoader(Endless(), batch_size=BATCH), "IterableDataset Endless"),
        (lambda: DataLoader(Noisy(), batch_size=BATCH, sampler=Unknown()), "sampler Unknown"),
        (lambda: DataLoader(Noisy(), batch_sampler=UnknownBatches(range(SAMPLES), 4, False)), "UnknownBatches"),
        (lambda: DataLoader(OwnGenerator(), batch_size=BATCH, num_workers=1), "what a loader's workers keep"),
        (lambda: Batches(), "the loader Batches"),
        (lambda: Cutting(Noisy(), batch_size=BATCH), "the __iter__ of Cutting"),
        (lambda: DataLoader(Noisy(), batch_size=BATCH, num_workers=1, in_order=False), "in_order=False"),
    ],
)
def test_an_inexact_loader_is_not_called_exact(tmp_path: Path, loaders: Callable[[], Any], what: str) -> None:
    """It trains all the same, and says what to do."""
    run(tmp_path, loaders, max_steps=2, max_epochs=-1, val_check_interval=1.0)
    found = exactness(tmp_path)
    assert not found["exact"]
    assert [reason for reason in found["reasons"] if what in reason["what"] and reason["fix"]]


class Buffered(Stream):
    """It shuffles in a buffer that is not in its state, as Hugging Face's `shuffle` does."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.insert(len(buffer) // 2, sample)
            if len(buffer) > 5:
                yield buffer.pop(0)
        yield from buffer


def in_nodes() -> Any:
    """Torchdata's nodes over a sampler whose generator is in no state of theirs."""
    data = Quiet()
    order = nodes.SamplerWrapper(RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5)))
    batches = nodes.Batcher(nodes.Mapper(order, data.__getitem__), BATCH, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, default_collate))


@pytest.mark.parametrize("loaders", [lambda: StatefulDataLoader(Buffered(), batch_size=BATCH), in_nodes])
def test_a_state_that_is_trusted_is_not_called_exact(tmp_path: Path, loaders: Callable[[], Any]) -> None:
    """What it leaves out is not seen."""
    run(tmp_path, loaders, val_check_interval=1.0, max_epochs=1)
    (reason,) = exactness(tmp_path)["reasons"]
    assert reason["what"].startswith("the state of a")
    assert not reason["certain"]


def test_a_state_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    """The checkpoint is there, without the place in the data."""
    run(tmp_path, lambda: DataLoader(Noisy(), batch_sampler=Unwritable()), max_steps=2, max_epochs=-1)
    assert "state.ckpt" in {Path(name).name for name in contents(tmp_path / "run/checkpoints")}


class Growing(Net):
    """Gives another loader each time it is asked, by what it keeps and by the global generators."""

    def __init__(self, kill: Callable[[Net, str, int], bool] = never) -> None:
        super().__init__(kill)
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        samples = BATCH * (2 + self.asked) + int(torch.randint(0, BATCH, ()))
        return DataLoader(Noisy(samples), BATCH, shuffle=True, drop_last=True)


@pytest.mark.parametrize(
    ("epochs", "kills"), [(1, (at("train", 5), at("train", 9))), (2, (at("train", 3), at("train", 8)))]
)
def test_loaders_that_are_made_anew_are_those_of_the_undisturbed_run(tmp_path: Path, epochs: int, kills: Any) -> None:
    """`reload_dataloaders_every_n_epochs`: killed in an epoch with new loaders and in one with those of before."""
    config = {"reload_dataloaders_every_n_epochs": epochs, "max_epochs": 4, "net": Growing}
    assert_equal(tmp_path, lambda: None, *kills, **config)
    assert exactness(tmp_path / "killed")["reasons"] == []


class Sized(Net):
    """Its batch size is what Lightning's finder sets."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), self.batch_size, shuffle=True, drop_last=True)


def test_a_batch_size_that_was_found_is_not_looked_for_again(tmp_path: Path) -> None:
    """It would be looked for with other generators, and from where the run is."""
    searches = []

    class Finder(BatchSizeFinder):
        def scale_batch_size(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            searches.append(trainer.global_step)
            super().scale_batch_size(trainer, pl_module)

    def finder() -> list[L.Callback]:
        return [Finder(steps_per_trial=1, max_trials=2)]

    assert_equal(tmp_path, lambda: None, at("train", 2), at("train", 7), net=Sized, callbacks=finder, max_epochs=2)
    assert searches == [0, 0]  # of the undisturbed run, and of the first start of the other


class Estimating(Sized):
    """Asks for the number of steps before its batch size is found, or put back."""

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.full
@pytest.mark.parametrize("step", [6, 7])
def test_steps_that_are_estimated_before_a_batch_size_is_found(tmp_path: Path, step: int) -> None:
    """Killed in the middle of an epoch, and behind the last batch of one."""

    def finder() -> list[L.Callback]:
        return [BatchSizeFinder(steps_per_trial=1, max_trials=2)]

    best = {"every_n_steps": 1, "keep_last": 2, "monitor": "val/loss"}  # saved also when a validation is over
    assert_equal(
        tmp_path, lambda: None, at("train", step), net=Estimating, callbacks=finder, max_epochs=2, checkpoint=best
    )


def averages_are_plain_data() -> bool:
    """Whether the state of the callback's schedule is; on torch 2.9 it holds a function, which no resume reads."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return "anneal_func" not in torch.optim.swa_utils.SWALR(optimizer, 0.1).state_dict()


@pytest.mark.skipif(not averages_are_plain_data(), reason="the state of torch 2.9's SWALR holds a function")
@pytest.mark.full
@pytest.mark.parametrize(("net", "batch"), [(Manual, 0), (Net, 4)])
def test_weights_are_averaged_also_behind_a_stop_in_the_epoch_for_batch_norm(
    tmp_path: Path, net: type[Net], batch: int
) -> None:
    """The callback trains no weights there, and does not begin again by itself."""

    def kill(model: Net, phase: str, batch_idx: int) -> bool:
        return phase == "train" and model.current_epoch == 3 and batch_idx == batch

    def averaging() -> list[L.Callback]:
        return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]

    window = {} if net is Manual else {"accumulate_grad_batches": 3}  # the last one is not full
    assert_equal(tmp_path, shuffled, kill, net=net, callbacks=averaging, **window)
    kept = [
        torch.load(next((tmp_path / run).rglob("last/state.ckpt")), weights_only=False)["callbacks"]
        for run in ("undisturbed", "killed")
    ]
    first, again = (one["StochasticWeightAveraging"] for one in kept)
    assert (again["n_averaged"], again["latest_update_epoch"]) == (first["n_averaged"], first["latest_update_epoch"])
    assert again["scheduler_state"] == first["scheduler_state"]


class Configured(Net):
    """Its batch size lies in its hyperparameters."""

    def __init__(self, kill: Callable[[Net, str, int], bool]) -> None:
        super().__init__(kill)
        self.save_hyperparameters(AttributeDict(batch_size=2, width=16))

    def train_dataloader(self) -> Any:
        assert type(self.hparams) is AttributeDict
        return DataLoader(Noisy(), self.hparams["batch_size"], shuffle=True, drop_last=True)


@pytest.mark.full
def test_a_batch_size_that_was_found_is_kept_in_hyperparameters(tmp_path: Path) -> None:
    def finder() -> list[L.Callback]:
        return [BatchSizeFinder(steps_per_trial=1, max_trials=2)]

    assert_equal(tmp_path, lambda: None, at("train", 2), at("train", 7), net=Configured, callbacks=finder, max_epochs=2)
    assert exactness(tmp_path / "killed")["reasons"] == []
