"""Do ranks, or workers of the loader, train on the same samples? Looked at in the first batches of each start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from fairlead.findings import Finding
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.same_samples import batch_fingerprint, ranks_with_the_same, workers_read_the_same
from fairlead_runs.waiting import ranks_text

_BATCHES: Final = 4


class SampleCheck:
    """Compares fingerprints of the first batches of a start over the ranks that should have different ones.

    Args:
        say: Prints a finding, on rank 0.
        fix: How data are said to repeat on purpose.
    """

    def __init__(self, say: Callable[[str], None], fix: str) -> None:
        self._say = say
        self._fix = fix
        self._session: RunSession | None = None
        self._seen: list[bytes | None] | None = None
        self._most = _BATCHES

    def begin(self, session: RunSession | None, workers: int) -> None:
        """The training begins, with so many workers of its loaders; all ranks call it together."""
        self._session = session
        alone = (not dist.is_initialized() or dist.get_world_size() == 1) and workers < 2
        self._seen = None if alone else []
        self._most = max(gather_objects(max(_BATCHES, 2 * workers)))

    def saw(self, batch: Any) -> bool:
        """Takes the fingerprint of one of the first batches; whether they are to be compared now."""
        if self._seen is None:
            return False
        self._seen.append(batch_fingerprint(batch))
        return len(self._seen) == self._most

    def compare(self, data_rank: int, loaders: Sequence[Any]) -> None:
        """Compares what was seen, if it was not yet; all ranks call it together, ranks of one `data_rank` share it."""
        if self._seen is None:
            return
        own, self._seen = self._seen, None
        first: dict[int, list[bytes | None]] = {}  # one of the ranks that share a batch
        members: dict[int, int] = {}
        for rank, (of_data, seen) in enumerate(gather_objects((data_rank, own))):
            if of_data not in members:
                members[of_data] = rank
                first[rank] = seen
        names = ", ".join(sorted({type(getattr(one, "dataset", one)).__name__ for one in loaders}))
        same = ranks_with_the_same(first)
        workers = [int(getattr(one, "num_workers", 0)) for one in loaders]
        in_workers = len(loaders) == 1 and workers_read_the_same(own, workers[0])
        if same:
            why = f"half or more of their first {len(own)} batches are equal"
            self._tell(f"{ranks_text(same)} train on the same samples", why, names)
        elif any(gather_objects(in_workers)):
            self._tell(
                f"the {workers[0]} workers of the loader read the same samples",
                "each of their first batches comes from every worker",
                names,
            )

    def _tell(self, what: str, why: str, names: str) -> None:
        finding = Finding(
            "warning",
            "same-samples",
            what,
            where=f"the training's dataset, {names}",
            why=f"{why}: an epoch trains on each sample several times",
            fix=self._fix,
        )
        if self._session is not None:
            self._session.event(finding.code, what=what)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._say(str(finding))
