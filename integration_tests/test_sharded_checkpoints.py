"""`checkpoint_io: distributed` in real fits: any number of ranks and any layout reads what any other has written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead_distributed.testing import run_ranks
from integration_tests.jobs import changed, fairlead

# Lightning's advice: about workers, loggers, and what it would log.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")]

SYNC: Any = "distributed"
BACKGROUND: Any = {"name": "distributed", "background": True}

# A name, a strategy, a checkpoint_io, and what to resume from.
Fit = tuple[str, str, Any, str]


class Net(L.LightningModule):
    """Layers whose sizes no number of ranks divides, and groups that are not in the order of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(12, 12), torch.nn.Linear(12, 7)])
        self.head = torch.nn.Linear(7, 1)
        self.at_start: dict[str, Any] = {}
        self.at_end: dict[str, Any] = {}

    def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss(batch)

    def test_step(self, batch: Sequence[torch.Tensor], index: int) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.at_start = whole_state(self)

    def on_train_end(self) -> None:
        self.at_end = whole_state(self)


class Sharded(Net):
    """A module that shards itself, as Lightning wants it."""

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            mesh: Any = self.device_mesh
            for part in (*self.blocks, self.head):
                fully_shard(part, mesh=mesh["data_parallel"])


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def whole_state(module: L.LightningModule) -> dict[str, Any]:
    """Weights and optimizer state by the names of the parameters, gathered."""
    optimizer: Any = module.trainer.optimizers[0]
    names = {id(p): name for name, p in module.named_parameters()}
    states = {names[id(p)]: {k: whole(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    return {"weights": {k: whole(v) for k, v in module.state_dict().items()}, "state": states, "groups": groups}


def same(one: Any, other: Any) -> bool:
    """Equal in every bit, dtypes and shapes included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(64, 12, generator=generator)), batch_size=4, shuffle=True)


def fit(root: str, world_size: int, steps: int, one: Fit) -> dict[str, dict[str, Any]]:
    """One fit of this rank: the state where training began and where it ended."""
    name, strategy, checkpoint_io, resume = one
    os.environ["WORLD_SIZE"] = str(world_size)  # a plain Lightning fit before this has removed it
    trainer = Trainer(
        TrainerConfig(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy,
            checkpoint_io=checkpoint_io,
            max_steps=steps,
            batch_policy="keep_per_device",
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        ),
        run=RunConfig(name=name, dir=root, seed=1, resume=resume),
    )
    module = Net()
    trainer.fit(module, data())
    best = str(trainer.checkpoint_callback.best_model_path)
    tested = trainer.test(module, data(), ckpt_path=best, verbose=False)
    return {"start": module.at_start, "end": module.at_end, "tested": dict(tested[0])}


def fits(rank: int, root: str, world_size: int, steps: int, asked: list[Fit]) -> list[dict[str, dict[str, Any]]]:
    return [fit(root, world_size, steps, one) for one in asked]


def lightnings_own(rank: int, root: str, ours: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain Lightning goes on from a checkpoint of ours, and writes one of its own."""
    module = Sharded()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path=ours)
    trainer.save_checkpoint(Path(root, "lightnings"))
    return module.at_start, module.at_end


def two_ranks(rank: int, root: str) -> dict[str, Any]:
    first = [("ddp", "ddp", SYNC, "auto"), ("fsdp2", "fsdp2", BACKGROUND, "auto"), ("later", "ddp", BACKGROUND, "auto")]
    made = dict(zip(("ddp", "fsdp2", "later"), fits(rank, root, 2, 4, first), strict=True))
    theirs = lightnings_own(rank, root, f"{step(root, 'ddp', 4)}/state.ckpt")
    back: list[Fit] = [(f"back-{s}", s, "torch", f"{root}/lightnings") for s in ("ddp", "fsdp2")]
    return {**made, "lightnings": theirs, "back": fits(rank, root, 2, 6, back)}


def step(root: str, name: str, number: int) -> str:
    return f"{root}/{name}/checkpoints/step-{number:08d}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Checkpoints of two ranks, and what rank 0 had in memory when they were written."""
    root = str(tmp_path_factory.mktemp("sharded"))
    return root, run_ranks(two_ranks, 2, root, timeout=300)[0]


def test_a_fit_leaves_the_same_whoever_writes_it(written: tuple[str, dict[str, Any]]) -> None:
    """R66: in the background as at once; and with two ranks FSDP2 computes what DDP does."""
    _, made = written
    assert same(made["ddp"]["end"], made["later"]["end"])
    assert same(made["ddp"]["end"]["weights"], made["fsdp2"]["end"]["weights"])
    assert made["ddp"]["tested"] == made["fsdp2"]["tested"] == made["later"]["tested"]


def test_lightning_reads_ours_and_ours_reads_lightnings(written: tuple[str, dict[str, Any]]) -> None:
    """R64, R66: the layout is that of its ModelParallelStrategy; ours is read by `torch` and DDP, too."""
    _, made = written
    began, ended = made["lightnings"]
    assert same(began, made["ddp"]["end"])
    assert [same(one["start"], ended) for one in made["back"]] == [True, True]


def test_each_tensor_is_written_once_and_every_file_is_in_the_manifest(written: tuple[str, dict[str, Any]]) -> None:
    """R30: two ranks of DDP hold everything twice, and each writes a part."""
    root, made = written
    manifest = json.loads(Path(step(root, "ddp", 4), "manifest.json").read_text())
    names = {name for name in manifest["files"] if name.startswith("state.ckpt/")}
    assert names == {f"state.ckpt/{name}" for name in (".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp")}
    keys = [key for key in manifest["files"]["state.ckpt/__0_0.distcp"] if key != "size"]
    assert keys in (["xxh3_128"], ["crc32"])
    table = torch.distributed.checkpoint.FileSystemReader(f"{step(root, 'ddp', 4)}/state.ckpt").read_metadata()
    assert table.storage_data is not None
    assert len({index.fqn for index in table.storage_data}) == len(table.storage_data)
    assert {info.relative_path for info in table.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}
    assert len(made["ddp"]["end"]["state"]) * 3 < len(table.storage_data)


def test_any_number_of_ranks_and_any_layout_goes_on(written: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """R64, R68: 2 -> 4, 4 -> 1, 1 -> 2; DDP -> FSDP2 and back; `distributed` -> `torch` and back; all in bits."""
    root, made = written
    asked: list[Fit] = [
        (f"{source}-{strategy}-{io if io == 'torch' else 'shards'}", strategy, io, step(root, source, 4))
        for source in ("ddp", "fsdp2")
        for strategy, io in (("ddp", SYNC), ("fsdp2", BACKGROUND), ("fsdp2", "torch"), ("ddp", "torch"))
    ]
    four = run_ranks(fits, 4, str(tmp_path), 4, 5, asked, timeout=300)
    for rank in four:
        for (name, *_), one in zip(asked, rank, strict=True):
            assert same(one["start"], made[name.partition("-")[0]]["end"]), name
    again = [(name, "single_device", "torch", step(str(tmp_path), name, 5)) for name, *_ in asked[:4]]
    again += [("one", "single_device", SYNC, again[0][-1])]
    ones = run_ranks(fits, 1, str(tmp_path / "one"), 1, 6, again, timeout=300)[0]
    for one, before in zip(ones, [*four[0][:4], four[0][0]], strict=True):
        assert same(one["start"], before["end"])
    last: list[Fit] = [("two", "ddp", SYNC, step(str(tmp_path / "one"), "one", 6))]
    for rank in run_ranks(fits, 2, str(tmp_path / "two"), 2, 7, last, timeout=300):
        assert same(rank[0]["start"], ones[-1]["end"])
