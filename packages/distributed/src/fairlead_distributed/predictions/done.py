"""Which batches of a loader are in shards already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fairlead_distributed.predictions.shard_file import About


@dataclass
class Done:
    """What the shards of one loader hold: batches by number, as runs of first number and count, in order."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    samples: int = 0

    @property
    def count(self) -> int:
        """How many batches."""
        return sum(count for _, count in self.runs)

    def left(self, total: int) -> list[tuple[int, int]]:
        """What is missing of so many batches."""
        ends = [0, *(first + count for first, count in self.runs)]
        begins = [*(first for first, _ in self.runs), total]
        return [(end, begin - end) for end, begin in zip(ends, begins, strict=True) if begin > end]


def done_of(shards: Iterable[About], loader: int) -> Done:
    """What these shards hold of one loader."""
    mine = [about for about in shards if about.loader == loader]
    runs: list[tuple[int, int]] = []
    for first, count in sorted((first, count) for about in mine for first, count in about.batches):
        end = runs[-1][0] + runs[-1][1] if runs else 0
        begin, stop = max(first, end), first + count
        if runs and begin == end:
            runs[-1] = (runs[-1][0], max(stop, end) - runs[-1][0])
        elif stop > begin:
            runs.append((begin, stop - begin))
    return Done(runs, sum(about.samples for about in mine))
