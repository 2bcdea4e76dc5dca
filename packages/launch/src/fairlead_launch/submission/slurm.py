"""The submitter `slurm`: `sbatch`; tried with 22.05."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from fairlead.errors import ConfigError
from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.batch import BatchSubmitter, BatchSubmitterConfig, Raw, words
from fairlead_launch.submission.interface import JobState, Phase, Request, of_all


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
    exclusive: bool = False
    """Whether the nodes are for this job alone."""
    exclude: str | None = None
    """Nodes to leave out: `n[3-5]`."""
    screen: bool = False
    """Whether each node is looked at before the ranks start, and a bad one is left out; see
    [bad nodes](../how-to/bad-nodes.md)."""


class SLURM(SubmitterPlugin):
    """Hands jobs to SLURM."""

    config = SLURMSubmitterConfig
    runtime = "fairlead_launch.submission.slurm:build"


_STATES: Final[Mapping[Phase, str]] = {
    "queued": "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT",
    "running": "RUNNING COMPLETING STAGE_OUT SUSPENDED STOPPED SIGNALING RESIZING",
    "finished": "COMPLETED",
    "cancelled": "CANCELLED REVOKED",
    "failed": "BOOT_FAIL DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT",
}
_PHASES: Final = {state: phase for phase, states in _STATES.items() for state in states.split()}
_SQUEUE: Final = ("State", "Reason", "StartTime", "TimeLeft", "RestartCnt", "NodeList")
_SACCT: Final = ("State", "ExitCode", "Start", "End", "NodeList")


class SLURMSubmitter(BatchSubmitter):
    """`sbatch --parsable`; queried by `squeue`, then `sacct`, then `scontrol`; ended by `scancel`."""

    config: SLURMSubmitterConfig
    submits, asks, cancels = "sbatch", "squeue --me", "scancel"

    def render(self, request: Request) -> Mapping[str, str]:
        """The batch script."""
        config, cpus = self.config, self._cpus_per_task(request)
        logs = str(request.logs).replace("%", "%%")
        own: dict[str, object] = {
            "job-name": request.name,
            "nodes": request.nodes,
            "ntasks-per-node": self._tasks_per_node(request),
            "cpus-per-task": cpus,
            **self._devices(request),
            "mem": f"{math.ceil(request.host_memory_gib * 1024)}M" if request.host_memory_gib else None,
            "time": _minutes(config.time.total_seconds()) if config.time else None,
            "partition": config.partition,
            "account": config.account,
            "qos": config.qos,
            "constraint": config.constraint,
            "exclude": ",".join([*([config.exclude] if config.exclude else []), *request.excluded]) or None,
            "exclusive": config.exclusive or None,
            "dependency": config.dependency,
            "array": self.array(request),
            "chdir": request.cwd,
            "output": f"{logs}/{'slurm-%A_%a.out' if request.indices else 'slurm-%j.out'}",
            "open-mode": "append",
            "signal": f"USR1@{request.warn_s}",
            **({"requeue": config.requeue} if config.requeue else {"no-requeue": True}),
        }
        screen = self._screen(request) if config.screen else None
        script = self.script(
            "slurm.sh.j2",
            request,
            own,
            command=self._command(request),
            screen=screen,
            cpus_per_task=cpus,
            requeue=config.requeue,
        )
        if screen is not None and screen not in script:
            raise ConfigError(
                "the template does not have the nodes looked at",
                where=f"submit.template: {config.template}",
                why="submit.screen is true, and the template has no {{ screen }}",
                fix="run it before the ranks: `srun {{ screen }} || exit`; or set submit.screen to false",
            )
        return {"job.sh": script}

    def submit(self, request: Request, files: Sequence[Path]) -> str:
        """Runs sbatch; returns the job's number."""
        done = self.hand_over(files[0], "--parsable")
        # It prints `JOB`, or `JOB;CLUSTER`; a site's own plugin may print lines before it.
        return done.output.strip().splitlines()[-1].partition(";")[0]

    def state(self, job: str) -> JobState:
        """As squeue says it, which knows a job for some minutes after its end; else as sacct does."""
        squeue = ["squeue", "--noheader", "--array", "--states=all", "--Format", ",".join(f"{n}:|" for n in _SQUEUE)]
        sacct = ["sacct", "--parsable2", "--noheader", "--allocations", f"--format={','.join(_SACCT)}"]
        for query, names in ((squeue, _SQUEUE), (sacct, _SACCT)):
            answer, problem = self.ask(*query, "--jobs", job, SLURM_TIME_FORMAT="standard")
            rows = [dict(zip(names, line.split("|"), strict=False)) for line in answer.splitlines() if "|" in line]
            if rows:
                break
        return of_all(map(_state, rows), problem or "SLURM has forgotten the job")

    def output(self, request: Request, job: str) -> Path | None:
        """Where `--output` puts it."""
        return request.logs / (f"slurm-{job}_*.out" if request.indices else f"slurm-{job}.out")

    def _tasks_per_node(self, request: Request) -> int:
        return 1 if self.config.tasks == "node" else request.devices_per_node

    def _cpus_per_task(self, request: Request) -> int | None:
        if request.cpus_per_device is None:
            return None
        return request.cpus_per_device * request.devices_per_node // self._tasks_per_node(request)

    def _devices(self, request: Request) -> dict[str, object]:
        if not request.gpus or self.config.gpus == "none":
            return {}
        if self.config.gpus == "task":
            return {"gpus-per-task": request.devices_per_node // self._tasks_per_node(request)}
        return {"gpus-per-node": request.devices_per_node}

    def _pyxis(self, request: Request) -> list[str]:
        container = self.config.container
        if container is None or container.runtime != "pyxis":
            return []
        mounts = ",".join(m if ":" in m else f"{m}:{m}" for m in container.all_mounts(request))
        image = [f"--container-image={container.image}", f"--container-mounts={mounts}"]
        return [*image, f"--container-workdir={request.cwd}", *container.extra]

    def _inside(self, request: Request) -> list[str]:
        return [*self._pyxis(request), *self.inside(request)]

    def _screen(self, request: Request) -> Raw:
        """One doctor for each node, with all of its devices; one that ends early must not end the others."""
        own = ["--ntasks-per-node=1", "--kill-on-bad-exit=0"]
        if "gpus-per-task" in self._devices(request):
            own.append(f"--gpus-per-task={request.devices_per_node}")
        inside = words([*own, *self._inside(request), *request.command, "doctor", "--nodes"])
        return Raw(f'--ntasks="$SLURM_JOB_NUM_NODES" {inside} {self.job_file(request)}')

    def _command(self, request: Request) -> Raw:
        # The launcher takes the nodes from SLURM, and restarts the ranks if one has failed.
        several = self.config.tasks == "node" and request.devices_per_node > 1
        launch = ["launch", f"--nproc={request.devices_per_node}", "-m", "fairlead"] if several else []
        return Raw(f"{words([*self._inside(request), *request.command, *launch, 'fit'])} {self.job_file(request)}")


def _state(row: Mapping[str, str]) -> JobState:
    # `CANCELLED by 1000`; an array's reason is `(Resources)` in some versions.
    name = row["State"].strip().partition(" ")[0].rstrip("+")
    reason = row.get("Reason", "").strip().strip("()")
    details = {key: value.strip() for key, value in row.items() if key != "Reason"}
    if name == "PENDING" and reason.startswith("JobHeld"):
        reason += ": `scontrol release` lets it start"
    return JobState(_PHASES.get(name, "unknown"), "" if reason == "None" else reason, details)


def _minutes(seconds: float) -> str:
    total = math.ceil(seconds / 60)
    days, rest = divmod(total, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


build = SLURMSubmitter.build
slurm = SLURM()
