"""A validation, test or prediction ends when its scheduler wants it."""

from __future__ import annotations

import signal
from typing import Any

import lightning.pytorch as L

from fairlead.interfaces import StopSignals
from fairlead_lightning import compat
from fairlead_lightning.lifecycle.stopping import StopRequested


@compat.only_its_own_batch_hooks
class StopEvaluation(L.Callback):
    """Ends a validation, test or prediction after the batch in which a signal came; nothing of it is kept.

    Args:
        flags: The signals of this process.
    """

    def __init__(self, flags: StopSignals) -> None:
        self._flags = flags

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keeps Lightning's own handlers away: theirs starts a collective wherever the rank is."""
        compat.without_signal_handlers(trainer)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        if self._flags.raised:
            raise StopRequested(128 + (signal.SIGINT if set(self._flags.counts) == {"SIGINT"} else signal.SIGTERM))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
