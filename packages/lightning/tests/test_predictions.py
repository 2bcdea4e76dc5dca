"""`DistributedPredictionWriter` and `Trainer.distributed_predict`: real trainers, on one rank and on two."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from tiny_job import Line, make_trainer, plain, samples
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from fairlead.errors import ConfigError, FingerprintError, RunDirectoryError, UserCodeError
from fairlead_distributed import Predictions, RankFailedError
from fairlead_distributed.testing import run_ranks
from fairlead_lightning import DistributedPredictionWriter
from fairlead_runs.commit import Syscalls

COUNT = 37


class Shuffled(Sampler[list[int]]):
    """A batch sampler of the user's own: random, of unequal batches, and not all samples."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(COUNT), 30)
        yield from (order[:7], order[7:9], order[9:])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(7.0)


class Numbered(L.LightningModule):
    """Says which samples it is asked for, and fails or is killed at one of them."""

    def __init__(self, at: int = -1, kill: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["at", "kill"])
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 4)
        self.at, self.kill = at, kill
        self.asked: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        (x, number) = batch
        if self.at in number.tolist():
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no luck")
        self.asked += number.tolist()
        return {"logits": self.net(x), "number": number, "name": [f"s{one}" for one in number.tolist()]}


class Echo(L.LightningModule):
    """Returns the batch, or fails."""

    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at = at

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at:
            raise ValueError("no luck")
        return batch

    def configure_optimizers(self) -> None:
        """Nothing is trained."""


def data(count: int = COUNT) -> TensorDataset:
    return TensorDataset(samples(count).tensors[0], torch.arange(count))


def loaders() -> list[DataLoader[Any]]:
    return [
        DataLoader(data(), batch_size=4),
        DataLoader(data(3), batch_size=2),
        DataLoader(data(), batch_sampler=Shuffled()),
    ]


def predict(out: Path | None, model: L.LightningModule | None = None, *, ranks: int = 1, **settings: Any) -> Any:
    writer = DistributedPredictionWriter(out, shard_mib=settings.pop("shard_mib", 64))
    given = settings.pop("loaders", None)
    spread = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer = plain(callbacks=[writer], **spread, **settings)
    trainer.predict(model or Numbered(), given if given is not None else loaders(), return_predictions=False)
    return writer


def on_ranks(rank: int, ranks: int, root: Path, at: int = -1) -> list[int]:
    """Plain Lightning on several ranks, a shard for each batch; killed where it comes to sample `at`."""
    model = Numbered(at, kill=True)
    predict(root / "out", model, ranks=ranks, shard_mib=0)
    return model.asked


def bits(folder: Path) -> list[Any]:
    return [(one["number"].item(), one["name"], one["logits"].numpy().tobytes()) for one in Predictions(folder)]


def test_any_number_of_ranks_and_kills_give_the_same_bits(tmp_path: Path) -> None:
    """One rank undisturbed; two; and two of which one is killed, gone on with by one rank, and that by three."""
    (writer,) = [predict(tmp_path / "one" / "out")]
    assert writer.path == tmp_path / "one" / "out"
    one = bits(tmp_path / "one" / "out")
    assert [number for number, *_ in one[: COUNT + 3]] == [*range(COUNT), *range(3)]
    assert len({number for number, *_ in one[COUNT + 3 :]}) == len(one) - COUNT - 3 == 30
    assert all(name == f"s{number}" for number, name, _ in one)

    asked = run_ranks(on_ranks, 2, 2, tmp_path / "two")
    assert bits(tmp_path / "two" / "out") == one
    assert [numbers[:6] for numbers in asked] == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 12, 13]], "both have work"

    with pytest.raises(RankFailedError):
        run_ranks(on_ranks, 2, 2, tmp_path / "kills", 30)
    there = len(list((tmp_path / "kills" / "out").glob("loader-*")))
    assert there >= 1
    with pytest.raises(ValueError, match="no luck"):
        predict(tmp_path / "kills" / "out", Numbered(36))
    left = run_ranks(on_ranks, 3, 3, tmp_path / "kills")
    assert bits(tmp_path / "kills" / "out") == one
    assert sum(map(len, left)) < COUNT, "what was there is not done again"


def test_a_shard_is_written_when_it_is_full_and_at_an_error(tmp_path: Path) -> None:
    """An error, or a stop, keeps the batches before it; without, what is predicted stays in memory no longer."""
    model = Numbered(20)
    with pytest.raises(ValueError, match="no luck"):
        predict(tmp_path / "out", model)
    assert len(list((tmp_path / "out").glob("loader-0-*"))) == 1
    again = Numbered()
    predict(tmp_path / "out", again)
    assert again.asked[:4] == [20, 21, 22, 23]
    small = predict(tmp_path / "small", shard_mib=300 / 2**20)
    assert len(list((tmp_path / "small").glob("loader-0-*"))) == 4
    assert bits(tmp_path / "small") == bits(tmp_path / "out")
    trainer = plain(callbacks=[small])
    assert trainer.limit_predict_batches == 1.0


def test_limits_empty_loaders_and_loaders_without_batches(tmp_path: Path) -> None:
    writer = predict(tmp_path / "limit", limit_predict_batches=2, loaders=[DataLoader(data(), batch_size=4)])
    assert len(writer.predictions()) == 8
    empty: Any = DataLoader(TensorDataset(torch.zeros(0)))
    assert len(predict(tmp_path / "empty", Echo(), loaders=empty).predictions()) == 0
    each: Any = DataLoader(torch.arange(6).view(3, 2), batch_size=None)  # type: ignore[arg-type]
    assert predict(tmp_path / "each", Echo(), loaders=each).predictions()[2].tolist() == [4, 5]
    workers: Any = DataLoader(data(), batch_size=4, num_workers=2, in_order=False)
    assert bits(predict(tmp_path / "workers", loaders=workers).path)[:8] == bits(tmp_path / "limit")


def stream_on_two(rank: int, out: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        predict(out, Echo(), ranks=2, loaders=DataLoader(Stream(), batch_size=2))
    return str(raised.value)


def test_a_stream_is_numbered_on_one_rank_and_refused_on_two(tmp_path: Path) -> None:
    loader: Any = DataLoader(Stream(), batch_size=2)
    with pytest.raises(ValueError, match="no luck"):
        predict(tmp_path / "out", Echo(at=2), loaders=loader)
    assert [int(one) for one in predict(tmp_path / "out", Echo(), loaders=loader).predictions()] == list(range(7))
    with pytest.raises(ConfigError, match="no share can be taken of a loader that has no length"):
        predict(tmp_path / "half", Echo(), limit_predict_batches=0.5, loaders=loader)
    said = run_ranks(stream_on_two, 2, tmp_path / "two")
    assert "the predictions of a stream (Stream) cannot be distinguished on 2 ranks" in said[0]
    assert "trainer.devices=1" in said[0]


@pytest.mark.filterwarnings("ignore:predict returned None")  # Lightning's
@pytest.mark.parametrize("returned", [None, 0.5, torch.zeros(3)])
def test_what_cannot_be_told_apart_is_refused_at_the_first_batch(returned: Any, tmp_path: Path) -> None:
    class Returns(Echo):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    with pytest.raises(UserCodeError) as raised:
        predict(tmp_path / "out", Returns(), loaders=DataLoader(data(), batch_size=4))
    assert "predict_step returned" in raised.value.what


def test_other_weights_or_another_loader_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict(tmp_path / "out")
    idle = Numbered()
    predict(tmp_path / "out", idle)
    assert idle.asked == [], "they are there already"
    other = Numbered()
    with torch.no_grad():
        other.net.bias[0] += 1
    with pytest.raises(FingerprintError) as raised:
        predict(tmp_path / "out", other)
    assert "weights.net.bias: " in str(raised.value.why)
    assert "weights.net.weight" not in str(raised.value.why)
    with pytest.raises(FingerprintError) as raised:
        predict(tmp_path / "out", loaders=[DataLoader(data(), batch_size=5), *loaders()[1:]])
    assert "batch_size: 4 -> 5" in str(raised.value.why)

    def full(self: Syscalls, fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Syscalls, "fsync", full)
    with pytest.raises(RunDirectoryError, match="cannot write predictions"):
        predict(tmp_path / "full")


def test_a_trainer_of_a_run_predicts_into_its_directory(tmp_path: Path) -> None:
    """Numbered folders in the run directory; an interrupted one goes on, a complete one is left."""
    trainer = make_trainer(tmp_path)
    found = trainer.distributed_predict(Numbered(), dataloaders=loaders()[0], ckpt_path="never")
    assert found is not None
    assert (found.folder, len(found), len(list(found))) == (tmp_path / "run" / "predictions-1", COUNT, COUNT)
    with pytest.raises(ValueError, match="no luck"):
        trainer.distributed_predict(Numbered(20), loaders()[0], ckpt_path="never")
    model = Numbered()
    second = trainer.distributed_predict(model, loaders()[0], ckpt_path="never")
    assert second is not None
    assert (second.folder.name, model.asked[0]) == ("predictions-2", 20)
    third = trainer.distributed_predict(
        Line(), DataLoader(samples(), batch_size=4), output_dir=tmp_path / "there", ckpt_path="never"
    )
    assert third is not None
    assert (third.folder, third[0].shape) == (tmp_path / "there", (1,))
    assert not any(isinstance(one, DistributedPredictionWriter) for one in vars(trainer)["callbacks"])
