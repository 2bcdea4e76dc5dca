from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fairlead.errors import CheckpointError, ConfigError
from fairlead_distributed import NotInitializedError, ResumableDistributedSampler
from fairlead_distributed.testing import run_ranks

State = dict[str, Any]


def samplers(length: int, world: int, state: State | None = None, **options: Any) -> list[ResumableDistributedSampler]:
    """One per rank, as its process would have it."""
    ranks = [ResumableDistributedSampler(length, num_replicas=world, rank=r, **options) for r in range(world)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    return ranks


def order(length: int, epoch: int = 0, **options: Any) -> list[int]:
    """An epoch as a run of one process that is never disturbed sees it."""
    sampler = ResumableDistributedSampler(length, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def train(
    ranks: list[ResumableDistributedSampler], batch: int, steps: int, seen: list[int], *, ahead: int = 0
) -> State:
    """Trains `steps` steps, into further epochs; each rank's loader has drawn `ahead` samples too many by then.

    Appends what was trained on, rank after rank within a row: the order of a run of one process.
    """
    while steps:
        epoch, iterators = ranks[0].epoch, [iter(rank) for rank in ranks]
        while steps and ranks[0].epoch == epoch:
            rows = [[next(one, None) for one in iterators] for _ in range(batch)]
            taken = [one for row in rows for one in row if one is not None]
            seen += taken
            for rank in ranks:
                rank.advance(len(taken))
            steps -= 1
        for iterator in iterators:
            for _ in range(ahead):
                next(iterator, None)
    states = [rank.state_dict() for rank in ranks]
    assert all(state == states[0] for state in states)
    return states[0]


part = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.integers(0, 5))  # world, batch, steps


@settings(max_examples=150, deadline=None)
@given(length=st.integers(1, 40), parts=st.lists(part, min_size=1, max_size=5), shuffle=st.booleans())
def test_any_chain_of_interruptions_and_world_sizes_trains_the_undisturbed_sequence(
    length: int, parts: list[tuple[int, int, int, int]], shuffle: bool
) -> None:
    """Nothing twice, nothing left out, in one order, whoever was killed when and came back with whom."""
    state, epochs = None, [[]]  # type: ignore[var-annotated]
    for world, batch, steps, ahead in parts:
        ranks = samplers(length, world, state, shuffle=shuffle, seed=3)
        for _ in range(steps):
            state = train(ranks, batch, 1, epochs[-1], ahead=ahead)
            if state["epoch"] == len(epochs):
                assert state["consumed"] == 0
                epochs.append([])
    for epoch, seen in enumerate(epochs):
        expected = order(length, epoch, shuffle=shuffle, seed=3)
        assert seen[:length] == expected[: len(seen)]
        assert len(seen) >= length or epoch == len(epochs) - 1
        # Declared padding: to whole rows of ranks, from the start of the epoch's order.
        padding = seen[length:]
        assert len(padding) < max(world for world, *_ in parts)
        assert padding == (expected * len(seen))[: len(padding)]


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, 40), world=st.integers(1, 7), drop_last=st.booleans())
def test_shards_are_disjoint_and_cover_the_set(length: int, world: int, drop_last: bool) -> None:
    """Except for the declared padding, or what drop_last leaves out."""
    shards = [list(rank) for rank in samplers(length, world, drop_last=drop_last)]
    assert len({len(shard) for shard in shards}) == 1
    rows = [one for row in zip(*shards, strict=True) for one in row]
    assert rows[:length] == order(length)[: len(rows)]
    if drop_last:
        assert len(rows) == length - length % world
    else:
        assert len(rows) - length == -length % world
    torch_sampler = DistributedSampler(range(length), world, 0, drop_last=drop_last)  # type: ignore[var-annotated,arg-type]
    assert [len(rank) for rank in samplers(length, world, drop_last=drop_last)] == [len(torch_sampler)] * world


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 40), first=st.integers(1, 5), second=st.integers(1, 5), steps=st.integers(0, 9))
def test_with_drop_last_a_run_resumed_with_another_world_size_leaves_out_less_than_one_row(
    length: int, first: int, second: int, steps: int
) -> None:
    seen: list[int] = []
    ranks = samplers(length, first, drop_last=True)
    state = train(ranks, 1, min(steps, len(ranks[0])), seen)
    if state["epoch"] == 0:
        ranks = samplers(length, second, state, drop_last=True)
        left = ranks[0].remaining() if ranks[0].epoch == 0 else 0
        train(ranks, 1, left, seen)
        assert ranks[0].epoch == 1 or not left
    assert seen == order(length)[: len(seen)]
    assert length - len(seen) < max(first, second)


def test_the_order_is_pinned() -> None:
    """Checkpoints on users' disks depend on it: a change of these numbers breaks their exact resume."""
    assert [order(8, epoch, seed=7) for epoch in range(3)] == [
        [6, 1, 2, 5, 4, 0, 3, 7],
        [6, 5, 4, 0, 7, 3, 1, 2],
        [3, 5, 6, 2, 0, 4, 7, 1],
    ]


def test_every_epoch_has_its_own_order_without_set_epoch() -> None:
    ranks = samplers(50, 2)
    epochs: list[list[int]] = []
    for _ in range(4):
        epochs.append([])
        train(ranks, 5, 5, epochs[-1])
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs == [order(50, epoch) for epoch in range(4)]
    assert order(50, seed=1, epoch=0) != order(50, seed=0, epoch=1)  # which `seed + epoch` would make equal


def test_set_epoch_keeps_the_position_unless_the_epoch_changes() -> None:
    """Lightning calls it before every epoch, also before the rest of a resumed one."""
    sampler = ResumableDistributedSampler(10)
    sampler.set_epoch(2)
    sampler.advance(4)
    sampler.set_epoch(2)
    assert list(sampler) == order(10, 2)[4:]
    sampler.advance(6)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.consumed) == (3, 0)
    sampler.advance(1)
    sampler.set_epoch(0)
    assert list(sampler) == order(10)


def test_drawing_does_not_move_the_position() -> None:
    sampler = ResumableDistributedSampler(10, num_replicas=2, rank=1)
    first, again = list(sampler), list(sampler)
    assert first == again
    sampler.advance(4)
    assert list(sampler) == first[2:]
    assert (len(sampler), sampler.remaining()) == (5, 3)
    assert sampler.state_dict() == {"seed": 0, "epoch": 0, "consumed": 4, "length": 10, "shuffle": True}


def test_a_trainer_may_set_the_position_itself() -> None:
    sampler = ResumableDistributedSampler(10, num_replicas=4, rank=0)
    for consumed, after in [(8, (0, 8)), (3, (0, 3)), (10, (1, 0)), (12, (2, 0))]:  # 12: with the padding
        sampler.consumed = consumed
        assert (sampler.epoch, sampler.consumed) == after
    for consumed in (-1, 14):
        with pytest.raises(ConfigError, match="consumed samples in an epoch of 10"):
            sampler.consumed = consumed
    sampler.end_epoch()
    assert sampler.epoch == 3


@pytest.mark.parametrize("samples", [9, -1])
def test_counting_wrongly_is_an_error(samples: int) -> None:
    """A position past the end would make the next epoch lose samples silently."""
    sampler = ResumableDistributedSampler(11, num_replicas=2, rank=0)
    sampler.advance(4)
    with pytest.raises(ConfigError, match="8 are left over all ranks"):
        sampler.advance(samples)
    assert sampler.consumed == 4


class Recorded(torch.utils.data.Dataset[int]):
    """Sample i is i; a file knows which were made, by whichever worker."""

    def __init__(self, length: int, path: Path) -> None:
        self.length, self.path = length, path

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with open(self.path, "ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        return index

    def made(self) -> int:
        return len(self.path.read_bytes().split())


def epochs_of(loader: DataLoader[Any], sampler: ResumableDistributedSampler) -> Iterator[tuple[list[int], State]]:
    """What a user's loop trains on, with the state it could save behind each step, for ever."""
    while True:
        for batch in sampler.batches(loader):
            yield batch.tolist(), sampler.state_dict()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_resumes_after_any_batch(tmp_path: Path, workers: int, persistent: bool, drop_last: bool) -> None:
    """Saved at the first, the middle and the last batch of an epoch, with workers that draw ahead."""
    data = Recorded(11, tmp_path / "made")
    options: dict[str, Any] = {"batch_size": 3, "num_workers": workers, "persistent_workers": persistent}

    def start(state: State | None) -> Iterator[tuple[list[int], State]]:
        sampler = ResumableDistributedSampler(data, seed=5)
        if state is not None:
            sampler.load_state_dict(state)
        return epochs_of(DataLoader(data, sampler=sampler, drop_last=drop_last, **options), sampler)

    run = start(None)
    undisturbed = [next(run) for _ in range(7)]
    per_epoch = 3 if drop_last else 4
    assert [one for batch, _ in undisturbed[:per_epoch] for one in batch] == order(11, seed=5)[: 9 if drop_last else 11]
    last = undisturbed[per_epoch - 1][1]
    assert (last["epoch"], last["consumed"]) == (1, 0)
    if workers:
        assert data.made() > sum(len(batch) for batch, _ in undisturbed)  # so that the test shows something
    for after in (0, 1, per_epoch - 1):
        again = start(undisturbed[after][1])
        assert [next(again) for _ in range(3)] == undisturbed[after + 1 : after + 4]


class StatefulLoader:
    """What torchdata's and other loaders with a state do: prefetch, count what was handed out, save and load that."""

    def __init__(self, loader: DataLoader[Any], sampler: ResumableDistributedSampler) -> None:
        self.loader, self.sampler = loader, sampler

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.batches(self.loader)

    def state_dict(self) -> State:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.sampler.load_state_dict(state["sampler"])


def ranks_train(rank: int, path: Path, length: int, stop: int | None) -> list[list[int]]:
    """A rank's batches up to a stop after `stop` steps, or from the checkpoint to the end of the second epoch."""
    sampler = ResumableDistributedSampler(length)  # rank and world size from the group
    loader = StatefulLoader(DataLoader(range(length), batch_size=2, sampler=sampler), sampler)  # type: ignore[arg-type]
    if path.exists():
        loader.load_state_dict(torch.load(path, weights_only=True))
    seen: list[list[int]] = []
    while sampler.epoch < 2:
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == stop:
                torch.distributed.barrier()
                if rank == 0:
                    torch.save(loader.state_dict(), path)
                return seen
    return seen


def test_three_ranks_go_on_where_two_stopped(tmp_path: Path) -> None:
    """In real groups, through a file; two ranks saw 3 * 2 * 2 samples, three share the other 11."""
    state = tmp_path / "state.pt"
    before = run_ranks(ranks_train, 2, state, 23, 3)
    after = run_ranks(ranks_train, 3, state, 23, None)

    def rows(ranks: list[list[list[int]]]) -> list[int]:
        flat = [[one for batch in batches for one in batch] for batches in ranks]
        return [one for row in zip(*flat, strict=True) for one in row]

    trained = rows(before) + rows(after)
    assert trained[:23] == order(23)
    assert trained[23:24] == order(23)[:1]  # 11 left for 3 ranks: one sample of padding
    assert trained[24:47] == order(23, 1)


def test_the_readme_loop_goes_on_after_a_kill() -> None:
    """As it is printed."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = (one for one in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "load_state_dict" in one)
    seen: list[int] = []
    saved: list[State] = []

    class Killed(Exception):  # noqa: N818
        pass

    def step(batch: torch.Tensor) -> None:
        if len(saved) == 4:
            raise Killed
        seen.extend(batch.tolist())

    names = {"dataset": range(70), "checkpoint": None, "step": step, "save": saved.append}
    with pytest.raises(Killed):
        exec(code, dict(names))
    exec(code, {**names, "checkpoint": saved[-1], "step": lambda batch: seen.extend(batch.tolist())})
    assert seen == [one for epoch in range(10) for one in order(70, epoch)]


def test_a_loader_that_cannot_be_counted_is_refused() -> None:
    sampler = ResumableDistributedSampler(10)
    other = DataLoader(range(10), batch_size=2)  # type: ignore[arg-type,var-annotated]
    own_batches = DataLoader(range(10), batch_sampler=[[0, 1], [2]])  # type: ignore[arg-type,var-annotated]
    for loader, why in [(other, "another sampler"), (own_batches, "custom batch sampler")]:
        with pytest.raises(ConfigError, match=why):
            next(sampler.batches(loader))


def test_nothing_is_left_for_a_loader_that_drops_the_rest() -> None:
    """A resume with larger batches may find less than one of them: the next epoch follows, not an endless loop."""
    sampler = ResumableDistributedSampler(10)
    sampler.advance(8)
    loader = DataLoader(range(10), batch_size=4, drop_last=True, sampler=sampler)  # type: ignore[arg-type,var-annotated]
    assert list(sampler.batches(loader)) == []
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_lightning_and_loaders_take_it_for_torchs_own() -> None:
    """Another class would be wrapped, and sharded twice."""
    sampler = ResumableDistributedSampler([1, 2, 3], num_replicas=2, rank=1, seed=4)
    assert isinstance(sampler, DistributedSampler)
    sampler.advance(2)
    copy = pickle.loads(pickle.dumps(sampler))
    assert (list(copy), copy.state_dict()) == (list(sampler), sampler.state_dict())


def test_a_state_of_another_order_is_refused() -> None:
    """Better no resume than one that trains on some samples twice and on others never."""
    saved = ResumableDistributedSampler(10, seed=3)
    saved.advance(4)
    state = saved.state_dict()
    resumed = ResumableDistributedSampler(10, seed=8)
    resumed.load_state_dict(state)
    assert list(resumed) == list(saved)  # the run's seed, not the new process's
    for other, what in [
        (ResumableDistributedSampler(11), "the number of samples was 10, now 11"),
        (ResumableDistributedSampler(10, shuffle=False), "shuffle was True, now False"),
    ]:
        with pytest.raises(CheckpointError, match=what):
            other.load_state_dict(state)
        assert other.state_dict()["consumed"] == 0
        other.load_state_dict({**state, "consumed": 0, "epoch": 5})  # between epochs, data may grow
        assert other.epoch == 5
    damaged = [{}, {**state, "epoch": "0"}, {**state, "consumed": 11}, {**state, "epoch": -1}, {"epoch": 0}, None]
    for one in damaged:
        with pytest.raises(CheckpointError, match="not a state"):
            resumed.load_state_dict(one)  # type: ignore[arg-type]
    assert resumed.state_dict() == state


def test_wrong_places_and_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="no rank 2 of 2"):
        ResumableDistributedSampler(10, num_replicas=2, rank=2)
    with pytest.raises(ConfigError, match="Stream has no length"):
        ResumableDistributedSampler(Stream())
    with pytest.raises(ConfigError, match="-1 samples"):
        ResumableDistributedSampler(-1)
    assert "WORLD_SIZE" not in os.environ
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(NotInitializedError):  # each rank would train on everything
        ResumableDistributedSampler(10)
