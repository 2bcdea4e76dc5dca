"""The checkpoints of a loop of one's own: Fabric's strategy writes the shared state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.fabric as lf
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from fairlead.errors import ConfigError
from fairlead_distributed.run.session import RunSession
from fairlead_lightning.checkpoint.commits import Commits
from fairlead_lightning.checkpoint.committing import Commit, Problem
from fairlead_runs.commit import RetentionPolicy


class LoopCheckpoints(Commits):
    """Writes the checkpoints of a loop's run; each method is called by all ranks together.

    Args:
        fabric: What the ranks and the strategy are known from.
        session: The run.

    Raises:
        ConfigError: The CheckpointIO does not say when a file is complete.
    """

    def __init__(self, fabric: lf.Fabric, session: RunSession) -> None:
        self.fabric = fabric
        io = own_checkpoint_io(fabric)
        if isinstance(io, AsyncCheckpointIO):
            raise ConfigError(
                "Lightning's AsyncCheckpointIO does not say when a file is complete and may be committed",
                where="LoopRun",
                fix="leave it out, or use fabric(TrainerConfig(checkpoint_io='async'))",
            )
        super().__init__(session, fabric.strategy, io, fabric.global_rank)

    @property
    def leaves_out_buffers(self) -> bool:
        """Whether the shared state may hold other buffers than this rank's.

        Rank 0's own file has rank 0's; what a strategy puts together has any rank's.
        """
        return self._io is None or not self.fabric.is_global_zero

    def save(
        self, step: int, state: Mapping[str, Any], own: Any, metadata: Mapping[str, Any], keep: RetentionPolicy
    ) -> bool:
        """Writes and commits a checkpoint; see `Commits.commit`.

        Args:
            step: The step that it is of.
            state: For `fabric.save`.
            own: This rank's part, plain data, or the error that making it raised: no rank saves then.
            metadata: For the manifest.
            keep: What is kept once this one is complete.

        Raises:
            ConfigError: A rank gave this error as `own`.
        """

        def mine() -> Any:
            if isinstance(own, ConfigError):
                raise own
            return own

        def write(file: Path, commit: Commit) -> Problem:
            return self.through_strategy(file, partial(self.fabric.save, file, dict(state)), commit)

        return self.commit(step, mine, write, metadata, keep)


def own_checkpoint_io(fabric: lf.Fabric) -> Any:
    """The CheckpointIO of a Fabric's strategy; None where that writes past it: FSDP, FSDP2 and DeepSpeed."""
    try:
        return fabric.strategy.checkpoint_io
    except NotImplementedError:
        return None
