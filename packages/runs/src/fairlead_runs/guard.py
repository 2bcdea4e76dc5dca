"""What a run asks of the guard of a requeue plugin, mostly `PreemptionGuard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from fairlead.backends import imported
from fairlead.interfaces import BuildContext, Requeuer
from fairlead.plugin_classes import RequeuePlugin
from fairlead_runs.waiting import Standing, own_standing


class StopSignals(Protocol):
    """The signals that ask a run to stop, noted by handlers; `fairlead_hpc_signals.SignalFlags` describes each part."""

    @property
    def signals(self) -> Sequence[int]:
        """The numbers of those that are noted."""

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


@dataclass(frozen=True)
class Overdue:
    """What a stop needs that its loop does not come to in time; outcomes are `fairlead_hpc_signals.StopOutcome`s.

    Args:
        requeuer: Gives what has the job restarted, on one rank; called once that is wanted.
        budget: Says why no other start is wanted after a reason, or None where one is.
        record: Writes the history: before the job is requeued, on the rank that has it done.
        tell: Tells the user, after it, on that rank; None prints a line.
        progress: Changes while the loop gets on, also between two calls of `should_stop`: a minute without a change is
            then too late as well; None: nothing does that.
        answers: Whether rank 0 says at once that the signal has come; False where somebody else does.
        at: What the loop is at, as part of a sentence (`preparing its data`); None: `in its step`.
        standing: Where the ranks are that the stop waits for; reported once when nothing has changed for ten seconds.
    """

    requeuer: Callable[[], Requeuer | None] = lambda: None
    budget: Callable[[Any], str | None] | None = None
    record: Callable[[Any], object] | None = None
    tell: Callable[[Any], object] | None = None
    progress: Callable[[], object] | None = None
    answers: bool = True
    at: Callable[[], str] | None = None
    standing: Callable[[], Standing] = own_standing


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

    def watch_opening(self, at: str = "starting") -> object:
        """Until `start`: has a stop end this process in time; on rank 0."""

    def start(self) -> object:
        """Joins the other ranks; on all of them, when the process group is there."""

    def when_overdue(self, overdue: Overdue) -> None:
        """What to do when a stop is not carried out in time."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error says no more than that another rank went away during a stop."""

    def ended_by(self, error: BaseException) -> NoReturn:
        """Ends this process after such an error, with the exit code of a stop."""

    def watch_switches(self, run: Path, record: Callable[..., object] | None = None) -> None:
        """Has rank 0 look for the switch files of a run, of which `record` tells its history."""

    def should_save(self) -> bool:
        """Whether a checkpoint was requested; after each `should_stop`, the same answer on all ranks."""

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
        """Saves on all ranks, closes what is open, has the job restarted by rank 0; returns the outcome."""

    def close(self, *, failed: bool = False) -> None:
        """Ends what runs in the background; `failed`: an error has left the loop."""


def build_guard(context: BuildContext, flags: StopSignals | None = None) -> StopGuard:
    """What stops a run on its requeuer's signals, on an earlier guard's `flags` if given; imports no torch."""
    config = context.resolution.requeue
    plugin = cast("RequeuePlugin", context.plugins.of(config))
    guard: StopGuard = imported(plugin.guard, f"the guard of the requeue {config.name!r}")(config, context, flags)
    return guard
