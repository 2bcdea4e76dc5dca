"""The requeuer `chain`: the next job is queued already, behind this one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.interfaces import Requeuer
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.programs import JOB_UNKNOWN, UnansweredError, check_job
from fairlead_hpc_signals.slurm import exclusion
from fairlead_runs.chain import CHAIN
from fairlead_runs.programs import ask, find

if TYPE_CHECKING:
    from fairlead.resolve import Resolution


class ChainRequeueConfig(RequeueConfigBase):
    """Leaves it to the next of several jobs of one name, which were submitted together and run one at a time.

    For clusters where no job may be requeued: `sbatch --job-name=NAME --dependency=singleton --no-requeue`, K times.
    """

    name: Literal["chain"] = "chain"
    job_name: str | None = Field(default=None, min_length=1)
    """The name of these jobs. Default null: the variable FAIRLEAD_CHAIN, else SLURM_JOB_NAME."""
    timeout_s: float = Field(default=10.0, gt=0, strict=False)
    """Seconds that SLURM may take to say whether a job is left."""


class Chain(RequeuePlugin):
    """Asks SLURM whether a job is left."""

    config = ChainRequeueConfig
    runtime = "fairlead_hpc_signals.chain:build"
    extra = "slurm"
    example_environ: ClassVar[Mapping[str, str]] = {"SLURM_JOB_ID": "7", CHAIN: "gpt"}
    codes: ClassVar[Mapping[str, str]] = {**JOB_UNKNOWN}
    before_the_launcher = True  # a job that were requeued as well would run beside the chain's next

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """The variable of the chain's batch script."""
        return f"{CHAIN} is set" if environ.get(CHAIN) else None

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job of SLURM?"""
        yield from check_job(resolution, "slurm")


class ChainRequeuer(Requeuer):
    """Starts nothing; says which job is next, or that none is left; where none is wanted, cancels them."""

    config: ChainRequeueConfig

    def requeue(self) -> str:
        """The next job, where SLURM answers.

        Raises:
            RunFailedError: None is left, or SLURM does not answer.
        """
        name = self._name()
        if find("squeue", self.environ) is None:  # in a container; it starts all the same
            return f"the next job of the chain {name}, if one is left: squeue is not on the PATH"
        answer, problem = self._ask("squeue", "--noheader", *self._queued(name), "--format=%i")
        if problem:
            raise UnansweredError("SLURM does not say whether a job of the chain is left", where=name, why=problem)
        left = answer.split()
        if not left:
            raise RunFailedError(
                "the job does not restart: this was the last one of its chain",
                where=name,
                fix="submit more; the run resumes from here",
            )
        return f"job {left[0]} of the chain {name} is next, of {len(left)} left"

    def requeue_without(self, nodes: Sequence[str]) -> str:
        """The next job, once what is left of the chain is not to get these nodes."""
        done = self.requeue()
        left, problem = self._ask("squeue", "--noheader", *self._queued(self._name()), "--format=%i")
        if problem:
            raise UnansweredError("SLURM does not say which jobs of the chain are left", why=problem)
        for job in left.split():
            self._told(*exclusion(job, nodes, self._told))
        return f"{done}; none of them gets {', '.join(nodes)}"

    def not_again(self) -> None:
        """Cancels what is left of the chain.

        Raises:
            RunFailedError: SLURM has not done it, or does not answer from here.
        """
        name = self._name()
        _, problem = self._ask("scancel", *self._queued(name))
        if problem:
            raise RunFailedError(
                "what is left of the chain is not cancelled",
                where=name,
                why=problem,
                fix=f"scancel --name={name}, where SLURM's commands are",
            )

    def _name(self) -> str:
        name = self.config.job_name or self.environ.get(CHAIN) or self.environ.get("SLURM_JOB_NAME")
        if not name:
            raise RunFailedError(
                "it is not known which chain the job belongs to",
                where="trainer.requeue.job_name",
                why=f"neither {CHAIN} nor SLURM_JOB_NAME is set",
                fix="set `requeue: {name: chain, job_name: ...}`",
            )
        return name

    @staticmethod
    def _queued(name: str) -> tuple[str, ...]:
        return (f"--user={os.getuid()}", f"--name={name}", "-t", "PENDING")

    def _told(self, *words: str) -> str:
        answer, problem = self._ask(*words)
        if problem:
            raise RunFailedError("the nodes are not excluded from the chain", where=" ".join(words), why=problem)
        return answer

    def _ask(self, *words: str) -> tuple[str, str]:
        return ask(words, time.monotonic() + self.config.timeout_s, self.environ)


build = ChainRequeuer.build
chain = Chain()
