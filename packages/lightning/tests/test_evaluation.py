"""Evaluation on several ranks gives the numbers of one: real ranks over gloo, against a single process."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric, Metric, MetricCollection

from fairlead_distributed import EvaluationSampler, all_reduce
from fairlead_distributed.evaluation import evaluation_loader, shard_of, why_unchanged
from fairlead_distributed.testing import run_ranks
from fairlead_lightning.resume.averages import AverageOverRanks

SIZES = range(1, 18)
BATCHES = range(1, 6)


# -- the loaders


def parts(loader: DataLoader[Any], ranks: int) -> list[DataLoader[Any]]:
    made = [evaluation_loader(loader, ranks, rank) for rank in range(ranks)]
    assert all(part is not None for part in made)
    return [part for part in made if part is not None]


def counted(part: DataLoader[Any]) -> list[int]:
    """The samples that count."""
    shard = shard_of(part)
    assert shard is not None
    batches = [batch.tolist() for batch in part]
    return [one for number, batch in enumerate(batches) if not shard.is_padding_batch(number) for one in batch]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_sample_counts_once_and_all_ranks_have_equal_numbers_of_batches(ranks: int) -> None:
    """The parts are disjoint and cover the set, for every size."""
    for size, batch in itertools.product(SIZES, BATCHES):
        made = parts(DataLoader(range(size), batch_size=batch), ranks)  # type: ignore[arg-type]
        assert sorted(itertools.chain(*map(counted, made))) == list(range(size))
        lengths = [[len(one) for one in part] for part in made]
        assert {len(one) for one in lengths} == {len(made[0])}
        assert all(1 <= length <= batch for one in lengths for length in one)
        padding = [part for part, one in zip(made, lengths, strict=True) if len(counted(part)) < sum(one)]
        assert not padding or batch == 1 or size < ranks
        assert [len(shard_of(part) or ()) for part in made] == [sum(one) for one in lengths]


def test_an_empty_dataset_has_no_batches() -> None:
    assert [list(part) for part in parts(DataLoader(range(0)), 3)] == [[], [], []]  # type: ignore[arg-type]


def test_a_shuffled_loader_takes_the_same_random_order_each_time() -> None:
    """So that all ranks agree on it, and a limited validation is of the same samples in every epoch."""
    made = parts(DataLoader(range(20), batch_size=3, shuffle=True), 2)  # type: ignore[arg-type]
    first, again = ([counted(part) for part in made] for _ in range(2))
    assert first == again
    assert sorted(itertools.chain(*first)) == list(range(20))
    assert first != [list(range(0, 20, 2)), list(range(1, 20, 2))]


def test_a_part_of_a_dataset_is_evaluated_whatever_way_it_was_chosen() -> None:
    data: Any = range(20)
    some = [3, 5, 8, 13]
    by_indices = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(some))
    assert sorted(itertools.chain(*map(counted, parts(by_indices, 3)))) == some
    few = parts(DataLoader(data, sampler=RandomSampler(data, num_samples=7)), 2)
    assert len(set(itertools.chain(*map(counted, few)))) == 7
    by_batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(range(6)), 4, drop_last=False))
    assert [[batch.tolist() for batch in part] for part in parts(by_batches, 2)] == [[[0, 2, 4]], [[1, 3, 5]]]


def test_drop_last_leaves_out_what_does_not_fill_a_batch_on_every_rank() -> None:
    made = parts(DataLoader(range(17), batch_size=2, drop_last=True), 3)  # type: ignore[arg-type]
    assert [[len(batch) for batch in part] for part in made] == [[2, 2]] * 3
    assert sorted(itertools.chain(*map(counted, made))) == list(range(12))


def test_a_loader_that_makes_no_batches() -> None:
    made = parts(DataLoader(torch.arange(5), batch_size=None), 2)  # type: ignore[arg-type]
    assert [[one.item() for one in part] for part in made] == [[0, 2, 4], [1, 3, 0]]
    shards = [shard_of(part) for part in made]
    assert [shard is not None and shard.is_padding_batch(2) for shard in shards] == [False, True]


def pairs(samples: list[int]) -> tuple[str, list[int]]:
    return "collated", samples


def test_everything_else_of_the_loader_is_kept() -> None:
    generator = torch.Generator()
    loader: DataLoader[Any] = DataLoader(
        range(7),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=1,
        collate_fn=pairs,
        persistent_workers=True,
        generator=generator,
        prefetch_factor=5,
        multiprocessing_context="fork",
    )
    before = list(loader)  # the workers that persist have the old order
    made = parts(loader, 2)[1]
    for name in (
        "dataset",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "persistent_workers",
        "generator",
        "prefetch_factor",
    ):
        assert getattr(made, name) is getattr(loader, name)
    assert made.multiprocessing_context is loader.multiprocessing_context
    assert list(made) == list(made) == [("collated", [1, 3]), ("collated", [5])]
    assert list(loader) == before
    assert len(made) == 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnWay(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([])


class OwnBatches(BatchSampler):
    pass


DATA: Any = range(4)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream()), "a stream"),
        (
            DataLoader(DATA, sampler=EvaluationSampler(4, num_replicas=1, rank=0)),
            "custom sampler, EvaluationSampler",
        ),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 1, 0)), "custom sampler, DistributedSampler"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 4, 4)), "custom sampler, WeightedRandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "custom sampler, RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=9)), "custom sampler, RandomSampler"),
        (DataLoader(DATA, batch_sampler=OwnBatches(DATA, 2, False)), "custom batch sampler, OwnBatches"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "custom batch sampler, list"),
        (OwnWay(DATA), "OwnWay overrides how batches are drawn"),
        ([1, 2], "list is not a torch DataLoader"),
    ],
)
def test_what_is_the_users_own_is_not_replaced(loader: Any, why: str) -> None:
    assert evaluation_loader(loader, 2, 0) is None
    assert why in (why_unchanged(loader) or "")


# -- evaluations on real ranks

TABLE = torch.rand(64, generator=torch.Generator().manual_seed(3))


class Recall(Metric):
    """A metric that keeps what it saw: rows of two, whose number of rows differs between the ranks."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.add_state("blocks", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        rows: Any = self.rows
        blocks: Any = self.blocks
        rows.append(torch.stack([values, torch.ones_like(values)], dim=1))
        blocks.append(values)

    def compute(self) -> Tensor:
        rows: Any = self.rows
        blocks: Any = self.blocks
        rows, blocks = (torch.cat(one) if isinstance(one, list) else one for one in (rows, blocks))
        result: Tensor = rows[:, 0].sum() + 100 * rows[:, 1].sum() + 10_000 * len(blocks)
        return result


class Probe(L.LightningModule):
    """Logs in every way; its steps wait for all ranks, as those of a sharded model do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.recall = Recall()
        self.group = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
        self.sums = [0.0, 0.0]

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        values = TABLE[batch[0]]
        self.log("loss", values.mean(), on_step=True, on_epoch=True)
        self.log("step", values.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.mean(values)
        self.recall(values)
        self.group.update(values)
        self.log("mean", self.mean)
        self.log("recall", self.recall)
        self.sums = [self.sums[0] + float(values.sum()), self.sums[1] + len(values)]

    def on_validation_epoch_start(self) -> None:
        self.sums = [0.0, 0.0]

    def on_validation_epoch_end(self) -> None:
        self.log("own", self.sums[0] / self.sums[1])
        self.log("count", self.sums[1], reduce_fx="sum")
        self.log("same", 0.1)
        self.log_dict(self.group)


class Sizes(L.LightningModule):
    """One loader for each size of dataset and batch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [0] * len(SIZES) * len(BATCHES)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int) -> None:
        values = TABLE[batch[0]]
        if self.trainer.world_size > 1:
            all_reduce(torch.ones(1))  # hangs where another rank has no such batch
        self.steps[dataloader_idx] += 1
        self.log("loss", values.mean())
        self.log("synced", values.mean(), sync_dist=True)
        self.log("explicit", values.mean(), batch_size=len(values))
        self.log("hits", (values > 0.5).float().sum(), reduce_fx="sum")
        self.log("worst", values.max(), reduce_fx="max")
        self.log("best", values.min(), reduce_fx="min")


def trainer(ranks: int, **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "devices": ranks,
    }
    if ranks > 1:
        quiet |= {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]}
        settings["callbacks"] = [AverageOverRanks(), *settings.get("callbacks", [])]
    return L.Trainer(**{**quiet, **settings})


def here(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """This rank's part."""
    if ranks == 1:
        return loader
    part = evaluation_loader(loader, ranks, dist.get_rank())
    assert part is not None
    return part


def plain(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def numbers(size: int, batch: int, ranks: int) -> DataLoader[Any]:
    """This rank's part of 0 to `size - 1`."""
    return here(DataLoader(TensorDataset(torch.arange(size)), batch_size=batch), ranks)


def sizes(ranks: int) -> list[tuple[dict[str, float], int]]:
    """Every size: what was logged, and how many batches this rank had."""
    model, loop = Sizes(), trainer(ranks)
    given = loop.validate(model, [numbers(*case, ranks) for case in itertools.product(SIZES, BATCHES)], verbose=False)
    named = [{name.partition("/")[0]: float(value) for name, value in one.items()} for one in given]
    return list(zip(named, model.steps, strict=True))


def probes(ranks: int) -> dict[tuple[int, int], dict[str, float]]:
    """All ways of logging, for some sizes."""
    loop, model, found = trainer(ranks), Probe(), {}
    for case in PROBED:
        loop.validate(model, numbers(*case, ranks), verbose=False)
        found[case] = plain(loop.callback_metrics)
    return found


PROBED = [(1, 1), (1, 3), (2, 1), (3, 2), (5, 1), (5, 2), (7, 3), (9, 1)]


def several_loaders(ranks: int) -> list[dict[str, float]]:
    """Three loaders in a row; what `validate` returns."""

    class Several(L.LightningModule):
        def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            values = TABLE[batch[0] + dataloader_idx]
            self.log("loss", values.mean())
            self.log(f"only/{dataloader_idx}", values.mean(), add_dataloader_idx=False)

        def on_validation_epoch_end(self) -> None:
            self.log("end", 1.0 + self.global_rank, reduce_fx="max")

    loaders = [numbers(*case, ranks) for case in ((7, 2), (1, 3), (5, 1))]
    given = trainer(ranks).validate(Several(), loaders, verbose=False)
    return [plain(one) for one in given]


class Uneven(IterableDataset[Tensor]):
    """A stream of which this rank has only some samples."""

    def __init__(self, of_rank: Sequence[int]) -> None:
        self.of_rank = of_rank

    def __iter__(self) -> Iterator[Tensor]:
        return iter(TABLE[: self.of_rank[dist.get_rank() if dist.is_initialized() else -1]])


def a_rank_without_a_loader(ranks: int) -> dict[str, float]:
    """Streams shard themselves; rank 1 has nothing in the second and the last, the single process all."""

    class Streams(L.LightningModule):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", batch.mean() + dataloader_idx)

    counts = [[3, 1, 1], [2, 0, 0], [2, 2, 1], [1, 0, 1]]
    loaders = [DataLoader(Uneven([*one[:ranks], *[1] * (ranks - 3)]), batch_size=1) for one in counts]
    loop = trainer(ranks)
    loop.validate(Streams(), loaders, verbose=False)
    return plain(loop.callback_metrics)


class Sometimes(L.LightningModule):
    """Logs a key only for the batches that have a certain sample; in each epoch another one, on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.seen: list[float] = []
        self.had: list[bool] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0].float()[:, None]).square().mean()
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        rare = batch[0][batch[0] == self.current_epoch]
        if len(rare):
            self.log("rare", TABLE[rare].mean(), batch_size=len(rare), prog_bar=True)
            self.log("synced", TABLE[rare].mean(), batch_size=len(rare), sync_dist=True)

    def on_validation_end(self) -> None:
        self.seen += [float(self.trainer.callback_metrics[name]) for name in ("rare", "synced")]
        self.had.append("rare" in self.trainer.progress_bar_metrics)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def conditional(ranks: int) -> list[float]:
    """What every rank has under the key in each epoch."""
    data, model = TensorDataset(torch.arange(6)), Sometimes()
    stopping = EarlyStopping("rare", patience=9, check_on_train_epoch_end=False)
    trainer(ranks, max_epochs=4, callbacks=[stopping]).fit(model, DataLoader(data, batch_size=2), numbers(6, 2, ranks))
    assert all(model.had)
    return model.seen


class Deciding(L.LightningModule):
    """Monitored values that differ between the ranks' parts: what one takes for progress is none for another."""

    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.monitor = monitor
        self.rates: list[float] = []
        self.own: list[Tensor] = []
        order = [torch.randperm(64, generator=torch.Generator().manual_seed(epoch)) for epoch in range(20)]
        self.table = torch.stack([TABLE[one] / (1 + epoch / 4) for epoch, one in enumerate(order)])

    def values(self, batch: Sequence[Tensor]) -> Tensor:
        values: Tensor = self.table[self.current_epoch][batch[0]]
        return values

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        values = self.values(batch)
        self.log("train/loss", values.mean(), on_step=True, on_epoch=True)
        self.own.append(values)
        loss: Tensor = self.net(values[:, None]).square().mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/own", torch.cat(self.own).mean())
        self.own.clear()

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.values(batch).mean())

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        monitor = self.monitor
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": monitor, "interval": "epoch"}}


def decided(ranks: int, monitor: str) -> tuple[list[float], int, int, float]:
    """The learning rates of all epochs, and all that early stopping knows in the end."""
    data, model = TensorDataset(torch.arange(12)), Deciding(monitor)
    stopping = EarlyStopping(monitor, patience=3, check_on_train_epoch_end=not monitor.startswith("val"))
    sampler: Any = DistributedSampler(data, ranks, dist.get_rank() if ranks > 1 else 0, shuffle=False)
    trainer(ranks, max_epochs=20, callbacks=[stopping]).fit(
        model, DataLoader(data, batch_size=2, sampler=sampler), numbers(7, 1, ranks)
    )
    return model.rates, stopping.stopped_epoch, stopping.wait_count, float(stopping.best_score)


class Sharded(L.LightningModule):
    """Its weights are spread over the ranks: a forward pass that not all take part in hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 4)

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None and self.trainer.world_size > 1:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.fill_(0.5)
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("loss", self.net(TABLE[batch[0]][:, None]).mean())


def sharded(ranks: int) -> float:
    """FSDP2: with 5 samples one at a time, rank 1 of 2 has 2 for the 3 of rank 0."""
    loop = trainer(ranks, strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1))
    loop.validate(Sharded(), numbers(5, 1, ranks), verbose=False)
    return float(loop.callback_metrics["loss"])


def of_a_test(ranks: int) -> dict[str, float]:
    """`trainer.test`, with workers, a shuffled loader, batches of one and a limit."""

    class Tested(L.LightningModule):
        def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.log("loss", TABLE[batch[0]].mean())

        def on_test_epoch_end(self) -> None:
            self.log("end", float(self.global_rank), reduce_fx="sum")

    data = TensorDataset(torch.arange(7))
    loop = trainer(ranks)
    loop.test(Tested(), here(DataLoader(data, shuffle=ranks > 1), ranks), verbose=False)
    whole = plain(loop.callback_metrics)
    loop = trainer(ranks, limit_test_batches=2)
    loop.test(Tested(), here(DataLoader(data), ranks), verbose=False)
    return {**whole, "limited": float(loop.callback_metrics["loss"])}


def in_between(ranks: int) -> dict[str, list[float]]:
    """Validations in the middle of an epoch, after a sanity check; the epoch's own mean goes on over them."""

    class Between(Deciding):
        def __init__(self) -> None:
            super().__init__("train/loss_epoch")
            self.read: dict[str, list[float]] = {"val": [], "train": [], "callback": []}

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.read["val"].append(float(self.trainer.callback_metrics["val/loss"]))

        def on_train_end(self) -> None:
            self.read["train"].append(float(self.trainer.callback_metrics["train/loss_epoch"]))

    class Reads(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            model.read["callback"].append(float(trainer.callback_metrics["train/loss_epoch"]))

    data, model = TensorDataset(torch.arange(24)), Between()
    sampler: Any = DistributedSampler(data, ranks, dist.get_rank() if ranks > 1 else 0, shuffle=False)
    trainer(ranks, max_epochs=2, val_check_interval=0.5, num_sanity_val_steps=2, callbacks=[Reads()]).fit(
        model,
        DataLoader(data, batch_size=24 // ranks // 2, sampler=sampler),
        numbers(7, 2, ranks),
    )
    return model.read


def asked_for(ranks: int) -> dict[str, float]:
    """What is logged for rank 0 or for a group stays so."""
    groups: list[Any] = [dist.new_group([0, 1]), *(dist.new_group([rank]) for rank in range(2, ranks))]
    mine = groups[max(dist.get_rank() - 1, 0)]

    class Asks(L.LightningModule):
        def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.log("own", float(self.global_rank + 1), rank_zero_only=True)
            self.log(
                "group",
                float(self.global_rank + 1),
                sync_dist=True,
                sync_dist_group=mine,
                batch_size=dist.get_rank() + 1,
            )

    loop = trainer(ranks)
    loop.validate(Asks(), numbers(8, 4, ranks), verbose=False)
    return plain(loop.callback_metrics)


def in_pairs() -> dict[str, float]:
    """Four ranks, of which two and two share the layers of a model and see the same samples."""

    class Paired(L.LightningModule):
        def configure_model(self) -> None:
            self.net = torch.nn.Linear(1, 1)

        def val_dataloader(self) -> Any:
            shards = self.trainer.distributed_sampler_kwargs or {}
            return evaluation_loader(DataLoader(TensorDataset(torch.arange(5)), batch_size=2), **shards)

        def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.log("sum", TABLE[batch[0]].sum(), reduce_fx="sum")
            self.log("mean", TABLE[batch[0]].mean())

    loop = trainer(4, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2))
    loop.validate(Paired(), verbose=False)
    return plain(loop.callback_metrics)


def after_an_error(ranks: int) -> tuple[list[str], dict[str, float]]:
    """A validation that failed in the hook leaves nothing behind; the same trainer and model are used again."""

    class Fails(Probe):
        fail = True

        def on_validation_epoch_end(self) -> None:
            if self.fail:
                raise RuntimeError("no luck")
            super().on_validation_epoch_end()

    class FailsFirst(L.Callback):
        def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if getattr(pl_module, "fail", False):
                raise RuntimeError("no luck")

    model, loop = Fails(), trainer(ranks, callbacks=[FailsFirst()])
    loader = numbers(5, 1, ranks)
    with pytest.raises(RuntimeError, match="no luck"):
        loop.validate(model, loader, verbose=False)
    left = [name for name in vars(model) if name.startswith("on_")]
    for one in (loop.validate_loop, loop.test_loop, loop.fit_loop.epoch_loop.val_loop):
        left += [name for name, value in vars(one).items() if callable(value) and name.startswith("_store")]
    model.fail = False
    loop.validate(model, loader, verbose=False)
    return left, plain(loop.callback_metrics)


def everything(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sizes": sizes(ranks),
        "probes": probes(ranks),
        "several": several_loaders(ranks),
        "conditional": conditional(ranks),
        "decided": {monitor: decided(ranks, monitor) for monitor in MONITORS},
        "tested": of_a_test(ranks),
        "between": in_between(ranks),
    }
    if ranks > 1:
        found["uneven"] = a_rank_without_a_loader(ranks)
        found["sharded"] = sharded(ranks)
        found["asked"] = asked_for(ranks)
        found["error"] = after_an_error(ranks)
    if ranks == 4:
        found["pairs"] = in_pairs()
    return found


MONITORS = ("val/loss", "train/loss_epoch", "train/own")


@functools.cache
def alone() -> dict[str, Any]:
    """The single process."""
    return everything(0, 1)


@pytest.fixture(params=[2, *(pytest.param(size, marks=pytest.mark.full) for size in (3, 4))], scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What came out on each of 2, 3 and 4 ranks.  Warnings are errors there, Lightning's advice to sync among them."""
    alone()
    return run_ranks(everything, request.param, request.param, timeout=300)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-6)


def test_one_rank_is_as_without_any_of_this() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
    (part,) = parts(loader, 1)
    plainly, ours = trainer(1), trainer(1, callbacks=[AverageOverRanks()])
    assert plainly.validate(Probe(), loader, verbose=False) == ours.validate(Probe(), part, verbose=False)


def test_metrics_are_those_of_a_single_process(ranks: list[dict[str, Any]]) -> None:
    """For every size of dataset and batch; sums of whole numbers, maxima and minima exactly."""
    for number, case in enumerate(itertools.product(SIZES, BATCHES)):
        expected = alone()["sizes"][number][0]
        found = [rank["sizes"][number][0] for rank in ranks]
        assert all(one == found[0] for one in found), case
        exact = {name: found[0][name] for name in ("hits", "worst", "best")}
        assert exact == {name: expected[name] for name in exact}, case
        assert found[0] == {name: close(value) for name, value in expected.items()}, case


def test_all_ranks_have_equal_numbers_of_batches(ranks: list[dict[str, Any]]) -> None:
    """The evaluation is shared out; the ranks' steps meet in a collective."""
    for number, (size, batch) in enumerate(itertools.product(SIZES, BATCHES)):
        of_one = math.ceil(math.ceil(size / len(ranks)) / batch)
        assert [rank["sizes"][number][1] for rank in ranks] == [of_one] * len(ranks)


@pytest.mark.parametrize("case", PROBED)
def test_every_way_of_logging(ranks: list[dict[str, Any]], case: tuple[int, int]) -> None:
    """In steps and at the end, torchmetrics, and what a module collects by itself (see the docstring)."""
    expected = alone()["probes"][case]
    found = [rank["probes"][case] for rank in ranks]
    assert all(one == found[0] for one in found)
    assert found[0]["same"] == expected["same"]
    size, batch = case
    collected = {"own", "count"} if batch == 1 or size < len(ranks) else set()  # has the padding in it
    names = expected.keys() - collected
    assert found[0].keys() == expected.keys()
    assert {name: found[0][name] for name in names} == {name: close(expected[name]) for name in names}


def test_each_of_several_loaders(ranks: list[dict[str, Any]]) -> None:
    expected = [{**one, "end": float(len(ranks))} for one in alone()["several"]]
    for rank in ranks:
        assert rank["several"] == [{name: close(value) for name, value in one.items()} for one in expected]


def test_a_rank_that_has_no_batch_of_a_loader(ranks: list[dict[str, Any]]) -> None:
    """It waits for the others' averages; each loader's is over the ranks that have it."""
    counts = [[3, 1, 1], [2, 0, 0], [2, 2, 1], [1, 0, 1]]
    for number, count in enumerate(counts):
        of_rank = [*count[: len(ranks)], *[1] * (len(ranks) - 3)]
        mean = float(sum(TABLE[:n].sum() for n in of_rank)) / sum(of_rank) + number
        for rank, n in zip(ranks, of_rank, strict=True):
            assert rank["uneven"].get(f"loss/dataloader_idx_{number}") == (close(mean) if n else None)


def test_a_key_that_one_rank_logs(ranks: list[dict[str, Any]]) -> None:
    """No hang, and every rank has it, in each epoch from another one."""
    assert [rank["conditional"] for rank in ranks] == [[close(value) for value in alone()["conditional"]]] * len(ranks)


@pytest.mark.parametrize("monitor", MONITORS)
def test_schedulers_and_early_stopping_decide_alike(ranks: list[dict[str, Any]], monitor: str) -> None:
    """On all ranks as in a single process: rates, stop, patience and best score."""
    rates, stopped, waited, best = alone()["decided"][monitor]
    assert len(set(rates)) > 4
    for rank in ranks:
        assert rank["decided"][monitor] == ranks[0]["decided"][monitor]
    assert ranks[0]["decided"][monitor] == (rates, stopped, waited, close(best))


def test_a_test_of_a_shuffled_loader_with_workers(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    limited = float(TABLE[: min(2 * world, 7)].mean())
    for rank in ranks:
        assert rank["tested"] == {
            "loss": close(float(TABLE[:7].mean())),
            "end": sum(range(world)),
            "limited": close(limited),
        }


def test_validations_inside_an_epoch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["between"] == {name: [close(one) for one in seen] for name, seen in alone()["between"].items()}


def test_a_sharded_model_with_more_batches_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """Breaker 6: FSDP2 with 3 against 2 batches, which would hang."""
    expected = float((TABLE[:5] * 0.5 + 0.5).mean())
    assert [rank["sharded"] for rank in ranks] == [close(expected)] * len(ranks)


def test_what_is_asked_for_is_done(ranks: list[dict[str, Any]]) -> None:
    assert [rank["asked"]["own"] for rank in ranks] == [1.0, 2.0, 3.0, 4.0][: len(ranks)]
    assert [rank["asked"]["group"] for rank in ranks] == [close(5 / 3), close(5 / 3), 3.0, 4.0][: len(ranks)]


def test_an_error_leaves_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        left, metrics = rank["error"]
        assert left == []
        assert metrics["loss"] == close(float(TABLE[:5].mean()))


def test_ranks_that_share_layers_count_once(ranks: list[dict[str, Any]]) -> None:
    if len(ranks) == 4:
        for rank in ranks:
            expected = {"sum": close(float(TABLE[:5].sum())), "mean": close(float(TABLE[:5].mean()))}
            assert rank["pairs"] == expected
