"""The requeuer `slurm`: `scontrol requeue`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead_hpc_signals.programs import CommandSettings, requeue_command
from fairlead_hpc_signals.scheduler import why_stopped
from fairlead_hpc_signals.scheduler_requeue import SchedulerRequeue, SchedulerRequeuer
from fairlead_runs.programs import ask

if TYPE_CHECKING:
    from fairlead.resolve import Resolution


_CHECK_TIMEOUT: Final = 5.0  # seconds that the start of a job may wait for an answer
_SUBMIT: Final = "resubmit the job; with `sbatch --requeue` SLURM lets it be requeued"


class SLURMRequeueConfig(CommandSettings):
    """`scontrol requeue JOB` on rank 0; array tasks as `ARRAY_INDEX`. SLURM then ends this start of the job."""

    name: Literal["slurm"] = "slurm"


class SLURM(SchedulerRequeue):
    """Asks SLURM."""

    config = SLURMRequeueConfig
    runtime = "fairlead_hpc_signals.slurm:build"
    extra = "slurm"
    program = "scontrol"
    start = "sbatch or srun"
    # Messages of Slurm's own (slurm_errno.c); every other failure, such as a busy controller, is retried.
    refusals: ClassVar[Mapping[str, str]] = {
        "Invalid job id": "resubmit the job; SLURM no longer knows it",
        "Requested operation is presently disabled": _SUBMIT,
        "Access/permission denied": "resubmit the job; on this cluster users may not requeue: try `requeue: script`",
    }
    # SLURM ends the job's processes as it requeues it, and sometimes the command itself before it has its answer.
    done_before = ("Job is pending execution",)
    example_environ: ClassVar[Mapping[str, str]] = {"SLURM_JOB_ID": "7"}
    codes: ClassVar[Mapping[str, str]] = {
        **SchedulerRequeue.codes,
        "requeue-refused": "SLURM does not let this job be requeued: it was submitted so, or is no batch job.",
    }

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, the command, and does SLURM allow it?"""
        yield from super().fairlead_check(resolution, environ)
        job = requeue_command(resolution.job, "slurm")
        if not (resolution.inside_job and job and resolution.value("global_rank") == 0):
            return
        # Queried now: at the stop it would be too late. Without an answer there is no warning.
        if why_stopped(environ, timeout_s=_CHECK_TIMEOUT).may_requeue is False:
            yield Finding(
                "warning",
                "requeue-refused",
                f"SLURM will not requeue job {job[-1]}: a stop saves everything, but it is not restarted",
                where="trainer.requeue",
                why="its Requeue is 0 (sbatch --no-requeue, or JobRequeue=0 in slurm.conf), or sbatch did not start it",
                fix="submit it with `sbatch --requeue`; or `requeue: none`, if it must not restart",
            )


class SLURMRequeuer(SchedulerRequeuer):
    """`scontrol requeue`, and what a job of SLURM can do besides.

    SLURM then sends SIGCONT and SIGTERM to all processes of the job, the caller included, and SIGKILL after KillWait.
    """

    def requeue_without(self, nodes: Sequence[str]) -> str:
        """Requeues this job, and excludes nodes from it while its processes are still being ended.

        It is not held for that: if we were killed before its release, it would stay held.
        """
        words = exclusion(self.command()[-1], nodes, self._ask)
        done = self.requeue()
        try:
            return f"{done}; {self.run(words)}"
        except RunFailedError as error:
            return f"{done}; the nodes could not be excluded: {error.why}"

    def cancel(self) -> None:
        """`scancel`: the exit code 143 of a stop would make the job FAILED. An allocation of `salloc` is left alone."""
        argv = requeue_command(self.job, "slurm")
        if not argv or self.environ.get("ENVIRONMENT") != "BATCH":  # sbatch sets it
            return
        _, problem = ask(["scancel", argv[-1]], time.monotonic() + self.config.timeout_s, self.environ)
        if problem:
            raise RunFailedError(f"the job is not cancelled: scancel {argv[-1]}", why=problem)

    def _ask(self, *words: str) -> str:
        output, problem = ask(words, time.monotonic() + self.config.timeout_s, self.environ)
        if problem:
            raise RunFailedError("the job is not requeued: SLURM does not answer", where=" ".join(words), why=problem)
        return output


build = SLURMRequeuer.build
slurm = SLURM()


Ask = Callable[..., str]
"""Runs a command, as words, and returns what it prints; RunFailedError: it gave no answer."""


def exclusion(job: str, nodes: Sequence[str], ask: Ask) -> tuple[str, ...]:
    """The command that excludes nodes from a job, besides those that its user has excluded: it replaces them.

    SLURM takes it of a pending job only; a job is that as soon as it is requeued, while its processes are being ended.

    Raises:
        RunFailedError: The job could not start without them, and would be pending for ever.
    """
    shown = ask("scontrol", "show", "job", "-o", job).partition(" UserId=")[2]
    found = re.findall(r"\s(NumNodes|Partition|ExcNodeList|ReqNodeList)=(\S*)", shown)
    fields = dict(reversed(found))  # the first of each: a comment, which may say anything, comes last
    before = fields.get("ExcNodeList", "").replace("(null)", "")
    partition, needed = fields.get("Partition", ""), re.match(r"\d+", fields.get("NumNodes", ""))
    named = set(_expanded(fields.get("ReqNodeList", ""), ask)) & set(nodes)
    there = set(ask("sinfo", "--noheader", f"--partition={partition}", "--Node", "--format=%N").split())
    left = there - set(nodes) - set(_expanded(before, ask))
    if named or needed is None or len(left) < int(needed[0]):
        few = (
            f"it needs {needed[0] if needed else 'some'} nodes, and the partition {partition} has {len(there)}, of "
            f"which {len(left)} would be left"
        )
        raise RunFailedError(
            f"the job is not requeued without {', '.join(nodes)}: it could not start",
            where=f"job {job}",
            why=f"the job asks for {', '.join(sorted(named))} by name" if named else few,
            fix="have the nodes repaired, ask for fewer, or submit to another partition",
        )
    names = ",".join([*([before] if before else []), *nodes])
    return ("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")


def _expanded(names: str, ask: Ask) -> list[str]:
    return ask("scontrol", "show", "hostnames", names).split() if names not in ("", "(null)") else []
