"""What ranks of a training do together: epochs that end together, `self.all_reduce`, barriers, equal weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from tiny_job import Data, Line, events, loader, make_trainer, plain, samples, weights
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from fairlead import Fairlead, FairleadError
from fairlead_distributed.run import opening
from fairlead_distributed.testing import run_ranks

BATCHES = (5, 3)
"""How many batches of four each of two ranks has."""
EPOCHS = 2


def own(rank: int) -> list[int]:
    """The samples of a rank: its own first ones."""
    return list(range(40)[rank :: len(BATCHES)][: 4 * BATCHES[rank]])


class Stream(IterableDataset[Any]):
    """Samples of which nobody knows how many there are."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        data = samples(40)
        return (data[index] for index in self.indices)


class Reports(Line):
    """Sees where it is, reduces over the ranks by itself, and waits at a barrier."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_all: dict[str, Any] = {"steps": [], "validated": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen_all["steps"].append((self.current_epoch, batch_idx))
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0 and self.current_epoch == 0:
            all_reduce: Any = self.all_reduce
            mine = torch.tensor([1.0, 10.0 * self.global_rank])
            self.seen_all["mean"] = all_reduce(mine, reduce_op="mean").tolist()
            self.seen_all["others"] = [all_reduce(mine, op).tolist() for op in ("sum", "max")]
            self.seen_all["number"] = float(all_reduce(self.global_rank))
            self.seen_all["kept"] = mine.tolist()
            if self.global_rank == 1:
                time.sleep(0.4)
            self.seen_all["arrived"] = time.monotonic()
            self.trainer.strategy.barrier()
            self.seen_all["passed"] = time.monotonic()
        return loss

    def on_validation_start(self) -> None:
        self.seen_all["validated"].append(self.global_step)


class Drifts(Line):
    """Rank 1 changes a weight by itself behind its fifth step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 5 and self.global_rank == 1:
            self.net.bias.data.add_(1e-3)


class Keeps(Line):
    """Each rank keeps something of its own behind its last step: a buffer, or a tensor in its optimizer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.queue: Any = torch.nn.Buffer(torch.zeros(2))
        self.cache: Any = torch.nn.Buffer(torch.zeros(2), persistent=False)
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        normed: Tensor = self.norm(self.net(batch[0]))
        return super().training_step(batch, batch_idx) + normed.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 8:
            self.cache.fill_(self.global_rank)
            if self.what == "buffer":
                self.queue.fill_(self.global_rank)
            else:
                self.trainer.optimizers[0].state[self.net.bias]["exp_avg"].add_(self.global_rank)


LOCAL: dict[str, Any] = {"use_distributed_sampler": True, "strategy": {"name": "ddp", "broadcast_buffers": False}}
SETTINGS: dict[str, Any] = {"devices": 2, "strategy": "ddp", "max_epochs": EPOCHS}


def train(model: L.LightningModule, root: Path, train_data: Any, **config: Any) -> dict[str, Any]:
    trainer = make_trainer(root, **{**SETTINGS, "use_distributed_sampler": False, **config})
    try:
        trainer.fit(model, DataLoader(train_data, batch_size=4), DataLoader(samples(8), batch_size=4))
    except FairleadError as error:
        return {"error": error.block(), "step": trainer.global_step, "kind": type(error).__name__}
    return {
        "counted": trainer.global_step,
        "weights": weights(model),
        "left": "all_reduce" in vars(model),
        **getattr(model, "seen_all", {}),
    }


def on_two_ranks(rank: int, root: Path) -> dict[str, Any]:
    own_part = Subset(samples(40), own(rank))
    got: dict[str, Any] = {
        "sized": train(Reports(), root / "sized", own_part, val_check_interval=0.5),
        "stream": train(Reports(), root / "stream", Stream(own(rank)), accumulate_grad_batches=2),
        "empty": train(Line(), root / "empty", Stream([] if rank else own(0))),
        "drifts": train(
            Drifts(), root / "drifts", samples(), use_distributed_sampler=True, check_divergence_every_n_steps=2
        ),
        "unasked": train(
            Drifts(), root / "unasked", samples(), use_distributed_sampler=True, checkpoint={"every_n_steps": 3}
        ),
        "optimizer": train(Keeps("optimizer"), root / "optimizer", samples(), use_distributed_sampler=True),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Torch warns of a `broadcast_buffers` that is given.
        got["buffer"] = train(Keeps("buffer"), root / "buffer", samples(), **LOCAL)
        got["local"] = train(Keeps("buffer"), root / "local", samples(), **LOCAL, local_buffers=["que*"])
        got["warned"] = train(
            Drifts(), root / "warned", samples(), use_distributed_sampler=True, on_divergence="warning"
        )
    got["warnings"] = [str(one.message) for one in caught if "replicas-differ" in str(one.message)]
    trainer = plain(
        devices=2,
        strategy="ddp",
        max_steps=3,
        use_distributed_sampler=False,
        callbacks=[Fairlead(str(root / "script"), check_divergence_every_n_steps=1)],
    )
    script = Reports()
    trainer.fit(script, DataLoader(own_part, batch_size=4), DataLoader(samples(8), batch_size=4))
    got["script"] = {**script.seen_all, "left": "all_reduce" in vars(script)}
    return got


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    root = tmp_path_factory.mktemp("together")
    return run_ranks(on_two_ranks, 2, root, timeout=120), root


def test_an_epoch_ends_for_all_ranks_with_the_shortest(found: tuple[list[dict[str, Any]], Path]) -> None:
    """The weights are those of one process with what both ranks had in each step."""
    both = [index for step in range(3) for rank in range(2) for index in own(rank)[4 * step : 4 * step + 4]]
    alone = Line()
    trainer = plain(max_epochs=EPOCHS)
    trainer.fit(alone, DataLoader(Subset(samples(40), both), batch_size=8), loader())
    for got in found[0]:
        assert got["sized"]["counted"] == EPOCHS * min(BATCHES) == trainer.global_step
        torch.testing.assert_close(got["sized"]["weights"], weights(alone), rtol=1e-5, atol=1e-6)
        # Half of an epoch is one of three batches, on both ranks.
        assert got["sized"]["validated"] == [1, 2, 3, 4, 5, 6]
    (event,) = events(found[1] / "sized" / "run", "uneven-inputs")
    assert "rank 1 has 3 training batches, others up to 5" in event["what"]
    assert events(found[1] / "drifts" / "run", "uneven-inputs") == []


def test_streams_of_which_nobody_knows_the_length_end_together(found: tuple[list[dict[str, Any]], Path]) -> None:
    both = [index for step in range(3) for rank in range(2) for index in own(rank)[4 * step : 4 * step + 4]]
    alone = Line()
    # Two batches make a step, and the third, the last of the shortest rank, makes one by itself.
    plain(max_epochs=EPOCHS, accumulate_grad_batches=2).fit(
        alone, DataLoader(Subset(samples(40), both), batch_size=8), loader()
    )
    for got in found[0]:
        assert got["stream"]["counted"] == EPOCHS * 2
        torch.testing.assert_close(got["stream"]["weights"], weights(alone), rtol=1e-5, atol=1e-6)
        assert got["stream"]["validated"] == [2, 4]


def test_a_rank_without_any_batch_is_an_error_on_all(found: tuple[list[dict[str, Any]], Path]) -> None:
    for got in found[0]:
        assert "rank 1 of 2: no training batch at all" in got["empty"]["error"]


def test_a_module_reduces_and_waits_over_the_ranks(found: tuple[list[dict[str, Any]], Path]) -> None:
    for name in ("sized", "script"):
        for rank, one in enumerate(got[name] for got in found[0]):
            assert one["mean"] == [1.0, 5.0]
            assert one["others"] == [[2.0, 10.0], [1.0, 10.0]]
            assert one["number"] == 0.5
            assert one["kept"] == [1.0, 10.0 * rank]
            assert one["left"] is False  # the module is as its user made it again
        passed, arrived = ([got[name][what] for got in found[0]] for what in ("passed", "arrived"))
        assert min(passed) >= max(arrived)


def test_weights_that_differ_end_the_run_at_once(found: tuple[list[dict[str, Any]], Path]) -> None:
    """It is compared every second step, so the sixth is the first that sees it; all ranks say the same."""
    texts = {got["drifts"]["error"] for got in found[0]}
    assert len(texts) == 1
    text = texts.pop()
    assert "at step 6 the ranks do not hold the same model any more: net.bias differs on rank 1" in text
    assert "they were equal at step 4; ranks that agree with each other: rank 0; rank 1" in text
    assert {got["drifts"]["kind"] for got in found[0]} == {"RunFailedError"}
    (event,) = events(found[1] / "drifts" / "run", "diverged")
    assert (event["step"], event["ranks"]) == (6, [1])
    assert events(found[1] / "drifts" / "run")[-1]["event"] == "failed"


def test_ranks_are_compared_without_being_asked(found: tuple[list[dict[str, Any]], Path]) -> None:
    """After the first step, before each checkpoint, at the end: nothing that differs is saved or called done."""
    for rank, got in enumerate(found[0]):
        assert "at step 6 the ranks do not hold the same model any more: net.bias" in got["unasked"]["error"]
        assert "they were equal at step 4" in got["unasked"]["error"]
        assert "the newest checkpoint is of step 4" in got["unasked"]["error"]
        assert "at step 8 the ranks do not hold the same model any more: queue" in got["buffer"]["error"]
        assert "counted" in got["local"]  # nor is a batch norm's own mean an error, nor what is no state
        assert "optimizer 0, exp_avg of net.bias differs on rank 1" in got["optimizer"]["error"]
        assert "counted" in got["warned"]
        assert len(got["warnings"]) == (rank == 0)
    assert events(found[1] / "warned" / "run", "diverged")[0]["step"] == 8


def test_in_one_process_a_module_reduces_too(tmp_path: Path) -> None:
    class Alone(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            all_reduce: Any = self.all_reduce
            tensor = torch.tensor([2.0])
            assert all_reduce(tensor, reduce_op="sum") is not tensor
            assert float(all_reduce(3)) == 3.0
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

    for config in ({"check_divergence_every_n_steps": 1}, {"barebones": True, "log_every_n_steps": None}):
        make_trainer(tmp_path, max_steps=2, **config).fit(Alone(), datamodule=Data())

    class Own(Line):
        def all_reduce(self, tensor: Tensor) -> str:
            return "its own"

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.all_reduce(batch[0]) == "its own"
            return super().training_step(batch, batch_idx)

    make_trainer(tmp_path / "own", max_steps=1).fit(Own(), datamodule=Data())


def opens(rank: int, root: Path) -> str:
    """What each rank gets where rank 0 cannot open the run, for a reason that is no error of ours."""
    if rank == 0:

        def refuses(*_: Any) -> Any:
            raise OSError(30, "Read-only file system")

        opening._open = refuses  # type: ignore[assignment]
    with pytest.raises(Exception, match="Read-only file system") as caught:
        make_trainer(root, devices=2, strategy="ddp", max_epochs=1).fit(Line(), datamodule=Data())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_keeps_rank_0_from_opening_the_run_is_an_error_of_all(tmp_path: Path) -> None:
    (zero, other) = run_ranks(opens, 2, tmp_path, timeout=60)
    assert zero == "OSError: [Errno 30] Read-only file system"
    assert other.startswith("RunFailedError: rank 0 could not open the run: OSError: [Errno 30] Read-only file system")
