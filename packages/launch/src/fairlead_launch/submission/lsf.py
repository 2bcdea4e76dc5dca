"""The submitter `lsf`: `bsub`. Written from IBM's documentation; tried with stand-ins of its commands."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from fairlead.errors import ConfigError, RunFailedError
from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.batch import BatchSubmitterConfig, batch_values, job_file_word, own_options
from fairlead_launch.submission.interface import REFUSED, JobState, NotAnsweredError, Phase, Request, Submitter, of_all
from fairlead_launch.submission.templates import Raw, option, render_template, words
from fairlead_runs.exit_codes import ExitCode
from fairlead_runs.programs import ask, find


class LSFSubmitterConfig(BatchSubmitterConfig):
    """A batch job of LSF, whose ranks `blaunch` or `jsrun` starts. Tried with stand-ins of LSF's commands only.

    Example:
        >>> LSFSubmitterConfig(time="24:00:00", partition="gpu").name
        'lsf'
    """

    name: Literal["lsf"] = "lsf"
    requeue: bool = True
    """Whether LSF may requeue the job."""
    launcher: Literal["blaunch", "jsrun"] = "blaunch"
    """What starts the ranks: `jsrun` on IBM's Power systems, `blaunch` elsewhere."""


class LSF(SubmitterPlugin):
    """Hands jobs to LSF."""

    config = LSFSubmitterConfig
    runtime = "fairlead_launch.submission.lsf:build"


_TIMEOUT: Final = 60.0
_PHASES: Final[Mapping[str, Phase]] = {
    "PEND": "queued",
    "PSUSP": "queued",
    "WAIT": "queued",
    "RUN": "running",
    "USUSP": "running",
    "SSUSP": "running",
    "UNKWN": "running",
    "PROV": "running",
    "DONE": "finished",
    "EXIT": "failed",
    "ZOMBI": "failed",
}


class LSFSubmitter(Submitter):
    """`bsub`; asked by `bjobs`, ended by `bkill`."""

    config: LSFSubmitterConfig
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
        values = {
            **batch_values(config, request),
            "options": [option(_dashed(name), value) for name, value in own_options(own, config).items()],
            "launcher": self._launcher(request),
            "command": self._command(request),
            "threads": None if request.gpus else request.cpus_per_device,
        }
        return {"job.lsf": render_template("lsf.sh.j2", values, own=config.template, cwd=request.cwd)}

    def submit(self, request: Request, files: Sequence[Path]) -> str:
        """Runs `bsub < script`; returns the number of the job."""
        program = find("bsub", self.environ)
        if program is None:
            raise RunFailedError("the job is not submitted: bsub is not on the PATH", fix="submit from a login node")
        # It reads the options of a script from its input only.
        with files[0].open("rb") as script:
            try:
                done = subprocess.run(
                    [program], stdin=script, capture_output=True, timeout=_TIMEOUT, env=dict(self.environ), check=False
                )
            except subprocess.TimeoutExpired as error:
                raise NotAnsweredError(
                    f"bsub did not answer within {_TIMEOUT:.0f} s: the job may be queued or not",
                    fix="ask with bjobs whether the job is there before you submit it again",
                ) from error
        said = f"{done.stdout.decode(errors='replace')}\n{done.stderr.decode(errors='replace')}".strip()
        number = re.search(r"^Job <(\d+)> is submitted", said, re.MULTILINE)
        if done.returncode or number is None:
            raise RunFailedError(
                "the job is not submitted: bsub refused it", where=str(files[0]), why=said[:500], fix=REFUSED
            )
        return number[1]

    def state(self, job: str) -> JobState:
        """As bjobs says it."""
        asked = ["bjobs", "-a", "-noheader", "-o", "stat exit_reason pend_reason delimiter='|'", job]
        said, problem = ask(asked, time.monotonic() + _TIMEOUT, self.environ)
        rows = [line.split("|") for line in said.splitlines() if "|" in line]
        found = []
        for stat, ended, pending, *_ in rows:
            killed = "TERM_OWNER" in ended or "TERM_ADMIN" in ended
            phase: Phase = "cancelled" if stat == "EXIT" and killed else _PHASES.get(stat, "unknown")
            reason = next((text for text in (ended, pending) if text.strip() not in ("", "-")), "")
            found.append(JobState(phase, reason.strip(), {"STAT": stat}))
        return of_all(found, problem or "LSF has forgotten the job")

    def cancel(self, job: str) -> None:
        """Runs bkill: the ranks save, and nothing starts them again."""
        _, problem = ask(["bkill", job], time.monotonic() + _TIMEOUT, self.environ)
        if problem:
            raise RunFailedError(f"job {job} is not cancelled", why=problem)

    def member(self, job: str, index: int) -> str:
        """As LSF writes it, `4711[2]`."""
        return f"{job}[{index}]"

    def output(self, request: Request, job: str) -> Path | None:
        """Where `-o` puts it."""
        return request.logs / (f"lsf-{job}_*.out" if request.indices else f"lsf-{job}.out")

    def _name(self, request: Request) -> str:
        if not request.indices:
            return request.name
        indices = self.config.array if not request.sweep else f"{request.indices[0]}-{request.indices[-1]}"
        parallel = f"%{request.max_parallel}" if request.max_parallel else ""
        return f"{request.name}[{indices}]{parallel}"

    def _slots(self, request: Request) -> dict[str, object]:
        if self.config.launcher == "jsrun":
            return {"-nnodes": request.nodes}
        cores = f" affinity[core({request.cpus_per_device})]" if request.cpus_per_device else ""
        memory = f" rusage[mem={math.ceil(request.host_memory_gib)}GB]" if request.host_memory_gib else ""
        gpus = {"-gpu": f"num={request.devices_per_node}"} if request.gpus and self.config.gpus != "none" else {}
        return {"-n": request.world_size, "-R": f"span[ptile={request.devices_per_node}]{cores}{memory}", **gpus}

    def _launcher(self, request: Request) -> Raw:
        if self.config.launcher == "blaunch":
            return Raw("blaunch")
        sets = ["jsrun", "--nrs", request.world_size, "--rs_per_host", request.devices_per_node, "--tasks_per_rs", 1]
        sets += ["--gpu_per_rs", 1] if request.gpus and self.config.gpus != "none" else []
        sets += ["--cpu_per_rs", request.cpus_per_device] if request.cpus_per_device else []
        return words(sets)

    def _command(self, request: Request) -> Raw:
        inside = self.config.container.words(request) if self.config.container is not None else ()
        return Raw(f"{words([*inside, *request.command, 'fit'])} {job_file_word(request)}")


def _dashed(name: str) -> str:
    return name if name.startswith("-") else f"-{name}"


build = LSFSubmitter.build
lsf = LSF()
