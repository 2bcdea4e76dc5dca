"""Do the ranks still hold the same weights? Asked every N steps, and a run in which they do not ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L

from fairlead.errors import ConfigError, RunFailedError
from fairlead_distributed import first_divergence
from fairlead_distributed._sharded import is_fsdp1
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_runs.commit import list_checkpoints
from fairlead_runs.waiting import ranks_text


@compat.only_its_own_batch_hooks
class Replicas(L.Callback):
    """Compares the weights of all ranks bit for bit every `steps` optimizer steps; None: never.

    Each time the weights are read once, copied to the CPU and hashed; of equal ones only one hash a rank travels.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self._session: RunSession | None = None
        self._seen = 0

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session = session

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Where each rank holds other parts of a weight, nothing can be compared."""
        self._seen = trainer.global_step
        parts: Mapping[str, Any] = dict(trainer.model.named_modules()) if trainer.model is not None else {}
        sharded = "deepspeed" in type(trainer.strategy).__name__.lower() or any(map(is_fsdp1, parts.values()))
        if self.steps is not None and sharded:
            raise ConfigError(
                f"the weights of {type(trainer.strategy).__name__} cannot be compared over the ranks",
                where="trainer.check_divergence_every_n_steps",
                why="each rank holds other parts of them",
                fix="leave it out, or use strategy: ddp or fsdp2",
            )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """A RunFailedError, the same on all ranks, where their weights differ."""
        step = trainer.global_step
        if self.steps is None or trainer.world_size == 1 or step // self.steps == self._seen // self.steps:
            return  # several optimizers make several steps in a batch
        self._seen = step
        found = first_divergence(pl_module)
        if found is None:
            return
        groups = "; ".join(ranks_text(one) for one in found.groups)
        if self._session is not None:
            self._session.event("diverged", step=step, what=str(found), ranks=list(found.ranks))
        kept = list_checkpoints(self._session.path / "checkpoints") if self._session is not None else []
        newest = f"; the newest checkpoint is of step {kept[-1].step}" if kept else ""
        raise RunFailedError(
            f"at step {step} the ranks do not hold the same weights any more: {found}",
            where=str(self._session.path) if self._session is not None else f"rank {trainer.global_rank}",
            why=f"ranks that agree with each other: {groups}{newest}",
            fix="look for what one rank does alone: weights changed under `if rank == 0`, a buffer or seed of its own "
            "in the model's start, an optimizer step left out; or for a device with faulty memory",
        )
