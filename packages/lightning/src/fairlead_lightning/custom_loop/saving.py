"""The checkpoints of a loop of one's own: Fabric's strategy writes the shared state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import lightning.fabric as lf
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from fairlead.config import CheckpointConfig
from fairlead.errors import ConfigError
from fairlead_distributed.finite import non_finite_weights
from fairlead_distributed.run.session import RunSession
from fairlead_lightning.checkpoint.commits import Commit, Commits, Problem
from fairlead_lightning.checkpoint.finite import finite_weights
from fairlead_lightning.custom_loop.state import OWN, LoopState

_FIX: Final = "a smaller learning rate, clipped gradients, or other data; LoopRun(finite=False) continues anyway"


class LoopCheckpoints(Commits):
    """Writes the checkpoints of a loop's run; each method is called by all ranks together."""

    def __init__(self, fabric: lf.Fabric, session: RunSession, config: CheckpointConfig, *, finite: bool) -> None:
        self.fabric = fabric
        self._finite = finite
        io = own_checkpoint_io(fabric)
        if isinstance(io, AsyncCheckpointIO):
            raise ConfigError(
                "Lightning's AsyncCheckpointIO does not say when a file is complete and may be committed",
                where="LoopRun",
                fix="leave it out, or use fabric(TrainerConfig(checkpoint_io='async'))",
            )
        super().__init__(session, fabric.strategy, io, fabric.global_rank, config)

    def save(
        self,
        step: int,
        objects: LoopState,
        entry: Mapping[str, Any],
        metrics: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> bool:
        """Writes and commits a checkpoint of the objects, with the run's own entry; see `Commits.commit`.

        Raises:
            RunFailedError: A weight is not finite, and has to be.
        """
        names = [f"{name}.{weight}" for name, module in objects.modules() for weight in non_finite_weights(module)]
        finite = finite_weights(names, self.session, step, _FIX, ends=self._finite)
        state = {**objects.of_strategy(), OWN: entry}
        # Whether the shared state may have another rank's buffers: a file has rank 0's, a strategy's any.
        buffers = self._io is None or not self.fabric.is_global_zero

        def own() -> dict[str, Any]:
            state.update(objects.others())
            return objects.own(buffers=buffers)

        def write(file: Path, commit: Commit) -> Problem:
            return self.through_strategy(file, partial(self.fabric.save, file, state), commit)

        values = {name: _number(name, value) for name, value in metrics.items()}
        return self.commit(step, own, write, values, {**metadata, "finite": finite})


def own_checkpoint_io(fabric: lf.Fabric) -> Any:
    """The CheckpointIO of a Fabric's strategy; None where that writes past it: FSDP, FSDP2 and DeepSpeed."""
    try:
        return fabric.strategy.checkpoint_io
    except NotImplementedError:
        return None


def _number(name: str, value: Any) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric {name!r} is not one number", where="LoopRun.save(metrics=...)", why=str(error)
        ) from error
