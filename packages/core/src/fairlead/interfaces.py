"""What packages hand each other: plain data, and protocols for what one needs of another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from fairlead.config_bases import RequeueConfigBase
from fairlead.facts import Claim, Devices, Job, Setting, Specificity, StopReason, Unused
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.starts import Start
from fairlead.topology import Topology

__all__ = [
    "BuildContext",
    "Claim",
    "Devices",
    "Extras",
    "Job",
    "Requeuer",
    "Setting",
    "Specificity",
    "Start",
    "StopReason",
    "Topology",
    "Unused",
]


class Extras(TypedDict, total=False):
    """What an engine passes through to a runtime; each is there where it is known.

    Attributes:
        run_name: The name of the run, for a logger that shows one.
        resumed: Whether this start continues a run that had begun.
        resume_step: The step of the checkpoint that is resumed from; None: from the beginning.
        logger_positions: Where each logger stood at that checkpoint, by its `position_key`.
        scaler: Arguments for the gradient scaler of a 16-bit precision, where the job gives any.
    """

    run_name: str
    resumed: bool
    resume_step: int | None
    logger_positions: Mapping[str, Any]
    scaler: Mapping[str, Any] | None


@dataclass(frozen=True)
class BuildContext:
    """What a runtime is built with, besides its config.

    Args:
        resolution: All settings of the run, resolved.
        environ: The environment variables of the process.
        plugins: To find what another package offers.
        engine: Which of Lightning's two class families is wanted.
        run_dir: The run directory; None when nothing is recorded.
        extras: What an engine passes through, such as `{"resume_step": 400}` to a logger.
    """

    resolution: Resolution
    environ: Mapping[str, str]
    plugins: PluginManager
    engine: Literal["trainer", "fabric"] = "trainer"
    run_dir: Path | None = None
    extras: Extras = field(default_factory=Extras)


class Requeuer(ABC):
    """Has the job restarted; the base of what a plugin of the axis `requeue` builds.

    Args:
        config: The settings.
        environ: The environment variables of the process.
        job: The job as its environment knows it, with the command that requeues it; None outside of one.

    Example:
        >>> class Resubmit(Requeuer):
        ...     def requeue(self):
        ...         return f"submitted {self.job.id} again"
        >>> Resubmit(RequeueConfigBase(name="resubmit"), {}, Job("cluster:7")).requeue()
        'submitted cluster:7 again'
    """

    config: Any
    """The settings; a subclass says of which class."""

    def __init__(self, config: RequeueConfigBase, environ: Mapping[str, str], job: Job | None = None) -> None:
        self.config = config
        self.environ = environ
        self.job = job

    @classmethod
    def build(cls, config: RequeueConfigBase, context: BuildContext) -> Self:
        """The runtime of the plugin."""
        return cls(config, context.environ, context.resolution.job)

    @property
    def exit_code(self) -> int | None:
        """What all ranks end with when another start is wanted; None: 75."""
        return None

    @abstractmethod
    def requeue(self) -> str:
        """Asks for another start, and returns what was done, for the history; on rank 0, when everything is saved.

        Raises:
            FairleadError: The scheduler refused or did not answer; the job will not restart.
        """

    def cancel(self) -> None:  # noqa: B027 - most schedulers go by the exit code
        """Ends this job as cancelled, because a user requested the stop; called when everything is saved.

        For a scheduler that would count the exit code of the stop as a failure; FairleadError where it refused.
        """
