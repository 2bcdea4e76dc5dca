"""What packages hand each other: plain data, and protocols for what one needs of another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, Self, TypedDict

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
    "StopGuard",
    "StopReason",
    "StopSignals",
    "Topology",
    "Unused",
]


class Extras(TypedDict, total=False):
    """What an engine passes through to a runtime; each is there where it is known.

    Attributes:
        run_name: The name of the run, for a logger that shows one.
        resumed: Whether this start goes on with a run that had begun.
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
    """Has the job started again; the base of what a plugin of the axis `requeue` builds.

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
            FairleadError: The scheduler refused or did not answer; the job will not start again.
        """


class StopSignals(Protocol):
    """The signals that ask a run to stop, noted by handlers; `fairlead_hpc_signals.SignalFlags` describes each part."""

    @property
    def raised(self) -> bool:
        """Whether one has come."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each came, by name."""

    def install(self, only: Iterable[str] | None = None) -> object:
        """Installs the handlers, or some of them; in the main thread."""

    def uninstall(self) -> None:
        """Puts back what was there before."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for one, at most so many seconds; whether one has come."""

    def conflicts(self) -> Sequence[Any]:
        """The signals whose handler was replaced since, each with `signal` and `handler`."""


class StopGuard(Protocol):
    """What an adapter to a loop needs of `fairlead_hpc_signals.PreemptionGuard`, which describes each part."""

    @property
    def flags(self) -> StopSignals:
        """The signals of this process."""

    @property
    def decision(self) -> Any:
        """The `StopDecision` of all ranks; None before they have agreed."""

    @property
    def outcome(self) -> Any:
        """The `StopOutcome`, how the stop ended; None before that."""

    @property
    def in_worker(self) -> Any:
        """The `OutliveStops` for the workers of a loader."""

    def start(self) -> object:
        """Joins the other ranks; on all of them, when the process group is there."""

    def when_overdue(
        self,
        requeuer: Requeuer | None = None,
        *,
        budget: Callable[[Any], str | None] | None = None,
        record: Callable[[Any], object] | None = None,
        tell: Callable[[Any], object] | None = None,
        progress: Callable[[], object] | None = None,
    ) -> None:
        """What to do when a stop is not carried out in time."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error says no more than that another rank went away while all were asked to stop."""

    def ended_by(self, error: BaseException) -> NoReturn:
        """Ends this process after such an error, with the exit code of a stop."""

    def should_stop(self) -> bool:
        """Whether to stop here; the same answer on all ranks, which call it equally often."""

    def save_and_requeue(
        self,
        save: Callable[[], object],
        requeuer: Requeuer | None = None,
        *,
        finish: Callable[[Any], object] | None = None,
        budget: Callable[[Any], str | None] | None = None,
        tell: Callable[[Any], object] | None = None,
    ) -> Any:
        """Saves on all ranks, closes what is open, has the job started again by rank 0; returns the outcome."""

    def close(self) -> None:
        """Ends what runs in the background."""
