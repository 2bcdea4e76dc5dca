"""The submitter `lsf`: `bsub`. Written from IBM's documentation; tried with stand-ins of its commands."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from fairlead.errors import ConfigError
from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.batch import BatchSubmitter, BatchSubmitterConfig, Raw, words
from fairlead_launch.submission.interface import JobState, Phase, Request, of_all
from fairlead_runs.exit_codes import ExitCode


class LSFSubmitterConfig(BatchSubmitterConfig):
    """A batch job of LSF, whose ranks `blaunch` starts. Tried with stand-ins of LSF's commands only.

    Example:
        >>> LSFSubmitterConfig(time="24:00:00", partition="gpu").name
        'lsf'
    """

    name: Literal["lsf"] = "lsf"
    requeue: bool = True
    """Whether LSF may requeue the job."""


class LSF(SubmitterPlugin):
    """Hands jobs to LSF."""

    config = LSFSubmitterConfig
    runtime = "fairlead_launch.submission.lsf:build"


_STATES: Final[Mapping[Phase, str]] = {
    "queued": "PEND PSUSP WAIT",
    "running": "RUN USUSP SSUSP UNKWN PROV",
    "finished": "DONE",
    "failed": "EXIT ZOMBI",
}
_PHASES: Final = {state: phase for phase, states in _STATES.items() for state in states.split()}


class LSFSubmitter(BatchSubmitter):
    """`bsub`; queried by `bjobs`, ended by `bkill`."""

    config: LSFSubmitterConfig
    submits, asks, cancels = "bsub", "bjobs", "bkill"
    first_index = 1

    def render(self, request: Request) -> Mapping[str, str]:
        """The job script."""
        config = self.config
        if config.tasks == "node" and request.devices_per_node > 1:
            raise ConfigError("LSF starts one task for each rank", where="submit.tasks", fix="leave it out")
        own: dict[str, object] = {
            "-J": self._name(request),
            **self._slots(request),
            "-W": math.ceil(config.time.total_seconds() / 60) if config.time else None,
            "-q": config.partition,
            "-P": config.account,
            "-sla": config.qos,
            "-w": config.dependency,
            "-cwd": request.cwd,
            "-o": request.logs / ("lsf-%J_%I.out" if request.indices else "lsf-%J.out"),  # it appends
            # Without a limit of the job's own it has the queue's.
            "-wa": "USR2",
            "-wt": math.ceil(request.warn_s / 60),
            **({"-r": True, "-Q": int(ExitCode.AGAIN)} if config.requeue else {"-rn": True}),
        }
        if own["-W"] is not None and int(str(own["-wt"])) >= int(str(own["-W"])):
            own["-wa"] = own["-wt"] = None  # bsub refuses a warning that would come before the start
        if config.constraint:
            own["-R"] = " ".join(filter(None, (str(own.get("-R") or ""), config.constraint)))
        script = self.script(
            "lsf.sh.j2",
            request,
            own,
            command=Raw(f"blaunch {words([*self.inside(request), *request.command, 'fit'])} {self.job_file(request)}"),
            threads=None if request.gpus else request.cpus_per_device,
        )
        return {"job.lsf": script}

    def submit(self, request: Request, files: Sequence[Path]) -> str:
        """Runs `bsub < script`, as it reads the options of a script from its input only; returns the job's number."""
        done = self.hand_over(files[0], shell=("/bin/sh", "-c", 'exec "$0" < "$1"'))
        number = re.search(r"^Job <(\d+)> is submitted", f"{done.output}\n{done.complaint}", re.MULTILINE)
        if number is None:
            raise self.refused(files[0], done)
        return number[1]

    def state(self, job: str) -> JobState:
        """As bjobs says it."""
        fields = "stat exit_reason pend_reason delimiter='|'"
        answer, problem = self.ask("bjobs", "-a", "-noheader", "-o", fields, job)
        rows = [line.split("|") for line in answer.splitlines() if "|" in line]
        found = []
        for stat, ended, pending, *_ in rows:
            killed = "TERM_OWNER" in ended or "TERM_ADMIN" in ended
            phase: Phase = "cancelled" if stat == "EXIT" and killed else _PHASES.get(stat, "unknown")
            reason = next((text for text in (ended, pending) if text.strip() not in ("", "-")), "")
            found.append(JobState(phase, reason.strip(), {"STAT": stat}))
        return of_all(found, problem or "LSF has forgotten the job")

    def member(self, job: str, index: int) -> str:
        """As LSF writes it, `4711[2]`."""
        return f"{job}[{index}]"

    def output(self, request: Request, job: str) -> Path | None:
        """Where `-o` puts it."""
        return request.logs / (f"lsf-{job}_*.out" if request.indices else f"lsf-{job}.out")

    def _name(self, request: Request) -> str:
        array = self.array(request)
        if array is None:
            return request.name
        indices, percent, parallel = array.partition("%")
        return f"{request.name}[{indices}]{percent}{parallel}"

    def _slots(self, request: Request) -> dict[str, object]:
        cores = f" affinity[core({request.cpus_per_device})]" if request.cpus_per_device else ""
        memory = f" rusage[mem={math.ceil(request.host_memory_gib)}GB]" if request.host_memory_gib else ""
        gpus = {"-gpu": f"num={request.devices_per_node}"} if request.gpus and self.config.gpus != "none" else {}
        return {"-n": request.world_size, "-R": f"span[ptile={request.devices_per_node}]{cores}{memory}", **gpus}


build = LSFSubmitter.build
lsf = LSF()
