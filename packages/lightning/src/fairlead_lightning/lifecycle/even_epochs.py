"""Ranks with different numbers of batches end an epoch together, instead of waiting for each other for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist

from fairlead.errors import ConfigError
from fairlead.findings import Finding
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_runs.waiting import ranks_text


class EvenEpochs:
    """Every step has all ranks: an epoch ends with the last batch of the rank that has the fewest.

    Where all lengths are known that is agreed once, when the loaders are made. Where a loader is a stream without a
    length, the ranks ask each other before each step whether one of them is at its last batch: one number, on the CPU.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or print
        self._session: RunSession | None = None
        self._asks = self._cut = False
        self._group: dist.ProcessGroup | None = None
        self._reported = False

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks make their own group."""
        return {**self.__dict__, "_group": None}

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session, self._reported = session, False
        self._asks = self._cut = False

    def end(self) -> None:
        """The fit is over."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group, self._asks, self._cut = None, False, False

    def loaders_made(self, trainer: L.Trainer) -> None:
        """Compares their lengths; a collective."""
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        found = gather_objects(compat.batches_of_epoch(trainer))
        known = [batches for batches in found if batches is not None]
        empty = [rank for rank, batches in enumerate(found) if batches == 0]
        if 0 < len(empty) < len(found):
            raise ConfigError(
                f"{ranks_text(empty)} of {len(found)}: no training batch at all",
                where="the training's loader",
                why="every step needs all ranks: no step could be made",
                fix="give every rank data: fewer ranks, smaller batches, or files that divide by the ranks",
            )
        self._asks, self._cut = len(known) < len(found), False
        if self._asks and self._group is None and "cpu" not in str(dist.get_backend_config()):
            self._group = dist.new_group(backend="gloo")  # to ask on a GPU would have the host wait for it
        if known and not self._asks and len(set(known)) > 1:
            fewest, most, self._cut = min(known), max(known), True
            compat.limit_epoch(trainer, fewest)
            few = [rank for rank, batches in enumerate(known) if batches == fewest]
            self._report(trainer, f"{ranks_text(few)} has {fewest} training batches, others up to {most}")

    def is_over(self, empty: bool) -> bool:
        """Whether no epoch can begin here; `empty`: this rank has no batch for it."""
        return self._asks and self._count(empty) > 0

    def before_batch(self, trainer: L.Trainer) -> None:
        """Before the step, since accumulated gradients and schedules go by whether it is the epoch's last one."""
        if not (self._asks or self._cut):
            return
        own = compat.is_last_batch(trainer)
        if self._cut and own:
            compat.end_epoch_here(trainer)  # its loader would have more
        if self._asks and (ended := self._count(own)):
            compat.end_epoch_here(trainer)
            if ended < trainer.world_size:
                self._report(
                    trainer, f"the data of {ended} of {trainer.world_size} ranks has ended before that of the others"
                )

    def _count(self, own: bool) -> int:
        """Of how many ranks it is true."""
        number = torch.tensor(int(own))
        dist.all_reduce(number, group=self._group)
        return int(number)

    def _report(self, trainer: L.Trainer, what: str) -> None:
        if self._reported:
            return
        self._reported = True
        finding = Finding(
            "warning",
            "uneven-inputs",
            f"{what}: an epoch ends for all ranks with the shortest",
            why="each step averages the gradients of all ranks",
            fix="give the ranks equally many batches; ResumableDistributedSampler does, for a dataset with a length",
        )
        if self._session is not None:
            self._session.event(finding.code, what=finding.what)
        if trainer.is_global_zero:
            self._say(str(finding))
