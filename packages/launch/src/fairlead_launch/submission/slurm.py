"""The submitter `slurm`: `sbatch`."""

from __future__ import annotations

from typing import Literal

from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.batch import BatchSubmitterConfig


class SLURMSubmitterConfig(BatchSubmitterConfig):
    """A batch job of SLURM, whose ranks `srun` starts.

    Example:
        >>> SLURMSubmitterConfig(time="24:00:00", partition="gpu").name
        'slurm'
    """

    name: Literal["slurm"] = "slurm"
    requeue: bool | Literal["expedite"] = True
    """Whether SLURM may start the job again. `expedite` is that of Slurm 25.11: a job whose node failed is started
    before all others."""
    exclusive: bool = False
    """Whether the nodes are for this job alone."""
    exclude: str | None = None
    """Nodes to leave out: `n[3-5]`."""
    mail: str | None = None
    """An address that hears of the job's begin, end and failure."""


class SLURM(SubmitterPlugin):
    """Hands jobs to SLURM."""

    config = SLURMSubmitterConfig
    runtime = "fairlead_launch.submission.slurm_runtime:build"


slurm = SLURM()
