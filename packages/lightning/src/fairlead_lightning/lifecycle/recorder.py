"""Tells the run directory what happens: history, heartbeats, where each rank is."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead.errors import FairleadError, RunFailedError
from fairlead_distributed.process_group import leave_at_exit
from fairlead_distributed.run.ending import newest_text
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.lifecycle.stops import Stops
from fairlead_runs.describe import NO_CHECKPOINT


class Recorder:
    """Writes the history and this rank's heartbeat; it changes nothing about the training."""

    def __init__(self, session: RunSession, stops: Stops) -> None:
        self.session = session
        self._stops = stops

    def beat(self, trainer: L.Trainer, phase: str) -> None:
        """What this rank is at from now on."""
        self.session.beat(phase, trainer.global_step)

    def connected(self, trainer: L.Trainer) -> None:
        """The process group is there; the data are being prepared."""
        leave_at_exit()
        self.session.join(trainer.global_rank, trainer.local_rank, trainer.node_rank)
        self.beat(trainer, "setup")

    def epoch_ends(self, trainer: L.Trainer) -> None:
        """Lightning counts an epoch without a batch, and would call a run finished that has trained nothing more."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        skipped = batches.started < batches.ready == batches.processed  # `on_train_batch_start` has returned -1
        if batches.ready > batches.completed and not skipped:
            raise FairleadError(
                f"epoch {trainer.current_epoch} ended in its batch {batches.completed}, which was not trained on",
                why="a StopIteration left the job's own code, and Lightning takes it for the end of the data",
                fix="give next() a default, or catch it, in training_step and the hooks of a batch",
            )
        if batches.ready == 0:
            raise FairleadError(
                f"epoch {trainer.current_epoch} has no batches",
                why="the training loader yielded none in its second pass",
                fix="have the sampler or loader begin anew behind its last batch; "
                "one with a state_dict, also in the state behind its last batch",
            )

    def record_exception(self, trainer: L.Trainer, exception: BaseException) -> None:
        """Ends this start in the history; what was raised is named, not swallowed. `Stops` tells of stops."""
        if isinstance(exception, SIGTERMException) or self.session.children_stopped(exception) is not None:
            return
        self._stops.left_by(exception)
        pressed = isinstance(exception, KeyboardInterrupt)
        if pressed:
            newest = newest_text(self.session.path)
            exception.add_note(f"{newest}; the same command resumes from there" if newest else NO_CHECKPOINT)
        self.session.raised(exception, trainer.global_step, stopped=pressed)

    def fit_ends(self, trainer: L.Trainer) -> None:
        """The limits of the job were reached, and the last checkpoint is durable."""
        reason = compat.why_over(trainer)
        if reason is None:
            raise RunFailedError(
                f"the training ended short of its limits, at step {trainer.global_step}, epoch {trainer.current_epoch}",
                why="no limit was reached and no stop was requested; a training loader without batches does that, "
                "or a StopIteration that leaves a hook of the job's own",
                fix="look at the length of the training loader, and for next() without a default",
            )
        self.session.complete(step=trainer.global_step, epoch=trainer.current_epoch, reason=reason)
