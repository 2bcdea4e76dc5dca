"""Do ranks, or workers of the loader, train on the same samples? Looked at in the first batches of each start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as L

from fairlead.findings import Finding
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.same_samples import batch_fingerprint, ranks_with_the_same, workers_read_the_same
from fairlead_lightning import compat
from fairlead_lightning.resume.rank_state import data_rank
from fairlead_runs.waiting import ranks_text

_BATCHES: Final = 4


@compat.only_its_own_batch_hooks
class SameSamples(L.Callback):
    """Compares fingerprints of the first batches of this start over the ranks that should have different ones.

    Args:
        enabled: False: never, as for data that repeat on purpose.
        say: Prints a finding, on rank 0.
    """

    def __init__(self, enabled: bool, say: Callable[[str], None] | None = None) -> None:
        self.enabled = enabled
        self._say = say or print
        self._session: RunSession | None = None
        self._seen: list[bytes | None] | None = None
        self._most = _BATCHES

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session = session

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing was trained in this start."""
        workers = max((int(getattr(one, "num_workers", 0)) for one in _loaders(trainer)), default=0)
        alone = trainer.world_size == 1 and workers < 2
        self._seen = [] if self.enabled and not alone else None
        self._most = max(gather_objects(max(_BATCHES, 2 * workers)))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        """Takes the fingerprint of one of the first batches."""
        if self._seen is not None:
            self._seen.append(batch_fingerprint(batch))
            if len(self._seen) == self._most:
                self._compare(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The epoch has fewer batches."""
        if self._seen is not None:
            self._compare(trainer)

    def _compare(self, trainer: L.Trainer) -> None:
        own, self._seen = self._seen or [], None
        first: dict[int, list[bytes | None]] = {}  # one of the ranks that share a batch
        members: dict[int, int] = {}
        for rank, (of_data, seen) in enumerate(gather_objects((data_rank(trainer), own))):
            if of_data not in members:
                members[of_data] = rank
                first[rank] = seen
        loaders = _loaders(trainer)
        names = ", ".join(sorted({type(getattr(one, "dataset", one)).__name__ for one in loaders}))
        same = ranks_with_the_same(first)
        workers = [int(getattr(one, "num_workers", 0)) for one in loaders]
        in_workers = len(loaders) == 1 and workers_read_the_same(own, workers[0])
        if same:
            why = f"half or more of their first {len(own)} batches are equal"
            self._tell(trainer, f"{ranks_text(same)} train on the same samples", why, names)
        elif any(gather_objects(in_workers)):
            self._tell(
                trainer,
                f"the {workers[0]} workers of the loader read the same samples",
                "each of their first batches comes from every worker",
                names,
            )

    def _tell(self, trainer: L.Trainer, what: str, why: str, names: str) -> None:
        finding = Finding(
            "warning",
            "same-samples",
            what,
            where=f"the training's dataset, {names}",
            why=f"{why}: an epoch trains on each sample several times",
            fix="a map-style dataset gets a sampler by itself (trainer.use_distributed_sampler); an IterableDataset\n"
            "has to skip what others read: by torch.utils.data.get_worker_info() and torch.distributed.get_rank(), or\n"
            "datasets.distributed.split_dataset_by_node(dataset, rank, world_size).\n"
            "Data that repeat on purpose: trainer.check_samples: false",
        )
        if self._session is not None:
            self._session.event(finding.code, what=what)
        if trainer.is_global_zero:
            self._say(str(finding))


def _loaders(trainer: L.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []
