"""What the ranks agree on: the boundary at which all stop, and who was asked to by which signal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

from fairlead.errors import RunFailedError
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_runs.waiting import ranks_text

_NAMED: Final = 64  # ranks that a decision names; 16,000 of them would be a megabyte for every rank to read


class AgreementError(RunFailedError):
    """The ranks could not agree on where to stop. `missing` holds the ranks that did not answer, where known."""

    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRequest:
    """What one rank was asked.

    Args:
        rank: The rank.
        signals: The signals it got and how often.
        time: When the first came, in seconds since the epoch.
        why: The reason given to `ask`, for a stop that no signal asked for.
    """

    rank: int
    signals: dict[str, int]
    time: float
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StopDecision:
    """The one decision of all ranks; every rank has the same.

    Args:
        boundary: All ranks stop at the first boundary of at least this number.
        requests: The ranks that had been asked by then, first come first; of many, the first 64.
        signals: All signals that had come to any rank, in the order of their first.
        flagged: How many ranks had been asked.
    """

    boundary: int
    requests: tuple[StopRequest, ...]
    signals: tuple[str, ...]
    flagged: int

    @property
    def time(self) -> float | None:
        """When the first signal came, in seconds since the epoch, by that rank's clock."""
        return self.requests[0].time if self.requests else None

    def to_json(self) -> str:
        """As text, for the store and the history."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> StopDecision:
        """From `to_json`."""
        data = json.loads(text)
        requests = tuple(StopRequest(**request) for request in data["requests"])
        return cls(data["boundary"], requests, tuple(data["signals"]), data["flagged"])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank answers once its counter is frozen.

    Args:
        earliest: The lowest number at which this rank can still stop.
        request: What it was asked, if it was.
    """

    earliest: int
    request: StopRequest | None = None

    def to_json(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer:
        """From `to_json`."""
        data = json.loads(text)
        return cls(data["earliest"], None if data["request"] is None else StopRequest(**data["request"]))


def request_of(rank: int, flags: SignalFlags, asked: tuple[str, float] | None) -> StopRequest | None:
    """What this rank has been asked so far, by signals or by a call of `ask`."""
    came, counts = flags.flags, flags.counts
    if not came and asked is None:
        return None
    times = [flag.time for flag in came[:1]] + ([asked[1]] if asked else [])
    return StopRequest(rank, counts, min(times), asked[0] if asked else None)


def decide(answers: Iterable[Answer]) -> StopDecision:
    """The decision that follows from the answers of all ranks.

    The highest of their lowest numbers: no rank has passed it, and every rank can reach it, because all ranks take
    the steps before it and so none waits in a collective for one that has stopped.

    Example:
        >>> decide([Answer(7), Answer(9), Answer(8)]).boundary
        9
    """
    answers = list(answers)
    requests = sorted((a.request for a in answers if a.request is not None), key=lambda request: request.time)
    signals = dict.fromkeys(name for request in requests for name in request.signals)
    boundary = max(answer.earliest for answer in answers)
    return StopDecision(boundary, tuple(requests[:_NAMED]), tuple(signals), len(requests))


def no_agreement(missing: tuple[int, ...], why: str) -> AgreementError:
    """The error of a stop that was asked for and not agreed on."""
    error = AgreementError(
        "the ranks did not agree on where to stop",
        where=ranks_text(missing) if missing else None,
        why=why,
        fix="look at the output of these ranks: they ended, or hang; the next start resumes from the last checkpoint",
    )
    error.missing = missing
    return error
