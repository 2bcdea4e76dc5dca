"""The requeuer `lsf`: `brequeue`. Written from IBM's documentation; never tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fairlead_hpc_signals.programs import CommandSettings
from fairlead_hpc_signals.scheduler_requeue import SchedulerRequeue


class LSFRequeueConfig(CommandSettings):
    """`brequeue JOB` on rank 0; array elements as `JOB[INDEX]`. LSF then ends this start of the job."""

    name: Literal["lsf"] = "lsf"


class LSF(SchedulerRequeue):
    """Asks LSF."""

    config = LSFRequeueConfig
    extra = "lsf"
    program = "brequeue"
    start = "bsub"
    refusals: ClassVar[Mapping[str, str]] = {
        "No matching job found": "resubmit the job; LSF no longer knows it",
        "User permission denied": "resubmit the job, or try `requeue: script`",
    }
    example_environ: ClassVar[Mapping[str, str]] = {"LSB_JOBID": "7"}


lsf = LSF()
