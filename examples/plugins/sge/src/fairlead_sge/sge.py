"""Grid Engine: the settings, and what this plugin contributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fairlead import EnvironmentConfigBase, EnvironmentPlugin, Job, StopReason, Unused, hookimpl
from fairlead.variables import number, text
from fairlead_sge.reasons import ask_qstat

RECORDED = ("JOB_ID", "JOB_NAME", "SGE_TASK_ID", "QUEUE", "PE", "NHOSTS", "NSLOTS", "RESTARTED", "SGE_CELL")


class SGEEnvironmentConfig(EnvironmentConfigBase):
    """A job of Grid Engine; its ranks are started by `mpirun`, or by Fairlead on one host."""

    name: Literal["sge"] = "sge"
    """The tag."""


class SGE(EnvironmentPlugin):
    """Jobs of Grid Engine. It claims no rank, as Grid Engine starts none: it knows the job around them."""

    config = SGEEnvironmentConfig
    requeue = "command"  # the requeuer that runs what the job names
    example_environ: ClassVar[Mapping[str, str]] = {"JOB_ID": "4711", "SGE_TASK_ID": "undefined", "JOB_NAME": "train"}

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """JOB_ID alone is a name that many programs use; SGE_TASK_ID is `undefined` outside of an array."""
        job, task = text(environ, "JOB_ID"), text(environ, "SGE_TASK_ID")
        if job is None or task is None:
            return None
        index = task.value if task.value.isdecimal() else None
        name = job.value if index is None else f"{job.value}.{index}"
        return Job(
            f"sge:{name}",
            attempt=1 if environ.get("RESTARTED") == "1" else 0,  # whether, not how often
            array_task=index,
            cancel=f"qdel {name}",
            requeue=("qmod", "-rj", name),
            interactive=environ.get("JOB_SCRIPT") in ("QLOGIN", "QRLOGIN", "QRSH"),
            cpus_on_node=number(environ, "NSLOTS") if environ.get("NHOSTS", "1") == "1" else None,
            variables=RECORDED,
        )

    @hookimpl
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> StopReason | None:
        """As `qstat` shows it."""
        job = self.fairlead_job(environ)
        return None if job is None else ask_qstat(job.requeue[-1], environ, deadline)

    @hookimpl
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """A parallel environment of several hosts: the job script runs on the first."""
        hosts = number(environ, "NHOSTS")
        if hosts is None or hosts.value == 1 or self.fairlead_job(environ) is None:
            return None
        return Unused(f"Grid Engine allocated {hosts.value} hosts (NHOSTS)", "mpirun did not start this", "mpirun")


sge = SGE()
