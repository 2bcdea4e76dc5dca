"""Do ranks, or workers of the loader, train on the same samples? The adapter of a `SampleCheck` to a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as L

from fairlead_distributed.run.sample_check import SampleCheck
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.resume.rank_state import data_rank

_FIX: Final = (
    "a map-style dataset gets a sampler by itself (trainer.use_distributed_sampler); an IterableDataset\n"
    "has to skip what others read: by torch.utils.data.get_worker_info() and torch.distributed.get_rank(), or\n"
    "datasets.distributed.split_dataset_by_node(dataset, rank, world_size).\n"
    "Data that repeat on purpose: trainer.check_samples: false"
)


@compat.only_its_own_batch_hooks
class SameSamples(L.Callback):
    """Looks at the first batches of this start.

    Args:
        enabled: False: never, as for data that repeat on purpose.
        say: Prints a finding, on rank 0.
    """

    def __init__(self, enabled: bool, say: Callable[[str], None] | None = None) -> None:
        self.check = SampleCheck(say or print, _FIX) if enabled else None
        self._session: RunSession | None = None

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session = session

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing was trained in this start."""
        if self.check is not None:
            workers = max((int(getattr(one, "num_workers", 0)) for one in _loaders(trainer)), default=0)
            self.check.begin(self._session, workers)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        """Takes the fingerprint of one of the first batches."""
        if self.check is not None and self.check.saw(batch):
            self.check.compare(data_rank(trainer), _loaders(trainer))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The epoch has fewer batches."""
        if self.check is not None:
            self.check.compare(data_rank(trainer), _loaders(trainer))


def _loaders(trainer: L.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []
