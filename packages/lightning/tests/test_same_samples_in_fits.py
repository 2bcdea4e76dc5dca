"""Ranks or workers that train on the same samples are told so, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_job import Line, events, make_trainer, samples
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fairlead_distributed.testing import run_ranks


class Everything(IterableDataset[Any]):
    """Each rank and each worker reads all of it, unless it is `split`."""

    def __init__(self, split: bool = False) -> None:
        self.split = split

    def __iter__(self) -> Iterator[Any]:
        data = samples(32)
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
        ranks = torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ranks else (0, 1)
        step, first = (workers * world, worker * world + rank) if self.split else (1, 0)
        return (data[index] for index in range(first, len(data), step))


def fit(root: Path, loader: Any, **config: Any) -> list[str]:
    trainer = make_trainer(root, max_epochs=1, **config)
    trainer.fit(Line(), loader, DataLoader(samples(8), batch_size=4))
    return [event["what"] for event in events(root / "run", "same-samples")]


def on_two_ranks(rank: int, root: Path) -> dict[str, list[str]]:
    stream, split = Everything(), Everything(split=True)
    shuffled = DataLoader(samples(32), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    return {
        "stream": fit(root / "stream", DataLoader(stream, 4), **two),
        "split": fit(root / "split", DataLoader(split, 4), **two),
        "map": fit(root / "map", DataLoader(samples(32), 4, shuffle=True), **two),
        "no sampler": fit(root / "no", shuffled, **two, use_distributed_sampler=False),
        "on purpose": fit(root / "purpose", DataLoader(stream, 4), **two, check_samples=False),
        "short": fit(root / "short", DataLoader(stream, 16), **two),  # two batches in an epoch
    }


def test_ranks_that_read_the_same(tmp_path: Path) -> None:
    (got, _) = run_ranks(on_two_ranks, 2, tmp_path, timeout=120)
    said = ["ranks 0, 1 train on the same samples"]
    assert got == {"stream": said, "split": [], "map": [], "no sampler": said, "on purpose": [], "short": said}


def test_workers_that_read_the_same(tmp_path: Path) -> None:
    said = ["the 2 workers of the loader read the same samples"]
    assert fit(tmp_path / "stream", DataLoader(Everything(), 4, num_workers=2)) == said
    assert fit(tmp_path / "split", DataLoader(Everything(split=True), 4, num_workers=2)) == []
    assert fit(tmp_path / "map", DataLoader(samples(), 4, num_workers=2)) == []
