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


@compat.only_its_own_batch_hooks
class EvenEpochs(L.Callback):
    """Every step has all ranks: an epoch ends with the last batch of the rank that has the fewest.

    Where all lengths are known that is agreed once, when the loaders are made. Where a loader is a stream without a
    length, the ranks ask each other before each step whether one of them is at its last batch: one number, on the CPU.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or print
        self._session: RunSession | None = None
        self._asks = self._cut = False
        self._group: dist.ProcessGroup | None = None
        self._told = False
        self._undo: Callable[[], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks begin with `setup`."""
        return {**self.__dict__, "_group": None, "_undo": _nothing}

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session, self._told = session, False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The ranks are connected; no loader is made yet."""
        self._undo()
        self._asks, self._cut, self._undo = False, False, _nothing
        if stage == "fit" and trainer.world_size > 1 and dist.is_initialized():
            self._undo = compat.watch_epochs(trainer, lambda: self._compare(trainer), self._begins)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves the trainer as it was."""
        self._undo()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._undo, self._group = _nothing, None

    def _compare(self, trainer: L.Trainer) -> None:
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
            self._tell(trainer, f"{ranks_text(few)} has {fewest} training batches, others up to {most}")

    def _begins(self, empty: bool) -> bool:
        return self._asks and self._count(empty) > 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Before the step, since accumulated gradients and schedules go by whether it is the epoch's last one."""
        if not (self._asks or self._cut):
            return
        own = compat.is_last_batch(trainer)
        if self._cut and own:
            compat.end_epoch_here(trainer)  # its loader would have more
        if self._asks and (ended := self._count(own)):
            compat.end_epoch_here(trainer)
            if ended < trainer.world_size:
                self._tell(
                    trainer, f"the data of {ended} of {trainer.world_size} ranks has ended before that of the others"
                )

    def _count(self, own: bool) -> int:
        """Of how many ranks it is true."""
        number = torch.tensor(int(own))
        dist.all_reduce(number, group=self._group)
        return int(number)

    def _tell(self, trainer: L.Trainer, what: str) -> None:
        if self._told:
            return
        self._told = True
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


def _nothing() -> None:
    """There is nothing to undo."""
