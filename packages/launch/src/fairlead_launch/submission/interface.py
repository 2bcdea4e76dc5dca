"""What a scheduler has to know how to do: the base of what a plugin of the axis `submitter` builds."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from fairlead.config import TrainerConfig
from fairlead.config_bases import SubmitterConfigBase
from fairlead.errors import RunFailedError
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead.resolve import resolve


class NotAnsweredError(RunFailedError):
    """The scheduler did not answer in time: the job may be queued, so its files stay."""


Phase = Literal["queued", "running", "finished", "failed", "cancelled", "unknown"]


@dataclass(frozen=True)
class JobState:
    """What a scheduler says of a job.

    Args:
        phase: `queued` (also: waits for a restart), `running`, `finished` (with 0), `failed`, `cancelled`;
            `unknown`: the scheduler does not answer, or has forgotten the job.
        reason: Its own words for why, as SLURM's `BeginTime` or `Resources`; may be empty.
        details: What else it says, by its own names: `{"StartTime": "2026-11-24T10:00:00", "Restarts": "1"}`.
    """

    phase: Phase
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


_ORDER: Final[Sequence[Phase]] = ("running", "queued", "failed", "cancelled", "unknown", "finished")


def of_all(states: Iterable[JobState], nothing: str) -> JobState:
    """Of several jobs what is left to do, then what went wrong; `nothing` is the reason where there is none.

    Example:
        >>> of_all([JobState("finished"), JobState("queued", "Resources")], "forgotten")
        JobState(phase='queued', reason='Resources', details={})
    """
    return min(states, key=lambda state: _ORDER.index(state.phase), default=JobState("unknown", nothing))


@dataclass(frozen=True)
class Request:
    """One submission, as a template sees it: everything is absolute, and decided on the login node.

    Args:
        name: The job's name in the scheduler: that of the run.
        folder: The folder of this submission, on a file system that the nodes see. What `render` gives is written
            there, beside the job files and the copy of the code (`code/`, where there is one).
        job_files: The job file of each member of a sweep; one of anything else.
        job_texts: What is written into each of them, for schedulers whose nodes do not see the folder.
        runs: The run directory of each member of a sweep; one of anything else.
        indices: The index of each member of a sweep, whose job file is `members/INDEX.yaml`; empty: it is no sweep.
        max_parallel: The most members that may run at once; None: as the scheduler likes.
        cwd: The working directory of the ranks: that in which the job was submitted.
        nodes: Nodes of each member.
        devices_per_node: Ranks on each node.
        device: The kind of device as `resources.device` has it, such as `h100`; `cpu`; None: any GPU.
        gpus: Whether the ranks compute on accelerators.
        cpus_per_device: CPU cores for each rank, where the job says so.
        host_memory_gib: Main memory of a node in GiB, where the job says so.
        warn_s: Seconds before the time limit at which the ranks are to be warned: one step and one save fit into it.
        command: The words that run `fairlead` on a node, as `("/env/bin/python", "-m", "fairlead")`.
        logs: The folder for the scheduler's output files.
        variables: Environment variables of the ranks: those of `submit.network`, then `submit.env`.
        excluded: Nodes that `fairlead doctor --nodes` has found to be bad for these runs, within a week.

    Example:
        >>> request = Request("sine", Path("/r/sine/submissions/1"), (Path("/r/sine/submissions/1/job.yaml"),),
        ...                   (Path("/r/sine"),), cwd=Path("/home/me"))
        >>> request.world_size
        1
    """

    name: str
    folder: Path
    job_files: Sequence[Path]
    runs: Sequence[Path]
    indices: Sequence[int] = ()
    job_texts: Sequence[str] = ()
    max_parallel: int | None = None
    cwd: Path = field(default_factory=Path.cwd)
    nodes: int = 1
    devices_per_node: int = 1
    device: str | None = None
    gpus: bool = False
    cpus_per_device: int | None = None
    host_memory_gib: float | None = None
    warn_s: int = 120
    command: Sequence[str] = ("fairlead",)
    logs: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)
    excluded: Sequence[str] = ()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices_per_node


class Submitter(ABC):
    """Hands a job to a scheduler, asks for it, and ends it.

    Args:
        config: The job's `submit`, of the plugin's own class.
        environ: The environment variables of the process: they find the scheduler's commands.
    """

    config: Any
    """The settings; a subclass says of which class."""
    first_index: ClassVar[int] = 0
    """The lowest index of an array's tasks."""

    def __init__(self, config: SubmitterConfigBase, environ: Mapping[str, str]) -> None:
        self.config = config
        self.environ = environ

    @classmethod
    def build(cls, config: SubmitterConfigBase, context: BuildContext) -> Self:
        """The runtime of the plugin."""
        return cls(config, context.environ)

    @abstractmethod
    def render(self, request: Request) -> Mapping[str, str]:
        """The text of each file that the scheduler gets, by its name, the one that is submitted first.

        Writes nothing, starts nothing: it is what `--dry-run` prints.
        """

    @abstractmethod
    def submit(self, request: Request, files: Sequence[Path]) -> str:
        """Hands the rendered files, which are written by now, to the scheduler; returns the job's id there.

        Raises:
            NotAnsweredError: It may be queued or not.
            FairleadError: The scheduler refused, with its own words.
        """

    @abstractmethod
    def state(self, job: str) -> JobState:
        """What the scheduler says of a job; `unknown` where it says nothing."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Ends a job, all members of it.

        Raises:
            FairleadError: The scheduler refused, with its own words.
        """

    def member(self, job: str, index: int) -> str:
        """The id of one member of a sweep."""
        return f"{job}_{index}"

    def output(self, request: Request, job: str) -> Path | None:
        """The file that the scheduler writes the job's output to, `*` for what differs between members; None: none."""
        return None

    def logs_command(self, job: str) -> Sequence[str]:
        """The command that prints a job's output where there is no such file; empty: there is none."""
        return ()


def build_submitter(submit: Mapping[str, Any], environ: Mapping[str, str], plugins: PluginManager) -> Submitter:
    """The submitter of a job's `submit`."""
    config = parse_backend("submitter", dict(submit), plugins, context={"plugins": plugins}, tag="to")
    # A context has a resolution; which devices there are here is of no interest.
    fields = {"accelerator": "cpu"} if "cpu" in plugins.names("accelerator") else {}
    trainer = TrainerConfig.model_validate(fields, context={"plugins": plugins})
    context = BuildContext(resolve(trainer, environ=environ, plugins=plugins), environ, plugins)
    made: Submitter = pkgutil.resolve_name(str(plugins.of(config).runtime))(config, context)
    return made
