"""Grid Engine takes jobs: what `fairlead submit --to sge` writes, and how it asks; after qsub(1) of Grid Engine 8.1."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from fairlead import SubmitterConfigBase, SubmitterPlugin
from fairlead.errors import ConfigError, RunFailedError
from fairlead_launch.submission import JobState, Request, Submitter, option, render_template, words
from fairlead_runs.programs import ask

TIMEOUT_S = 60.0
TEMPLATE = Path(__file__).with_name("job.sh.j2")


class SGESubmitterConfig(SubmitterConfigBase):
    """A job of Grid Engine on one host, on which Fairlead starts the ranks."""

    name: Literal["sge"] = "sge"
    """The tag."""
    queue: str | None = None
    """The queue; default null: Grid Engine chooses one."""
    pe: str = "smp"
    """The parallel environment that gives slots on one host; a rank takes `resources.cpus_per_device` of them."""


class SGESubmitter(Submitter):
    """`qsub -terse`, `qstat`, `qdel`."""

    config: SGESubmitterConfig
    first_index = 1

    def render(self, request: Request) -> Mapping[str, str]:
        """The job script; `-notify` has SIGUSR2 come a minute before the kill."""
        if request.nodes > 1:
            raise ConfigError("this plugin asks for one host", where="resources.nodes", fix="nodes: 1")
        limit = f"h_rt={int(self.config.time.total_seconds())}" if self.config.time is not None else None
        slots = f"{self.config.pe} {request.devices_per_node * (request.cpus_per_device or 1)}"
        tasks = f"{request.indices[0]}-{request.indices[-1]}" if request.indices else None
        asked = {
            "-N": request.name,
            "-q": self.config.queue,
            "-l": limit,
            "-t": tasks,
            "-tc": request.max_parallel,
            "-wd": request.cwd,
            "-o": request.logs,
        }
        options = [option(name, value) for name, value in asked.items() if value is not None]
        file = request.folder / "members" if request.indices else request.job_files[0]
        values = {
            "options": [*options, option(f"-pe {slots}"), *(option(f"-{n}") for n in ("V", "notify", "r y", "j y"))],
            "variables": request.variables,
            "setup": self.config.setup,
            "command": words([*request.command, "fit", file]),
            "sweep": bool(request.indices),
        }
        own = self.config.template
        return {"job.sh": render_template(own or str(TEMPLATE), values, cwd=request.cwd)}

    def submit(self, request: Request, files: Sequence[Path]) -> str:
        """The number of the job; an array's is `4711.1-4:1`."""
        said, problem = ask(["qsub", "-terse", str(files[0])], time.monotonic() + TIMEOUT_S, self.environ)
        if problem:
            raise RunFailedError("the job is not submitted", where=str(files[0]), why=problem)
        return said.partition(".")[0].strip()

    def state(self, job: str) -> JobState:
        """As the fifth column of qstat has it; a job that has ended is in no list."""
        said, problem = ask(["qstat"], time.monotonic() + TIMEOUT_S, self.environ)
        rows = [line.split() for line in said.splitlines()]
        states = [row[4] for row in rows if len(row) > 4 and row[0] == job.partition(".")[0]]
        if not states:
            return JobState("unknown", problem or "Grid Engine has forgotten the job")
        return JobState("running" if any("r" in state for state in states) else "queued", ", ".join(states))

    def cancel(self, job: str) -> None:
        """Runs qdel."""
        _, problem = ask(["qdel", job], time.monotonic() + TIMEOUT_S, self.environ)
        if problem:
            raise RunFailedError(f"job {job} is not cancelled", why=problem)

    def member(self, job: str, index: int) -> str:
        """As qdel takes it."""
        return f"{job}.{index}"


class SGEQueue(SubmitterPlugin):
    """Hands jobs to Grid Engine."""

    config = SGESubmitterConfig
    runtime = "fairlead_sge.qsub:build"


build = SGESubmitter.build
qsub = SGEQueue()
