"""`Run` on several real ranks: one commit of all, no rank left waiting, another number of ranks."""

from __future__ import annotations

import os
import random
import resource
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_records import checkpoints, events, latest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from fairlead import Run, Stopped
from fairlead.config import RunConfig
from fairlead.errors import CheckpointError, ConfigError, RunFailedError
from fairlead_distributed.full_state import full_parameters
from fairlead_distributed.run.loading import MODEL
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import Checkpoint, Syscalls

SAMPLES = 24
EACH = {"every_n_steps": 1}


def opened(root: Path, **more: Any) -> tuple[Run, Any]:
    torch.manual_seed(5)
    model = nn.Linear(2, 1)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    loader = DataLoader(range(SAMPLES), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7))  # type: ignore[arg-type,var-annotated]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Run(root / "run", model=model, optimizer=optimizer, checkpoint=EACH, environ={}, **more), loader


def draws(root: Path, steps: int, policy: Any) -> tuple[list[int], float, bool]:
    """The samples of so many steps and the next number of this rank's generator, saved after each step."""
    run, loader = opened(root, batch_policy=policy, max_epochs=1, max_steps=steps)
    seen: list[int] = []
    with run:
        resumed = run.restore()
        for batch in run.batches(loader):
            seen += batch.tolist()
            run.step()
    return seen, torch.rand(1).item(), resumed


class Curriculum(Dataset[int]):
    """The loop raises its level; its samples draw random numbers."""

    def __init__(self) -> None:
        self.level = 0
        self.random = random.Random(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index * self.random.randint(1, 2)


def raised_level(root: Path, steps: int) -> int:
    run, _ = opened(root, batch_policy="keep_per_device", max_steps=steps)
    dataset = Curriculum()
    with run:
        run.restore()
        for _ in run.batches(DataLoader(dataset, batch_size=2)):
            dataset.level += 1
            run.step()
    return dataset.level


def full_disk_on_rank_one(root: Path) -> list[str]:
    run, _ = opened(root)
    real = Syscalls.fsync
    with run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.restore()
        for step in (1, 2, 3):
            if dist.get_rank() == 1 and step == 2:

                def fsync(system: Syscalls, fd: int) -> None:
                    raise OSError(28, "No space left on device")

                Syscalls.fsync = fsync  # type: ignore[assignment,method-assign]
            run.step()
            Syscalls.fsync = real  # type: ignore[method-assign]
        return [str(w.message) for w in caught]


def full_disk_under_shards(root: Path, *, gather: bool) -> list[str]:
    """FSDP2: the rank that writes may not write files as large as its part of the weights."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(300, 300)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limited = dist.get_rank() == (0 if gather else 1)
    run = Run(root / "run", model=model, optimizer=optimizer, checkpoint=EACH, gather=gather, environ={})
    with run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.restore()
        for step in (1, 2, 3):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limited and step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            run.step()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return [str(w.message) for w in caught if "no checkpoint" in str(w.message)]


def weights_of_a_gathered_one(root: Path) -> list[bool]:
    """Whether a plain and a sharded model begin with them."""
    from torch.distributed.fsdp import fully_shard

    source = latest(root / "run").path
    saved = torch.load(source / "state.ckpt", weights_only=True)[MODEL]["model.weight"]
    same = []
    for shard in (False, True):
        model = nn.Linear(300, 300)
        if shard:
            fully_shard(model)
        config = RunConfig(name=f"shard-{shard}", dir=str(root), seed=None, resume=f"weights:{source}")
        with Run(config, model=model, environ={}) as run:
            run.restore()
        same.append(torch.equal(full_parameters(model)["weight"], saved))
    return same


class Scaled(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def sharded_with_gradients_left(root: Path) -> tuple[Any, Any]:
    """FSDP2: an optimizer that steps every third time, and a counter; undisturbed, and interrupted after step 4."""
    from torch.distributed.fsdp import fully_shard

    def trained(name: str, most: int, end: int) -> Any:
        torch.manual_seed(5)
        first, second = Scaled(4, 4), nn.Linear(4, 1)
        for one in (first, second):
            fully_shard(one)
        often, seldom = (torch.optim.SGD(one.parameters(), lr=0.001) for one in (first, second))
        with Run(root / name, a=first, b=second, o=often, p=seldom, checkpoint=EACH, max_steps=most, environ={}) as run:
            run.restore()
            for _ in run.batches(DataLoader(range(64), batch_size=2)):  # type: ignore[arg-type]
                x = torch.full((2, 4), 1.0 + run.steps + dist.get_rank())
                second(first(x)).sum().backward()
                often.step()
                often.zero_grad()
                if run.steps % 3 == 2:
                    seldom.step()
                    seldom.zero_grad()
                run.step()
                if run.steps == end:
                    os.kill(os.getpid(), signal.SIGUSR1)
        return [[one.tolist() for one in full_parameters(module).values()] for module in (first, second)]

    expected = trained("undisturbed", 7, 0)
    with suppress(Stopped):
        trained("stopped", 7, 4)
    return expected, trained("stopped", 7, 0)


def gradients_in_buckets(root: Path) -> tuple[Any, Any]:
    """DDP's buckets: the second loss leaves gradients in `second`, which its next step uses."""

    def trained(name: str, end: int) -> Any:
        torch.manual_seed(5)
        first, second = (DistributedDataParallel(nn.Linear(4, size), gradient_as_bucket_view=True) for size in (4, 1))
        one, other = (torch.optim.SGD(part.parameters(), lr=0.001) for part in (first, second))
        with Run(root / name, a=first, b=second, o=one, p=other, checkpoint=EACH, max_steps=6, environ={}) as run:
            run.restore()
            for _ in run.batches(DataLoader(range(64), batch_size=2)):  # type: ignore[arg-type]
                x = torch.full((2, 4), 1.0 + run.steps + dist.get_rank())
                second(first(x).detach()).sum().backward()
                other.step()
                other.zero_grad()
                second(first(x)).square().sum().backward()
                one.step()
                one.zero_grad()
                run.step()
                if run.steps == end:
                    os.kill(os.getpid(), signal.SIGUSR1)
        return [value.tolist() for part in (first, second) for value in part.parameters()]

    expected = trained("undisturbed", 0)
    with suppress(Stopped):
        trained("stopped", 4)
    return expected, trained("stopped", 0)


def unreadable_state_on_rank_one(root: Path) -> str:
    class Kept:
        value: Any = 0.0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    kept = Kept()
    run, _ = opened(root, per_rank={"mine": kept})
    try:
        with run:
            run.restore()
            kept.value = object() if dist.get_rank() == 1 else 1.0
            run.step()
    except ConfigError as error:
        return str(error)
    return ""


def damaged_part_of_rank_one(root: Path) -> str:
    draws(root, 1, None)
    dist.barrier()
    run, _ = opened(root, max_epochs=1, max_steps=2)
    try:
        with run:  # the start has compared the checksums
            dist.barrier()
            if dist.get_rank() == 1:
                file = latest(root / "run").path / "rank-00001.pt"
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
            dist.barrier()
            run.restore()
    except CheckpointError as error:
        return str(error)
    return ""


def sharded_by_fsdp1(root: Path) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    try:
        Run(root / "run", model=model)
    except ConfigError as error:
        return str(error)
    return ""


def replicas_drift(root: Path) -> str:
    """Each rank steps by gradients of its own: nothing averages them."""
    run, loader = opened(root, max_epochs=1)
    model = next(iter(run._registry.modules().values()))
    optimizer = next(iter(run._registry.optimizers().values()))
    try:
        with run:
            run.restore()
            for batch in run.batches(loader):
                model(torch.stack([batch, batch], 1).float() / SAMPLES).sum().backward()
                optimizer.step()
                run.step()
    except RunFailedError as error:
        return str(error)
    return ""


def stages_of_a_pipeline(root: Path) -> tuple[list[str], bool]:
    """Each rank has another module: written as one checkpoint by the names of the whole model."""

    def start(step: int) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        del whole[1 - dist.get_rank()]
        stage = nn.ModuleDict({str(dist.get_rank()): whole[0]})
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        with Run(root / "run", model=stage, optimizer=optimizer, max_steps=step, checkpoint=EACH, environ={}) as run:
            run.restore()
            while run.steps < step:
                sum(one.sum() for one in stage.parameters()).backward()  # type: ignore[union-attr]
                optimizer.step()
                run.step()
        return stage

    first = dict(start(2).state_dict())
    again = dict(start(2).state_dict())
    names = sorted(name for name in first)
    return names, all(torch.equal(first[name], again[name]) for name in names)


def stages_of_one_name(root: Path) -> str:
    """Slices of a Sequential, each numbered from 0; the first one has a layer more."""
    torch.manual_seed(dist.get_rank())
    stage = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 - dist.get_rank())])
    try:
        with Run(root / "run", model=stage, environ={}) as run:
            run.restore()
    except ConfigError as error:
        return str(error)
    return ""


def stopped_by_one(root: Path) -> tuple[int, int]:
    """A signal to rank 1 alone."""
    torch.manual_seed(1)
    run, loader = opened(root, max_epochs=10)
    try:
        with run:
            run.restore()
            for _ in run.batches(loader):
                run.step()
                if run.steps == 4 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                dist.all_reduce(torch.zeros(1))
    except Stopped as stopped:
        return run.steps, int(stopped.code or 0)
    return -1, -1


def two_ranks(rank: int, root: Path) -> dict[str, Any]:
    """All that takes two ranks, in one start of them."""
    return {
        "draws": draws(root / "draws", 3, None),
        "level": raised_level(root / "level", 3),
        "full": full_disk_on_rank_one(root / "full"),
        "shards": full_disk_under_shards(root / "shards", gather=False),
        "gathered": full_disk_under_shards(root / "gathered", gather=True),
        "gradients": sharded_with_gradients_left(root / "gradients"),
        "buckets": gradients_in_buckets(root / "buckets"),
        "weights": weights_of_a_gathered_one(root / "gathered"),
        "unreadable": unreadable_state_on_rank_one(root / "unreadable"),
        "damaged": damaged_part_of_rank_one(root / "damaged"),
        "drift": replicas_drift(root / "drift"),
        "fsdp1": sharded_by_fsdp1(root / "fsdp1"),
        "stages": stages_of_a_pipeline(root / "stages"),
        "alike": stages_of_one_name(root / "alike"),
        "stopped": stopped_by_one(root / "stopped"),
    }


def three_ranks(rank: int, root: Path) -> tuple[str, Any]:
    try:
        draws(root / "draws", 5, None)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return refused, draws(root / "draws", 5, "keep_per_device")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2, root, timeout=180)


def test_every_rank_writes_its_part_of_one_commit(root: Path, found: list[dict[str, Any]]) -> None:
    folder = Checkpoint.at(root / "draws/run/checkpoints/step-00000003").path
    names = {path.name for path in folder.iterdir()}
    assert names == {"manifest.json", "state.ckpt", "rank-00000.pt", "rank-00001.pt"}
    parts = [torch.load(folder / f"rank-0000{rank}.pt", weights_only=True) for rank in range(2)]
    assert not torch.equal(parts[0]["rng"]["torch"], parts[1]["rng"]["torch"])


@pytest.mark.slow
def test_another_number_of_ranks_takes_exactly_what_is_left(root: Path, found: list[dict[str, Any]]) -> None:
    """Once a policy is given; the generators of all ranks begin anew, each differently."""
    second = run_ranks(three_ranks, 3, root, timeout=180)
    assert all("set batch_policy" in refused for refused, _ in second)
    assert all(resumed for _, (_, _, resumed) in second)
    taken = [sample for one in found for sample in one["draws"][0]]
    taken += [sample for _, (seen, _, _) in second for sample in seen]
    assert len(taken) == 2 * 2 * 3 + 3 * 2 * 2
    assert sorted(taken) == list(range(SAMPLES))
    assert len({number for _, (_, number, _) in second}) == 3


def test_another_number_of_ranks_has_what_the_loop_has_set_in_a_dataset(
    root: Path, found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of its random generator each rank has had another state: that begins anew, and is named."""
    assert [one["level"] for one in found] == [3, 3]
    assert raised_level(root / "level", 4) == 4
    printed = capsys.readouterr().out
    assert "because of loader train dataset.random (its random generator begins anew" in printed
    assert "nothing has seeded" not in printed


def test_a_disk_that_one_rank_finds_full_costs_one_checkpoint(root: Path, found: list[dict[str, Any]]) -> None:
    """No rank commits what another has not written, and none waits for it."""
    assert "No space left on device (rank 1)" in found[0]["full"][0]
    run = root / "full/run"
    assert [e["step"] for e in events(run, "checkpoint")] == [1, 3]
    assert [e["step"] for e in events(run, "checkpoint-failed")] == [2]
    assert not list((run / "checkpoints").glob(".stage-*"))


@pytest.mark.parametrize("kind", ["shards", "gathered"])
def test_shards_may_find_the_disk_full_too(root: Path, found: list[dict[str, Any]], kind: str) -> None:
    assert "no checkpoint was written" in found[0][kind][0]
    run = root / kind / "run"
    assert [e["step"] for e in events(run, "checkpoint")] == [1, 3]
    assert [e["step"] for e in events(run, "checkpoint-failed")] == [2]
    assert not list((run / "checkpoints").glob(".stage-*"))


def test_sharded_gradients_that_wait_for_their_optimizer_outlive_a_stop(found: list[dict[str, Any]]) -> None:
    """And what a module whose class `fully_shard` has replaced keeps in attributes."""
    for one in found:
        expected, resumed = one["gradients"]
        assert resumed == expected


def test_gradients_in_buckets_that_the_next_step_uses_outlive_a_stop(found: list[dict[str, Any]]) -> None:
    for one in found:
        expected, resumed = one["buckets"]
        assert resumed == expected


def test_a_new_run_begins_with_the_weights_of_a_gathered_checkpoint(found: list[dict[str, Any]]) -> None:
    assert [one["weights"] for one in found] == [[True, True]] * 2


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("unreadable", "the state of mine['value'] is a object, which is no plain data"),
        ("damaged", "a rank's part of the checkpoint is damaged"),
        ("alike", "the ranks hold different tensors under the name 'model.0.weight'"),
        ("fsdp1", "model is sharded by FullyShardedDataParallel"),
        ("drift", "the ranks do not hold the same model any more: model.weight differs on rank"),
    ],
)
def test_what_one_rank_cannot_do_is_an_error_on_all(found: list[dict[str, Any]], job: str, said: str) -> None:
    assert [said in one[job] for one in found] == [True, True], [one[job] for one in found]


def test_stages_of_a_pipeline_are_one_checkpoint(root: Path, found: list[dict[str, Any]]) -> None:
    assert [one["stages"] for one in found] == [
        (["0.bias", "0.weight"], True),
        (["1.bias", "1.weight"], True),
    ]
    assert latest(root / "stages/run").metadata["form"] == "sharded"


def test_a_signal_to_one_rank_stops_all_at_the_same_step(root: Path, found: list[dict[str, Any]]) -> None:
    (step, code), other = found[0]["stopped"], found[1]["stopped"]
    assert (step, code) == other
    assert code == 143
    assert latest(root / "stopped/run").step == step
    assert checkpoints(root / "stopped/run")[-1].step == step
