"""How a run stops, and how it is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

__all__ = ["OutlivesStops", "Requeuer", "StopGuard", "StopSignals", "Stopped"]


@runtime_checkable
class Requeuer(Protocol):
    """Has the job started again; built by a plugin of the axis `requeue`."""

    def requeue(self) -> str:
        """Asks for another start, and returns what was done, for the history.

        Raises:
            FairleadError: The scheduler refused or did not answer; the job will not start again.
        """
        ...


class StopSignals(Protocol):
    """The signals that ask a run to stop: handlers that note them, and nothing else."""

    @property
    def raised(self) -> bool:
        """Whether one has come."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each came, by name."""
        ...

    def install(self, only: Iterable[str] | None = None) -> object:
        """Installs the handlers, or some of them; in the main thread. Those that are there stay.

        Raises:
            ConfigError: This is not the main thread.
        """
        ...

    def uninstall(self) -> None:
        """Puts back what was there before."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for one, at most so many seconds; whether one has come."""
        ...

    def conflicts(self) -> Sequence[Any]:
        """The signals whose handler was replaced since, each with `signal` and `handler`."""
        ...


class Stopped(Protocol):
    """How a stop ended; the same on all ranks."""

    @property
    def exit_code(self) -> int:
        """What all ranks end with: 75 (or the requeuer's own) when another start is wanted; 143 or 130 when not."""
        ...

    @property
    def reason(self) -> Any:
        """Why it came: `why` and `evidence`, `scheduler_requeues`."""
        ...

    @property
    def start_wanted(self) -> bool:
        """Whether another start is wanted."""
        ...

    @property
    def requeued(self) -> str | None:
        """What was done for it."""
        ...

    @property
    def error(self) -> str | None:
        """Why it could not be arranged."""
        ...

    @property
    def refused(self) -> str | None:
        """Why it is not wanted, where a budget is used up."""
        ...


class OutlivesStops(Protocol):
    """Has a worker of a loader outlive the signals that ask a run to stop; see `StopGuard.in_worker`."""

    def __call__(self, worker: int) -> None:
        """To be called in each worker, with its number."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Around the start of workers: what comes before they are that far waits for them."""
        ...


class StopGuard(Protocol):
    """Has all ranks stop at the same step, and the job started again; made by a requeue plugin's `guard`."""

    @property
    def flags(self) -> StopSignals:
        """The signals of this process."""
        ...

    @property
    def decision(self) -> Any:
        """Who was asked by what, once the ranks have agreed: `signals`, `requests`, `flagged`; else None."""
        ...

    @property
    def outcome(self) -> Stopped | None:
        """How the stop ended, once it has."""
        ...

    @property
    def in_worker(self) -> OutlivesStops:
        """For the workers of a loader, which must outlive the signals."""
        ...

    def start(self) -> object:
        """Joins the other ranks; on all of them, when the process group is there."""
        ...

    def should_stop(self) -> bool:
        """Whether to stop here; the same answer on all ranks, which call it equally often."""
        ...

    def ask(self, why: str) -> None:
        """Asks all ranks to stop, without a signal."""
        ...

    def save_and_requeue(
        self,
        save: Callable[[], object],
        requeuer: Requeuer | None = None,
        *,
        finish: Callable[[Any], object] | None = None,
        budget: Callable[[Any], str | None] | None = None,
    ) -> Stopped:
        """Saves on all ranks, closes what is open, has the job started again by rank 0.

        Args:
            save: Returns when what it saved is durable.
            requeuer: Has the job started again.
            finish: Closes loggers and writes the history, before the requeue; left out when time is short.
            budget: Called on rank 0 with the reason: why no other start is wanted; None where one is.

        Raises:
            FairleadError: Another rank could not save; nothing was requeued.
            Exception: What `save` raised on this rank.
        """
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...
