"""`fairlead verify` sees which samples an epoch of all ranks has: the same as of one process, or what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fairlead_distributed.objects import gather_objects
from fairlead_distributed.rng import seeded_states
from fairlead_distributed.testing import run_ranks
from fairlead_lightning import compat
from fairlead_lightning.verify.samples import Reading, read_epochs, repeats, unlike_one_process
from integration_tests.verify.loaders import LOADERS, SPLIT_BY_THEMSELVES

Readings = dict[str, list[Reading]]
RIGHT = (
    "shuffled",
    "last batch dropped",
    "one order",
    "sampler of torch",
    "own sampler",
    "splits by itself",
    "own part",
    "split stream",
)
UNKNOWN = {
    "weighted": "drawn at random",
    "stream with a position": "does not restart",
    "own part, augmented": "draws its samples at random",
    "too many ranks": "32 samples of TensorDataset are not read in one process",
    "too many ranks in a stream": "32 samples of Stream are not read in one process",
}
ORDERS = (
    "own order",
    "own seed of torch's sampler",
    "own seed of a sampler",
    "own seed, splits by itself",
    "own seed of a part",
    "own seed of a stream",
)
SMALL = ("too many ranks for torch",)
EVERYTHING = ("same stream", "same stream in another order")


def loader_of(kind: str, rank: int, ranks: int) -> Any:
    """As Lightning gives it to a rank: with a sampler of its own where it has none for ranks."""
    loader = LOADERS[kind]()
    known = isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler)
    if known or kind in SPLIT_BY_THEMSELVES:
        return loader
    shuffled = isinstance(loader.sampler, torch.utils.data.RandomSampler)
    return compat.sharded(loader, shuffled, 0, {"num_replicas": ranks, "rank": rank})


def read_all(rank: int, ranks: int) -> Readings:
    states = [seeded_states(seed) for seed in (1, 2)]
    found = {}
    for kind in LOADERS:
        loader = loader_of(kind, rank, ranks)
        if kind == "stream with a position":
            next(iter(loader))  # as a training leaves it
        found[kind] = read_epochs(loader, states, gather_objects)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Readings]:
    """What two ranks read of each loader."""
    return run_ranks(read_all, 2, 2, timeout=120)


def judged(ranks: list[Readings], kind: str) -> tuple[list[str], str]:
    """Compares them with this process."""
    readings = [rank[kind] for rank in ranks]

    def gather(own: list[Any]) -> list[list[Any]]:
        return [own, *([one.dataset for one in rank] for rank in readings)]

    return unlike_one_process(readings, read_epochs(LOADERS[kind](), [seeded_states(3), seeded_states(4)], gather))


def test_each_loader_is_tried() -> None:
    assert {*RIGHT, *UNKNOWN, *ORDERS, *SMALL, *EVERYTHING} == set(LOADERS)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_split_has_the_samples_of_one_process(ranks: list[Readings], kind: str) -> None:
    assert judged(ranks, kind) == ([], "")


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_cannot_be_known_is_said(ranks: list[Readings], kind: str) -> None:
    found, why = judged(ranks, kind)
    assert not found
    assert UNKNOWN[kind] in why


@pytest.mark.parametrize("kind", ORDERS)
def test_ranks_with_an_order_each_leave_out_samples(ranks: list[Readings], kind: str) -> None:
    (said,), why = judged(ranks, kind)
    assert not why
    assert said.startswith("samples are missing: of ")
    assert "more than once: each rank takes its part of its own order; shuffle with one seed" in said


@pytest.mark.parametrize("kind", SMALL)
def test_parts_that_are_too_small_leave_out_samples(ranks: list[Readings], kind: str) -> None:
    (said,), why = judged(ranks, kind)
    assert not why
    assert "leaves out 32 of 96 samples that one process reads (" in said
    assert "ranks take too small a part" in said


@pytest.mark.parametrize("kind", EVERYTHING)
def test_ranks_that_read_everything_are_told_so(ranks: list[Readings], kind: str) -> None:
    (said,), why = judged(ranks, kind)
    assert not why
    assert said.startswith("samples are read twice: of Stream, an epoch of 2 replicas reads 96 of 96 samples more than")


def test_the_missing_ones_are_named() -> None:
    """By their place in the dataset, or by their number in what one process reads."""
    places = [[0, 1, 2, 3]] * 2
    ranks = [[Reading("Set", 4, indices=[[0]] * 2, batch=1)], [Reading("Set", 4, indices=[[3]] * 2, batch=1)]]
    (said,), _ = unlike_one_process(ranks, [Reading("Set", 4, indices=places)])
    assert "leaves out 2 of 4 samples that one process reads (1, 2)" in said


def test_a_dataset_that_is_cut_to_full_batches_is_right() -> None:
    """Fewer samples than one batch of all ranks, at its end."""
    places = [[0, 2, 4], [1, 3, 5]]
    ranks = [[Reading("Set", 8, indices=[one, one], batch=2)] for one in places]
    assert unlike_one_process(ranks, [Reading("Set", 8, indices=[list(range(8))] * 2)]) == ([], "")


@pytest.mark.parametrize(("step", "found"), [(1, True), (2, False)])
def test_long_streams_that_overlap_are_found(step: int, found: bool) -> None:
    """In what is read of them; what is missing is not known then."""
    parts = [list(range(first, 400, step)) for first in range(2)]
    ranks = [[Reading("Set", begun=one, why="long")] for one in parts]
    said, why = unlike_one_process(ranks, [Reading("Set", begun=list(range(400)), why="long")])
    assert bool(said) == found
    assert why == "an epoch of Set is long"


def test_data_that_repeat_are_known() -> None:
    def alone(loader: Any) -> list[Reading]:
        return read_epochs(loader, [seeded_states(3), seeded_states(4)], lambda own: [own])

    assert repeats(alone(LOADERS["weighted"]()))
    assert repeats(alone(DataLoader(range(4), 2, sampler=[0, 0, 1, 1])))  # type: ignore[arg-type]
    assert not repeats(alone(LOADERS["shuffled"]()))
    assert not repeats(alone(LOADERS["split stream"]()))


def test_reading_changes_no_generator() -> None:
    torch.manual_seed(5)
    first = torch.rand(())
    torch.manual_seed(5)
    read_epochs(LOADERS["weighted"](), [seeded_states(3), seeded_states(4)], lambda own: [own])
    assert torch.rand(()) == first


@pytest.mark.parametrize("loader", [[1, 2], iter([1])])
def test_a_loader_that_is_no_dataloader_is_not_known(loader: Any) -> None:
    (one,) = read_epochs({"a": _Loader(loader)}, [seeded_states(3), seeded_states(4)], lambda own: [own])
    assert "no DataLoader" in one.why


class _Loader:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)
