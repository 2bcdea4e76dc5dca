"""What the ranks of a layout have left, as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairlead.errors import ConfigError
from fairlead_lightning.verify.numbers import Tensors
from fairlead_lightning.verify.plan import START, batches_file, rank_file


@dataclass
class Notes:
    """The complete training of a layout.

    Attributes:
        ranks: The notes of each rank, by rank.
        start: Weights and buffers of rank 0 before the first batch.
        batches: Those of each replica, in order.
    """

    ranks: list[dict[str, Any]]
    start: Tensors
    batches: list[list[Any]]

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """What is in the folder of a verification, whose ranks have come to their end.

        Raises:
            ConfigError: Nothing was trained.
        """
        first = _load(folder / rank_file(0))
        ranks = [first, *(_load(folder / rank_file(rank)) for rank in range(1, first["world_size"]))]
        batches = [_load(folder / batches_file(replica)) for replica in range(first["replicas"])]
        count = min(map(len, batches))
        if not count or not first["gradients"]:
            raise ConfigError(
                "the job cannot be verified: no step of an optimizer was made",
                where="trainer",
                why=f"{count} batches were trained on, {first['accumulate']} make a step",
                fix="give it more batches (limit_train_batches), and parameters that require gradients",
            )
        return cls(ranks, _load(folder / START), [one[:count] for one in batches])

    def fact(self, name: str) -> Any:
        """A fact that is the same on all ranks: `accumulate`, `placements`."""
        return self.ranks[0][name]

    @property
    def accumulate(self) -> int:
        """Batches of a replica to one step."""
        count: int = self.fact("accumulate")
        return count

    @property
    def replicas(self) -> int:
        """Data-parallel replicas, each of which takes different batches."""
        return len(self.batches)

    @property
    def losses(self) -> list[float]:
        """The mean over the replicas, of each step."""
        return [sum(step) / len(step) for step in zip(*self.losses_by_replica, strict=True)]

    @property
    def losses_by_replica(self) -> list[list[float]]:
        """The loss of each step, of each replica by its first rank."""
        found: dict[int, list[float]] = {}
        for rank in self.ranks:
            every = rank["losses"][: len(self.batches[0])]
            sums = [sum(every[i : i + self.accumulate]) for i in range(0, len(every), self.accumulate)]
            found.setdefault(rank["replica"], sums)
        return [found[replica] for replica in sorted(found)]

    @property
    def other_batches(self) -> list[int]:
        """Ranks that got other batches than the first rank of their replica."""
        first: dict[int, list[str]] = {}
        for rank in self.ranks:
            first.setdefault(rank["replica"], rank["digests"])
        return [number for number, rank in enumerate(self.ranks) if rank["digests"] != first[rank["replica"]]]

    @property
    def full_epoch(self) -> bool:
        """Whether the batches are all that a loader has."""
        return self.fact("length") is not None and len(self.batches[0]) >= int(self.fact("length"))

    def of_rank(self, rank: int, what: str) -> Tensors:
        """Whole gradients or weights as a rank has them."""
        found: Tensors = {**self.fact(what), **self.ranks[rank]["others"][what]}
        return found


def _load(path: Path) -> Any:
    # The files are this verification's own, and batches may be objects of the user's classes.
    return torch.load(path, weights_only=False)
