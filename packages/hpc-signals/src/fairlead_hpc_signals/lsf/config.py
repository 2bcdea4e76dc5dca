"""The config of the requeuer `lsf`."""

from __future__ import annotations

from typing import Literal

from fairlead_hpc_signals.base import CommandSettings

__all__ = ["LSFRequeueConfig"]


class LSFRequeueConfig(CommandSettings):
    """`brequeue JOB` on rank 0; array elements as `JOB[INDEX]`. LSF then ends this start of the job."""

    name: Literal["lsf"] = "lsf"
