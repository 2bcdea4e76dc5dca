"""Shows the progress of a fit in the status of its TrainJob."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from fairlead_lightning import compat
from fairlead_lightning.display.progress import position
from fairlead_lightning.metrics.metrics_logger import MetricsLogger
from fairlead_runs.trainjob import StatusServer, TrainJobStatus


@compat.only_its_own_batch_hooks
class TrainJobProgress(L.Callback):
    """Tells Kubeflow's status server, on rank 0, how far the fit is.

    The metrics are those that were logged: they are on the host by then, and no step waits for the device.
    """

    def __init__(self, server: StatusServer, say: Callable[[str], None] | None = None) -> None:
        self._server = server
        self._say = say
        self._status: TrainJobStatus | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training begins, or goes on."""
        if trainer.is_global_zero:
            self._status = TrainJobStatus(self._server, step=position(trainer, pl_module)[0])
            self._tell(trainer, pl_module, self._status)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        """Reports now and then."""
        status = self._status
        if status is not None and status.due():
            self._tell(trainer, pl_module, status)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The limits of the job were reached."""
        if self._status is not None:
            self._tell(trainer, pl_module, self._status)
            self._close(finished=True)

    def on_exception(self, *_: Any, **__: Any) -> None:
        """The fit was stopped, or failed: what was told last stays."""
        self._close(finished=False)

    def _tell(self, trainer: L.Trainer, pl_module: L.LightningModule, status: TrainJobStatus) -> None:
        file = next((one for one in trainer.loggers if isinstance(one, MetricsLogger)), None)
        status.tell(*position(trainer, pl_module), {} if file is None else file.newest)
        self._warn(status)

    def _close(self, *, finished: bool) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.close(finished=finished)
            self._warn(status)

    def _warn(self, status: TrainJobStatus) -> None:
        if (problem := status.problem()) is not None:
            text = f"the TrainJob's status does not show the progress: {problem}; training continues"
            (self._say or rank_zero_warn)(text)
