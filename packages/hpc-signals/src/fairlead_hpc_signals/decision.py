"""What the ranks agree on: the boundary at which all stop, and which signals requested it of which ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydantic import TypeAdapter

from fairlead.errors import RunFailedError
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_runs.waiting import ranks_text

_NAMED: Final = 64  # ranks that a decision names; 16,000 of them would be a megabyte for every rank to read


class AgreementError(RunFailedError):
    """The ranks could not agree on where to stop. `missing` holds the ranks that did not answer, where known."""

    missing: tuple[int, ...] = ()

    @property
    def short(self) -> str:
        """It as part of a sentence: `rank 3 did not answer within 15 s`."""
        return f"{ranks_text(self.missing)} {self.why}" if self.missing else str(self.why)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """What was requested of one rank: by signals, each so often, or by `ask`, `why`; `time` in seconds since the epoch.

    `final`: the request wants no other start.
    """

    rank: int
    signals: dict[str, int]
    time: float
    why: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class StopDecision:
    """The one decision of all ranks: they stop at the first boundary of at least this number.

    `requests` are of the ranks that had requests by then, first come first, at most 64 of the `flagged`; `signals`
    all that had come to any rank, in the order of their first; `final` is who requested that the job not restart.
    """

    boundary: int
    requests: tuple[StopRequest, ...]
    signals: tuple[str, ...]
    flagged: int
    final: str | None = None

    @property
    def time(self) -> float | None:
        """When the first signal came, in seconds since the epoch, by that rank's clock."""
        return self.requests[0].time if self.requests else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The lowest number at which a rank can still stop or save; its request, if any; whether to save."""

    earliest: int
    request: StopRequest | None = None
    save: bool = False


# They write and read JSON, for the store.
ANSWER: Final = TypeAdapter(Answer)
DECISION: Final = TypeAdapter(StopDecision)


class Requested(NamedTuple):
    """A call of `ask`: why, when, and whether no other start is wanted."""

    why: str
    time: float
    final: bool

    @classmethod
    def now(cls, why: str, *, final: bool, before: Requested | None) -> Requested:
        """A call now: the first one counts, but for one that wants no other start."""
        return before if before is not None and (before.final or not final) else cls(why, time.time(), final)


def request_of(rank: int, flags: SignalFlags, requested: Requested | None) -> StopRequest | None:
    """What was requested of this rank so far, by signals or by a call of `ask`."""
    came, counts = flags.flags, flags.counts
    if not came and requested is None:
        return None
    times = [flag.time for flag in came[:1]] + ([requested.time] if requested else [])
    # A path in the reason may be no valid Unicode, which pydantic refuses: no stop must fail by that.
    why = requested.why.encode(errors="replace").decode() if requested else None
    return StopRequest(rank, counts, min(times), why, requested is not None and requested.final)


def decide(answers: Iterable[Answer]) -> StopDecision:
    """The decision that follows from the answers of all ranks: the highest of their lowest numbers.

    No rank has passed it, and every rank can reach it: all take the steps before it, so none is left waiting.
    """
    answers = list(answers)
    requests = sorted((a.request for a in answers if a.request is not None), key=lambda request: request.time)
    signals = dict.fromkeys(name for request in requests for name in request.signals)
    boundary = max(answer.earliest for answer in answers)
    final = next((request.why for request in requests if request.final), None)
    return StopDecision(boundary, tuple(requests[:_NAMED]), tuple(signals), len(requests), final)


def no_agreement(missing: tuple[int, ...], why: str) -> AgreementError:
    """The error of a stop that was requested and not agreed on."""
    error = AgreementError(
        "the ranks did not agree on where to stop",
        where=ranks_text(missing) if missing else None,
        why=why,
        fix="look at the output of these ranks: they ended, or hang; the next start resumes from the last checkpoint",
    )
    error.missing = missing
    return error
