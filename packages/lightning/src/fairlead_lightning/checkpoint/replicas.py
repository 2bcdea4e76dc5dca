"""Do the ranks still hold the same model? Asked after the first step, at each checkpoint, at the end, every N steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import lightning.pytorch as L
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError
from fairlead_distributed import replicated_tensors
from fairlead_distributed._sharded import is_fsdp1
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.run.silent_faults import OnDivergence, ReplicaCheck

_FIX: Final = (
    "A buffer that differs on purpose: trainer.local_buffers: [its name]. Replicas that differ on purpose:\n"
    "trainer.on_divergence: warning"
)


class Replicas:
    """Has a `ReplicaCheck` compare parameters, buffers and optimizer state of all ranks.

    Args:
        on_divergence: As of `ReplicaCheck`.
        steps: Compare every so many optimizer steps too.
        local_buffers: Patterns of the names of buffers that differ over the ranks on purpose.
    """

    def __init__(
        self, on_divergence: OnDivergence = "error", steps: int | None = None, local_buffers: Sequence[str] = ()
    ) -> None:
        self.steps = steps
        self.local_buffers = local_buffers
        self.check = ReplicaCheck(on_divergence, _FIX)
        self._session: RunSession | None = None
        self._parts: dict[str, bool] | None = None
        self._seen = 0
        self._first = False

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session = session

    def training_starts(self, trainer: L.Trainer) -> None:
        """What of the model is the same on all ranks depends on how it is split."""
        if self._session is not None:
            self.check.begin(self._session)
        self._seen, self._first = trainer.global_step, True
        parts = _replicated(trainer)
        self._parts = parts if parts and trainer.world_size > 1 else None
        if self.steps is not None and parts is not None and not parts["parameters"]:
            raise ConfigError(
                f"the weights of {type(trainer.strategy).__name__} cannot be compared over the ranks",
                where="trainer.check_divergence_every_n_steps",
                why="each rank holds other parts of them",
                fix="leave it out, or use strategy: ddp or fsdp2",
            )

    def after_batch(self, trainer: L.Trainer) -> None:
        """Compares after the first step of this start, and every `steps`."""
        step, seen = trainer.global_step, self._seen
        if self._parts is None or step == seen:
            return
        self._seen = step  # several optimizers make several steps in a batch
        if self._first or (self.steps is not None and step // self.steps > seen // self.steps):
            self._first = False
            self.compare(trainer)

    def compare(self, trainer: L.Trainer) -> None:
        """A RunFailedError, the same on all ranks, which call it together, where they do not hold the same."""
        if self._parts is None:
            return
        optimizers = [getattr(one, "optimizer", one) for one in trainer.optimizers]
        pairs = replicated_tensors(
            trainer.lightning_module, optimizers, **self._parts, local_buffers=self.local_buffers
        )
        self.check.compare(trainer.global_step, pairs)


def flattens(strategy: Any) -> bool:
    """Whether each rank holds other parts of flat parameters, fixed when the strategy is set up.

    DeepSpeed's, and Lightning's own FSDP strategy beside the callback.
    """
    parts = strategy.model.modules() if strategy.model is not None else ()
    return "deepspeed" in type(strategy).__name__.lower() or any(map(is_fsdp1, parts))


def _replicated(trainer: L.Trainer) -> dict[str, bool] | None:
    """Which parts of the model each rank holds in full, or as a replica of a shard; None: none."""
    strategy: Any = trainer.strategy
    model = strategy.model
    layout = getattr(strategy, "layout", None)
    # Local SGD lets replicas drift apart between two averages; stages hold other layers.
    drift = getattr(strategy, "_model_averager", None) is not None or getattr(strategy, "replicas_drift", False)
    if drift or getattr(layout, "pipeline", 1) > 1:
        return None
    if isinstance(model, DistributedDataParallel):
        # Before each forward pass DDP copies rank 0's to all: what differs now is no drift.
        return {"parameters": True, "buffers": not model.broadcast_buffers}
    return {"parameters": not flattens(strategy), "buffers": getattr(layout, "tensor", 1) == 1}
