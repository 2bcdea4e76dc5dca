"""`checkpoint_io: distributed` in real fits: any number of ranks and any layout reads what any other has written."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, model_parallel
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead.config import CheckpointConfig
from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import read_manifest, verify
from fairlead_runs.remote import Store, list_checkpoints
from fairlead_runs.remote import verify as verify_copy
from integration_tests.jobs import Call, changed, events, fairlead

# Lightning's advice: about workers, loggers, and what it would log.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")]

SYNC: Any = "distributed"
BACKGROUND: Any = {"name": "distributed", "background": True}

# A name, a strategy, a checkpoint_io, and what to resume from.
Fit = tuple[str, Any, Any, str]
PLAN = {"blocks.0": "colwise", "blocks.1": "rowwise"}  # `head` is whole on each rank
TENSOR: Any = {"name": "tensor_parallel", "plan": PLAN}
BOTH: Any = {"name": "hybrid", "shard": 2, "tensor": 2, "plan": PLAN}


class Net(L.LightningModule):
    """Layers whose sizes no number of ranks divides, and groups that are not in the order of the parameters."""

    resume_attributes = ()  # what a start notes is of this start

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
        groups: list[dict[str, Any]] = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.at_start = full_state(self)

    def on_train_end(self) -> None:
        self.at_end = full_state(self)


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


def full_state(module: L.LightningModule) -> dict[str, Any]:
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
            checkpoint=CheckpointConfig(every_n_steps=2),
        ),
        run=RunConfig(name=name, dir=root, seed=1, resume=resume),
    )
    module = Net()
    trainer.fit(module, data())
    saves: Any = trainer.checkpoint_callback
    best = str(saves.best_model_path)
    tested = trainer.test(module, data(), ckpt_path=best, verbose=False)
    trainer.save_checkpoint(Path(root, f"{name}.by-hand"), weights_only=True)
    return {"start": module.at_start, "end": module.at_end, "tested": dict(tested[0])}


def fits(rank: int, root: str, world_size: int, steps: int, asked: list[Fit]) -> list[dict[str, dict[str, Any]]]:
    return [fit(root, world_size, steps, one) for one in asked]


def lightnings_own(rank: int, root: str, ours: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain Lightning resumes from a checkpoint of ours, and writes one of its own."""
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
    first.append(("fsdp", "fsdp", BACKGROUND, "auto"))
    made = dict(zip(("ddp", "fsdp2", "later", "fsdp"), fits(rank, root, 2, 4, first), strict=True))
    theirs = lightnings_own(rank, root, f"{step(root, 'ddp', 4)}/state.ckpt")
    back: list[Fit] = [(f"back-{s}", s, "torch", f"{root}/lightnings") for s in ("ddp", "fsdp", "fsdp2")]
    own = strategys_own(rank, root)[0]
    again = fits(rank, root, 2, 4, [("again", "fsdp2", BACKGROUND, step(root, "fsdp2", 2))])[0]
    return {**made, "again": again, "own": own, "lightnings": theirs, "back": fits(rank, root, 2, 6, back)}


OWN: Any = {"name": "fsdp2", "state_dict_type": "sharded"}


def strategys_own(rank: int, root: str) -> list[dict[str, Any]]:
    """Lightning's strategy writes past the CheckpointIO; twice it fails on one rank only, in another way each time."""
    lightnings: Any = model_parallel
    torchs: Any = FileSystemWriter
    saved, written_data = lightnings.torch.save, torchs.write_data

    def save(*args: Any) -> None:
        if "step-00000002" in str(args[1]):
            raise RuntimeError("no luck with meta.pt")
        saved(*args)

    def write_data(writer: Any, *args: Any) -> Any:
        if rank == 1 and "step-00000004" in str(writer.path):
            raise OSError(28, "No space left on device", "__1_0.distcp")
        return written_data(writer, *args)

    lightnings.torch.save, torchs.write_data = save, write_data
    warnings.filterwarnings("ignore", "training continues")
    try:
        return fits(rank, root, 2, 8, [("own", OWN, "torch", "auto")])
    finally:
        lightnings.torch.save, torchs.write_data = saved, written_data


def step(root: str, name: str, number: int) -> str:
    return f"{root}/{name}/checkpoints/step-{number:08d}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Checkpoints of two ranks, and what rank 0 had in memory when they were written."""
    root = str(tmp_path_factory.mktemp("sharded"))
    return root, run_ranks(two_ranks, 2, root, timeout=300)[0]


def test_a_fit_leaves_the_same_whoever_writes_it(written: tuple[str, dict[str, Any]]) -> None:
    """In the background as at once; and with two ranks FSDP2 computes what DDP does."""
    _, made = written
    assert same(made["ddp"]["end"], made["later"]["end"])
    assert same(made["ddp"]["end"]["weights"], made["fsdp2"]["end"]["weights"])
    assert made["ddp"]["tested"] == made["fsdp2"]["tested"] == made["later"]["tested"]


def test_what_goes_on_from_shards_ends_as_what_was_never_stopped(written: tuple[str, dict[str, Any]]) -> None:
    """FSDP2 from the middle of its run; what `explain` says of `fsdp2` with `distributed` rests on this."""
    _, made = written
    assert not same(made["again"]["start"], made["fsdp2"]["end"])
    assert same(made["again"]["end"], made["fsdp2"]["end"])


@pytest.mark.full
def test_lightning_reads_ours_and_ours_reads_lightnings(written: tuple[str, dict[str, Any]]) -> None:
    """The layout is that of its ModelParallelStrategy; ours is read by `torch` and DDP, too."""
    _, made = written
    began, ended = made["lightnings"]
    assert same(began, made["ddp"]["end"])
    assert [same(one["start"], ended) for one in made["back"]] == [True, True, True]


def test_each_tensor_is_written_once_and_every_file_is_in_the_manifest(written: tuple[str, dict[str, Any]]) -> None:
    """Two ranks of DDP hold everything twice, and each writes a part."""
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


@pytest.mark.full
def test_what_a_strategy_writes_itself_is_committed_too(written: tuple[str, dict[str, Any]]) -> None:
    """FSDP2 with `checkpoint_io: torch`; what goes wrong on one rank is known to all, and nothing hangs."""
    root, made = written
    assert sorted(path.name for path in Path(root, "own", "checkpoints").glob("step-*")) == [
        "step-00000006",
        "step-00000008",
    ]
    assert verify(Path(step(root, "own", 8)), deep=True) == []
    files = read_manifest(Path(step(root, "own", 8))).files
    assert {"state.ckpt/.metadata", "state.ckpt/meta.pt", "state.ckpt/__1_0.distcp"} <= files.keys()
    failed = [event["error"] for event in events(Path(root, "own")) if event["event"] == "checkpoint-failed"]
    assert len(failed) == 2
    assert "no luck with meta.pt" in failed[0]
    assert "No space left on device" in failed[1]
    found = TorchFileCheckpointIO(TorchCheckpointIOConfig()).load_checkpoint(step(root, "own", 8))
    assert same(dict(found["state_dict"]), made["own"]["end"]["weights"])


@pytest.mark.full
def test_a_checkpoint_by_hand_is_written_by_all_ranks(written: tuple[str, dict[str, Any]]) -> None:
    root, made = written
    for name in ("ddp", "fsdp", "fsdp2", "later"):
        folder = Path(root, f"{name}.by-hand")
        assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in folder.iterdir()}
        found = TorchFileCheckpointIO(TorchCheckpointIOConfig()).load_checkpoint(folder)
        assert "optimizer_states" not in found
        assert same(dict(found["state_dict"]), made[name]["end"]["weights"])


def test_any_number_of_ranks_and_any_layout_goes_on(written: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """2 -> 4, 4 -> 1, 1 -> 2; DDP -> FSDP2 and back; `distributed` -> `torch` and back; all in bits."""
    root, made = written
    asked: list[Fit] = [
        (f"{source}-{strategy}-{io if io == 'torch' else 'shards'}", strategy, io, step(root, source, 4))
        for source in ("ddp", "fsdp", "fsdp2")
        for strategy, io in (("ddp", SYNC), ("fsdp2", BACKGROUND), ("fsdp", SYNC), ("fsdp", "torch"), ("ddp", "torch"))
    ]
    four = run_ranks(fits, 4, str(tmp_path), 4, 5, asked, timeout=300)
    for rank in four:
        for (name, *_), one in zip(asked, rank, strict=True):
            assert same(one["start"], made[name.partition("-")[0]]["end"]), name
    again = [(name, "single_device", "torch", step(str(tmp_path), name, 5)) for name, *_ in asked[:5]]
    again += [("one", "single_device", SYNC, again[0][-1])]
    ones = run_ranks(fits, 1, str(tmp_path / "one"), 1, 6, again, timeout=300)[0]
    for one, before in zip(ones, [*four[0][:5], four[0][0]], strict=True):
        assert same(one["start"], before["end"])
    last: list[Fit] = [("two", "ddp", SYNC, step(str(tmp_path / "one"), "one", 6))]
    for rank in run_ranks(fits, 2, str(tmp_path / "two"), 2, 7, last, timeout=300):
        assert same(rank[0]["start"], ones[-1]["end"])


def split_over_two(rank: int, root: str) -> list[dict[str, dict[str, Any]]]:
    (whole,) = fits(rank, root, 2, 4, [("tensor", TENSOR, BACKGROUND, "auto")])
    others: list[Fit] = [("again", TENSOR, SYNC, step(root, "tensor", 2)), ("file", TENSOR, "torch", "auto")]
    back: list[Fit] = [("copies", "ddp", SYNC, step(root, "tensor", 4)), ("split", TENSOR, SYNC, step(root, "file", 4))]
    return [whole, *fits(rank, root, 2, 4, others), *fits(rank, root, 2, 5, back)]


def split_over_four(rank: int, root: str, begun: str) -> list[dict[str, dict[str, Any]]]:
    (whole,) = fits(rank, root, 4, 8, [("both", BOTH, SYNC, step(begun, "tensor", 4))])
    return [whole, *fits(rank, root, 4, 8, [("again", BOTH, BACKGROUND, step(root, "both", 6))])]


@pytest.mark.full
def test_split_layers_go_on_from_shards(tmp_path: Path) -> None:
    """Tensor parallelism alone, where some parameters are split and others whole; and a mesh of two dimensions."""
    for whole, again, file, copies, split in run_ranks(split_over_two, 2, str(tmp_path / "two"), timeout=300):
        assert same(again["end"], whole["end"])
        assert same(file["end"], whole["end"])
        assert same(copies["start"], whole["end"])
        assert same(split["start"], whole["end"])
    begun = str(tmp_path / "two")
    for both, resumed in run_ranks(split_over_four, 4, str(tmp_path / "four"), begun, timeout=300):
        assert same(both["start"], whole["end"])
        assert same(resumed["end"], both["end"])


def copied_to(url: str, inner: Any) -> Any:
    return {"name": "remote", "url": url, "inner": inner}


def undisturbed_and_first_start(rank: int, root: str, url: str) -> dict[str, Any]:
    """Two runs of six steps, and the first four steps of the same on another machine, which copies them."""
    through = fits(
        rank, f"{root}/through", 2, 6, [("ddp", "ddp", SYNC, "auto"), ("fsdp2", "fsdp2", BACKGROUND, "auto")]
    )
    first: list[Fit] = [
        ("ddp", "ddp", copied_to(url, SYNC), "auto"),
        ("fsdp2", "fsdp2", copied_to(url, BACKGROUND), "auto"),
    ]
    return {"through": through, "first": fits(rank, f"{root}/first", 2, 4, first)}


@pytest.mark.full
def test_shards_are_copied_to_a_store_and_a_machine_that_has_nothing_goes_on(tmp_path: Path) -> None:
    """Shards of two ranks; the disk is lost; the same bits as without. `torch` reads them, too."""
    root, url = str(tmp_path), f"file://{tmp_path}/store"
    made = run_ranks(undisturbed_and_first_start, 2, root, url, timeout=300)
    shutil.rmtree(tmp_path / "first")
    for name in ("ddp", "fsdp2"):
        store = Store.open(f"{url}/{name}")
        copies = list_checkpoints(store)
        assert copies[-1].step == 4
        assert [verify_copy(store, copy, deep=True) for copy in copies] == [[]] * len(copies)
        inside = {f"state.ckpt/{file}" for file in (".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp")}
        assert inside <= copies[-1].entries.keys()
    again: list[Fit] = [
        ("ddp", "ddp", copied_to(url, SYNC), "auto"),
        ("fsdp2", "fsdp2", copied_to(url, BACKGROUND), "auto"),
    ]
    # Through `torch` around the store, from the URL of shards, with another strategy than wrote them.
    again.append(("other", "fsdp2", copied_to(url, "torch"), f"{url}/ddp/step-00000004"))
    for rank, one in enumerate(run_ranks(fits, 2, f"{root}/second", 2, 6, again, timeout=300)):
        for index, began in enumerate((0, 1, 0)):
            assert same(one[index]["start"], made[rank]["first"][began]["end"]), (rank, index)
        assert [same(one[index]["end"], made[rank]["through"][index]["end"]) for index in (0, 1)] == [True, True]
        assert same(one[2]["end"]["weights"], made[rank]["through"][1]["end"]["weights"])
    for name in ("ddp", "fsdp2", "other"):
        assert list_checkpoints(Store.open(f"{url}/{name}"))[-1].step == 6, name
        uploaded = [event["checkpoint"] for event in events(tmp_path / "second" / name) if event["event"] == "uploaded"]
        assert uploaded[-1] == "step-00000006"


MODEL = """
import os, signal
import lightning.pytorch as L
import torch
from fairlead_runs.commit import Syscalls
from fairlead_checkpoint_io.distributed_shards import saving
from torch.utils.data import DataLoader

how, rank, step = (os.environ.get("TROUBLE") or "no 0 0").split()
write_file = saving.write_file


class Full(Syscalls):
    # The kernel's own refusal, for this file only: the training writes others meanwhile.
    def write(self, fd, data):
        with open("/dev/full", "wb", buffering=0) as full:
            return full.write(data)


def troubled(path, content):
    if rank != os.environ["RANK"] or f"step-0000000{step}" not in str(path):
        return write_file(path, content)
    if how == "full":
        return write_file(path, content, syscalls=Full())
    write_file(path, content)
    os.kill(os.getpid(), signal.SIGKILL)


saving.write_file = troubled


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(range(64), batch_size=2, shuffle=True)


class Model(L.LightningModule):
    # Powers of two and small integers: sums are exact, whoever adds them up.
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def training_step(self, batch, index):
        losses = (self.weight * torch.stack([batch, batch % 2, batch // 4, -batch], 1)).sum(1)
        with open(f"losses-{os.environ['RANK']}.txt", "a") as file:
            file.writelines(f"{self.global_step} {s} {l.hex()}\\n" for s, l in zip(batch.tolist(), losses.tolist()))
        return losses.mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=2**-6, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
"""

JOB: dict[str, Any] = {
    "run": {"name": "small", "dir": "runs", "seed": 1},
    "model": {"class": "model:Model"},
    "data": {"class": "model:Data"},
    "trainer": {
        "accelerator": "cpu",
        "strategy": "ddp",
        "devices": 2,
        "accumulate_grad_batches": 2,
        "batch_policy": "keep_global",
        "max_steps": 8,
        "checkpoint": {"every_n_steps": 2},
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


def losses(folder: Path) -> dict[tuple[int, int], set[str]]:
    """The losses of each sample at each step, of all starts."""
    found: dict[tuple[int, int], set[str]] = {}
    for file in folder.glob("losses-*.txt"):
        for line in file.read_text().splitlines():
            step, sample, loss = line.split()
            found.setdefault((int(step), int(sample)), set()).add(loss)
    return found


def start(folder: Path, trouble: str = "", **trainer: Any) -> Call:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").touch()
    (folder / "model.py").write_text(MODEL)
    job = folder / "job.json"
    job.write_text(json.dumps(changed(JOB, trainer=trainer)))
    return fairlead("fit", str(job), cwd=folder, environ={"TROUBLE": trouble})


def ended(call: Call) -> bool:
    assert call.code == 0, call.text
    return True


@pytest.mark.full
def test_a_job_moves_from_2_to_4_ranks_and_back_with_identical_losses(tmp_path: Path) -> None:
    """Also when one rank is killed while it saves, and the disk refuses another one's part."""
    throughout, changing = tmp_path / "throughout", tmp_path / "changing"
    assert ended(start(throughout, checkpoint_io="torch"))
    assert start(changing, "kill 1 4", checkpoint_io=BACKGROUND).code != 0
    run = changing / "runs" / "small"
    before = len(events(run))  # rank 0 may live to write that the save of step 4 failed, or be ended first
    assert sorted(path.name for path in run.glob("checkpoints/step-*")) == ["step-00000002"]
    assert ended(start(changing, "full 3 4", devices=4, max_steps=6, checkpoint_io=BACKGROUND))
    failed = [event for event in events(run)[before:] if event["event"] == "checkpoint-failed"]
    assert len(failed) == 1
    assert "rank 3: cannot write __3_0.distcp: No space left on device" in failed[0]["error"]
    there = sorted(path.name for path in run.glob("checkpoints/*"))
    assert there == ["last", "latest", "step-00000002", "step-00000006"]
    assert ended(start(changing, checkpoint_io=SYNC))
    one, other = losses(throughout), losses(changing)
    assert len(one) == 64
    assert one == other
    ends = [whole_file(folder) for folder in (throughout, changing)]
    assert same(ends[0], ends[1])


def whole_file(folder: Path) -> Any:
    """What the last checkpoint of a run holds, whatever wrote it."""
    backend = TorchFileCheckpointIO(TorchCheckpointIOConfig())
    found = backend.load_checkpoint(folder / "runs" / "small" / "checkpoints" / "step-00000008")
    return {key: found[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")}
