"""The submitter `slurm`: `sbatch`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

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
    """Whether SLURM may requeue the job. `expedite` is that of Slurm 25.11: a job whose node failed starts before all
    others."""
    chain: int | None = Field(default=None, ge=2)
    """If no job may be requeued: queue this many jobs, of which one runs at a time and resumes where the previous one
    stopped; see [a chain of jobs](../how-to/preemption.md#a-chain-of-jobs)."""
    exclusive: bool = False
    """Whether the nodes are for this job alone."""
    exclude: str | None = None
    """Nodes to leave out: `n[3-5]`."""
    screen: bool = False
    """Whether each node is looked at before the ranks start, and a bad one is left out; see
    [bad nodes](../how-to/bad-nodes.md)."""
    mail: str | None = None
    """An address that hears of the job's begin, end and failure."""

    @model_validator(mode="after")
    def _chain_alone(self) -> Self:
        if self.chain is not None and (self.array or self.dependency):
            raise ValueError("a chain waits for its own jobs: leave out array and dependency")
        return self


class SLURM(SubmitterPlugin):
    """Hands jobs to SLURM."""

    config = SLURMSubmitterConfig
    runtime = "fairlead_launch.submission.slurm_runtime:build"


slurm = SLURM()
