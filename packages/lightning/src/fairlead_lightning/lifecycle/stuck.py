"""A rank that fails or hangs during a fit: the adapter of a `FailureWatch` to Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead_distributed.info import get_world_size
from fairlead_distributed.run.failure_watch import FailureWatch
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.stuck import GRACE


class StuckRanks(FailureWatch):
    """Watches a fit from the moment that its ranks are connected."""

    def __init__(
        self, environ: Mapping[str, str], *, timeout: timedelta | None = None, grace: timedelta = GRACE
    ) -> None:
        super().__init__(environ, timeout=timeout, grace=grace)
        self._session: RunSession | None = None

    def begin(self, trainer: L.Trainer, session: RunSession, *, here: bool = True) -> None:
        """A fit of this run begins, `here` or in ranks that it spawns; watched once the ranks are connected."""
        self._session = session
        if here and trainer.world_size in (1, get_world_size()):
            self._watch_fit(trainer, session)

    def connected(self, trainer: L.Trainer) -> None:
        """The ranks are connected, also those that Lightning has started."""
        if self._session is not None and self._watch is None:
            self._watch_fit(trainer, self._session)

    def _watch_fit(self, trainer: L.Trainer, session: RunSession) -> None:

        def progress() -> object:
            loop = trainer.fit_loop.epoch_loop
            validated = loop.val_loop.batch_progress.total.ready
            return trainer.current_epoch, loop.batch_progress.total.ready, validated, trainer.state.stage

        self.watch(session, trainer.global_rank, trainer.local_rank, progress)

    def left_by(self, exception: BaseException | None) -> None:
        """The fit is left; Lightning's own exception of a signal is a stop."""
        super().left_by(None if isinstance(exception, SIGTERMException) else exception)

    def failed(self, error: BaseException, report: Callable[[], object] = lambda: None) -> None:
        """The fit has failed; Lightning's own exception of a signal is no failure."""
        if isinstance(error, SIGTERMException):
            report()
        else:
            super().failed(error, report)
