"""What is known of a launch, as plain data: each value with the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

__all__ = ["Claim", "Devices", "Job", "Setting", "Specificity", "StopReason", "Unused", "Why"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A resolved value and the reason for it, `Setting(4, "SLURM_NNODES")`."""

    value: Any
    reason: str


class Specificity(IntEnum):
    """How closely a claim describes *this* process; the highest wins."""

    MACHINE = 0
    """Any machine: nothing says that a launcher is at work."""
    MANUAL = 10
    """Variables that a person exports: MASTER_ADDR, NODE_RANK."""
    SCHEDULER = 20
    """A scheduler started this very process as a task: a SLURM step, an LSF task, a pod."""
    LAUNCHER = 30
    """A launcher inside the scheduler's task started it: mpirun."""
    AGENT = 40
    """An agent on this node started it and will restart it: torchrun."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An environment's statement that it started this process, with the evidence for it."""

    evidence: str
    specificity: Specificity = Specificity.SCHEDULER


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a scheduler that this process runs in, whoever started the process inside it.

    Args:
        id: Scheduler and id, `slurm:4711`; each task of an array has its own.
        attempt: How often the scheduler has restarted it. A job never runs twice at a time, so a higher attempt proves
            the lower one dead.
        array_task: The index of this task in its array, as the scheduler writes it; None outside of one.
        cancel: The command line that ends the job, `scancel 4711`.
        requeue: The command that has the scheduler restart the job, as words, of which the last names the job;
            empty where there is none.
        interactive: Whether a person sits at it, so that nothing is left that could be restarted.
        cpus_per_rank: CPUs for each task, where the user requested a number.
        cpus_on_node: CPUs of this node that belong to the job.
        variables: Names of environment variables to record with the run, none of them a secret.

    Example:
        >>> job = Job("slurm:4711", cancel="scancel 4711", requeue=("scontrol", "requeue", "4711"))
        >>> job.scheduler, job.attempt
        ('slurm', 0)
    """

    id: str
    attempt: int = 0
    array_task: str | None = None
    cancel: str | None = None
    requeue: tuple[str, ...] = ()
    interactive: bool = False
    cpus_per_rank: Setting | None = None
    cpus_on_node: Setting | None = None
    variables: tuple[str, ...] = ()

    @property
    def scheduler(self) -> str:
        """What the id says before the colon."""
        return self.id.partition(":")[0]


Why = Literal["preempted", "time_limit", "cancelled", "node_failure", "requeued", "unknown"]
"""`preempted`: another job gets the nodes; `time_limit`: the job's time is up, or nearly; `cancelled`: a person ended
it; `node_failure`: a node of the job failed; `requeued`: somebody has requeued it already; `unknown`: the scheduler
did not say, as after `scancel -s USR1`."""


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why a job is to stop, and from what that was read.

    Args:
        why: The reason. A job that was `cancelled` is never restarted; each other has its budget.
        evidence: What the scheduler reported, for the history.
        remaining_s: Seconds until the scheduler ends the job; None where that is not known.
        scheduler_requeues: Whether it is requeued already: then nothing else may requeue it.
        may_requeue: Whether the scheduler lets it be requeued; None where that is not known.
        grace_s: Seconds that the scheduler grants between SIGTERM and SIGKILL; None where that is not known.
    """

    why: Why
    evidence: str
    remaining_s: float | None = None
    scheduler_requeues: bool = False
    may_requeue: bool | None = None
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unused:
    """What a scheduler gave to a job, and one process that its launcher did not start leaves unused.

    Args:
        what: As a sentence's beginning: `SLURM allocated 2 nodes (SLURM_NNODES)`.
        why: How it is known that the launcher did not start this process.
        launcher: The command that would use it all, `srun`.
    """

    what: str
    why: str
    launcher: str


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one kind on this machine.

    Args:
        count: How many this process may use; 0 when there are none.
        evidence: How that was found: `nvidia-smi`, `CUDA_VISIBLE_DEVICES`, `/dev/nvidia*`.
        names: Model names, as far as they are known, such as `NVIDIA H100 80GB HBM3`.
        unlimited: True where the count is no limit (processes on a CPU).
    """

    count: int
    evidence: str
    names: tuple[str, ...] = ()
    unlimited: bool = False
