"""Shows the progress of a fit in the status of its TrainJob."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from fairlead_lightning.display.progress import position
from fairlead_lightning.metrics.metrics_logger import MetricsLogger
from fairlead_runs.trainjob import StatusServer, TrainJobStatus


class TrainJobProgress:
    """Tells Kubeflow's status server, on rank 0, how far the fit is.

    The metrics are those that were logged: they are on the host by then, and no step waits for the device.
    """

    def __init__(self, server: StatusServer, say: Callable[[str], None] | None = None) -> None:
        self._server = server
        self._say = say
        self._status: TrainJobStatus | None = None

    def training_starts(self, trainer: L.Trainer) -> None:
        """Training begins, or goes on."""
        if trainer.is_global_zero:
            self._status = TrainJobStatus(self._server, step=position(trainer, trainer.lightning_module)[0])
            self._tell(trainer, self._status)

    def after_batch(self, trainer: L.Trainer) -> None:
        """Reports now and then."""
        if self._status is not None and self._status.due():
            self._tell(trainer, self._status)

    def finished(self, trainer: L.Trainer) -> None:
        """The limits of the job were reached."""
        if self._status is not None:
            self._tell(trainer, self._status)
            self.close(finished=True)

    def _tell(self, trainer: L.Trainer, status: TrainJobStatus) -> None:
        file = next((one for one in trainer.loggers if isinstance(one, MetricsLogger)), None)
        status.tell(*position(trainer, trainer.lightning_module), {} if file is None else file.newest)
        self._warn(status)

    def close(self, *, finished: bool) -> None:
        """The fit is over; where it was stopped or has failed, what was told last stays."""
        status, self._status = self._status, None
        if status is not None:
            status.close(finished=finished)
            self._warn(status)

    def _warn(self, status: TrainJobStatus) -> None:
        if (problem := status.problem()) is not None:
            text = f"the TrainJob's status does not show the progress: {problem}; training continues"
            (self._say or rank_zero_warn)(text)
