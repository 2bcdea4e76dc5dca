"""The config of the requeuer `slurm`."""

from __future__ import annotations

from typing import Literal

from fairlead_hpc_signals.base import CommandSettings

__all__ = ["SLURMRequeueConfig"]


class SLURMRequeueConfig(CommandSettings):
    """`scontrol requeue JOB` on rank 0; array tasks as `ARRAY_INDEX`. SLURM then ends this start of the job."""

    name: Literal["slurm"] = "slurm"
