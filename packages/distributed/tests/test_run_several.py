"""`LoopRun` on several real ranks: one commit of all, no rank left waiting, another number of ranks."""

from __future__ import annotations

import resource
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_job import make_fabric
from tiny_job import checkpoints, events, latest
from torch import nn
from torch.utils.data import DataLoader

from fairlead import LoopRun, TrainerConfig, fabric
from fairlead.errors import CheckpointError, ConfigError
from fairlead_distributed import ResumableDistributedSampler
from fairlead_distributed.testing import run_ranks
from fairlead_runs.commit import Checkpoint, Syscalls

SAMPLES = 24


def opened(root: Path, ranks: int, **more: Any) -> tuple[LoopRun, Any, ResumableDistributedSampler]:
    fab = fabric(TrainerConfig(accelerator="cpu", devices=ranks))
    fab.launch()
    torch.manual_seed(fab.global_rank)
    model = fab.setup_module(nn.Linear(2, 1))
    sampler = ResumableDistributedSampler(SAMPLES, num_replicas=ranks, rank=fab.global_rank)
    loader = DataLoader(range(SAMPLES), batch_size=2, sampler=sampler)  # type: ignore[arg-type,var-annotated]
    return LoopRun(fab, root / "run", model=model, sampler=sampler, **more), loader, sampler


def draws(rank: int, root: Path, ranks: int, steps: int, policy: Any) -> tuple[list[int], float, bool]:
    """The samples of so many steps and the next number of this rank's generator, saved after each step."""
    run, loader, _ = opened(root, ranks, batch_policy=policy)
    seen: list[int] = []
    with run:
        resumed = run.restore()
        for batch in run.batches(loader):
            seen += batch.tolist()
            run.step += 1
            run.save()
            if run.step == steps:
                break
    return seen, torch.rand(1).item(), resumed


def full_disk_on_rank_one(rank: int, root: Path) -> tuple[list[bool], list[str]]:
    run, _, _ = opened(root, 2)
    real = Syscalls.fsync
    said = []
    with run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.restore()
        saved = []
        for run.step in (1, 2, 3):
            if rank == 1 and run.step == 2:

                def fsync(system: Syscalls, fd: int) -> None:
                    raise OSError(28, "No space left on device")

                Syscalls.fsync = fsync  # type: ignore[assignment,method-assign]
            saved.append(run.save())
            Syscalls.fsync = real  # type: ignore[method-assign]
        said = [str(w.message) for w in caught]
    return saved, said


def full_disk_under_a_strategy_that_writes_itself(rank: int, root: Path, strategy: str) -> tuple[list[bool], list[str]]:
    """FSDP2: the rank that writes may not write files as large as its part of the weights."""
    fab = make_fabric(2, strategy)
    fab.launch()
    model = fab.setup_module(nn.Linear(300, 300))
    limited = rank == (1 if strategy == "sharded-folder" else 0)
    with LoopRun(fab, root / "run", model=model) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.restore()
        saved = []
        for run.step in (1, 2, 3):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limited and run.step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            saved.append(run.save())
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return saved, [str(w.message) for w in caught if "no checkpoint" in str(w.message)]


def unreadable_state_on_rank_one(rank: int, root: Path) -> str:
    run, _, _ = opened(root, 2, per_rank={"mine": 0.0})
    with run:
        run.restore()
        run.step = 1
        run.per_rank["mine"] = np.zeros(1) if rank == 1 else 1.0
        try:
            run.save()
        except ConfigError as error:
            return str(error)
    return ""


def damaged_part_of_rank_one(rank: int, root: Path) -> str:
    run, _, _ = opened(root, 2)
    with run:
        run.restore()
        run.step = 1
        run.save()
    torch.distributed.barrier()
    run, _, _ = opened(root, 2)
    try:
        with run:  # the start has compared the checksums
            torch.distributed.barrier()
            if rank == 1:
                file = latest(root / "run").path / "rank-00001.pt"
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 1
                file.write_bytes(data)
            torch.distributed.barrier()
            run.restore()
    except CheckpointError as error:
        return str(error)
    return ""


def too_few_for_their_states(rank: int, root: Path, ranks: int) -> str:
    run, _, _ = opened(root, ranks, per_rank={"mine": rank}, batch_policy="keep_per_device")
    try:
        with run:
            run.restore()
            run.step = 1
            run.save()
    except CheckpointError as error:
        return str(error)
    return ""


def two_ranks(rank: int, root: Path) -> dict[str, Any]:
    """All that takes two ranks, in one start of them."""
    return {
        "draws": draws(rank, root / "draws", 2, 3, None),
        "full": full_disk_on_rank_one(rank, root / "full"),
        "sharded": full_disk_under_a_strategy_that_writes_itself(rank, root / "sharded", "sharded"),
        "sharded-folder": full_disk_under_a_strategy_that_writes_itself(
            rank, root / "sharded-folder", "sharded-folder"
        ),
        "unreadable": unreadable_state_on_rank_one(rank, root / "unreadable"),
        "damaged": damaged_part_of_rank_one(rank, root / "damaged"),
        "theirs": too_few_for_their_states(rank, root / "theirs", 2),
    }


def three_ranks(rank: int, root: Path) -> tuple[str, Any]:
    try:
        draws(rank, root / "draws", 3, 5, None)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return refused, draws(rank, root / "draws", 3, 5, "keep_per_device")


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


def test_states_of_each_rank_are_not_given_to_another_number_of_ranks(root: Path, found: list[dict[str, Any]]) -> None:
    assert [one["theirs"] for one in found] == ["", ""]
    said = too_few_for_their_states(0, root / "theirs", 1)
    assert "2 ranks have saved states of their own, 1 would go on" in said


def test_a_disk_that_one_rank_finds_full_costs_one_checkpoint(root: Path, found: list[dict[str, Any]]) -> None:
    """No rank commits what another has not written, and none waits for it."""
    assert [one["full"][0] for one in found] == [[True, False, True]] * 2
    assert "No space left on device (rank 1)" in found[0]["full"][1][0]
    run = root / "full/run"
    assert [c.step for c in checkpoints(run)] == [1, 3]
    assert [e["step"] for e in events(run, "checkpoint-failed")] == [2]
    assert not list((run / "checkpoints").glob(".stage-*"))


@pytest.mark.parametrize("strategy", ["sharded", "sharded-folder"])
def test_a_strategy_that_writes_itself_may_find_the_disk_full_too(
    root: Path, found: list[dict[str, Any]], strategy: str
) -> None:
    assert [one[strategy][0] for one in found] == [[True, False, True]] * 2
    assert "no checkpoint was written" in found[0][strategy][1][0]
    run = root / strategy / "run"
    assert [c.step for c in checkpoints(run)] == [1, 3]
    assert [e["step"] for e in events(run, "checkpoint-failed")] == [2]
    assert not list((run / "checkpoints").glob(".stage-*"))


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("unreadable", "mine is a numpy.ndarray"),
        ("damaged", "a rank's part of the checkpoint is damaged"),
    ],
)
def test_what_one_rank_cannot_do_is_an_error_on_all(found: list[dict[str, Any]], job: str, said: str) -> None:
    assert [said in one[job] for one in found] == [True, True]
