"""Who waits for whom, from the heartbeats of all ranks.

All ranks run the same program, so the one with the lowest step, and within the step the lowest turn, is behind: the
others will wait for it. Clocks of different nodes are never compared for that. Where all are equally far, the one that
stands elsewhere than the others is it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, Literal

from fairlead_runs.heartbeat import Beat, location_of_thread

_BEHIND_S: Final = 10.0
"""A rank that is behind for so long is named; before that, a step or a slow file system explains it."""
_SILENT_S: Final = 60.0
"""The same for a rank that is no step behind."""
_WAITS = re.compile(
    r"(_engine_run_backward@|__exit__@distributed\.py:"
    r"|.*@(distributed_c10d|c10d_logger|collectives|call_check|mailbox)\.py:)"
)
"""Where a rank stands that waits for others: in the backward pass, in Lightning's barriers, in a collective, or for a
message, as for the end of a save on another rank."""


@dataclass(frozen=True)
class Waiting:
    """Ranks that the others wait for.

    `behind`: they are at an earlier step or phase. `elsewhere`: they stand where the others do not. `silent`: they
    alone have given no sign of life for a minute.
    """

    why: Literal["behind", "elsewhere", "silent"]
    behind: tuple[Beat, ...]
    others: tuple[Beat, ...]


@dataclass(frozen=True)
class Standing:
    """Where the ranks are that a stop waits for.

    Args:
        text: The ranks and their locations, as a subject: `rank 1 (in its step, at backward@loss.py:12)`.
        patience_s: How long they may stand there until the stop continues without them.
    """

    text: str
    patience_s: float = 60.0


def own_standing() -> Standing:
    """Where the main thread of this process is."""
    return Standing(f"this process (at {location_of_thread()})")


def grouped(beats: Iterable[Beat]) -> list[tuple[Beat, ...]]:
    """The ranks by how far they are and where they stand, those who are behind first; in each group by rank."""
    ordered = sorted(beats, key=lambda b: (*_reached(b), b.phase, b.location, b.rank))
    return [tuple(same) for _, same in groupby(ordered, key=lambda b: (*_reached(b), b.phase, b.location))]


def waiting(beats: Sequence[Beat], now: float | None) -> Waiting | None:
    """The ranks that the others wait for, None if no rank stands out; `now` is None for a run that has ended."""
    if len(beats) < 2:
        return None

    def still(beat: Beat, seconds: float) -> bool:
        return bool(beat.location) if now is None else now - beat.time > seconds

    lowest = min(map(_reached, beats))
    if lowest != max(map(_reached, beats)):
        late = [b for b in beats if _reached(b) == lowest]
        return _named("behind", [b for b in late if b.location or still(b, _BEHIND_S)], beats)
    newest, placed = max(b.time for b in beats), any(b.location for b in beats)
    silent = [b for b in beats if not b.location and still(b, _SILENT_S) and (placed or newest - b.time > _SILENT_S)]
    if silent:
        return _named("silent", silent, beats)
    if not all(b.location and still(b, _SILENT_S) for b in beats):
        return None
    return _named("elsewhere", _standing_elsewhere(beats), beats)


def waits_there(location: str) -> bool:
    """Whether a rank that stands at this location waits for others."""
    return bool(_WAITS.match(location))


def rank_ranges(ranks: Iterable[int], longest: int = 40) -> str:
    """Ranks as few words, `0-6,8-16383`; what is longer than so many characters is counted."""
    ordered = sorted(set(ranks))
    text, named = "", 0
    for first, last in _runs(ordered):
        word = f"{first}-{last}" if last > first else f"{first}"
        if text and len(text) + len(word) + 1 > longest:
            return f"{text} and {len(ordered) - named} more"
        text, named = f"{text},{word}" if text else word, named + last - first + 1
    return text


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, more than two neighbours as a range: `ranks 0-3, 8, 9`."""
    ordered = sorted(set(ranks))
    runs = ([f"{a}-{b}"] if b - a > 1 else map(str, range(a, b + 1)) for a, b in _runs(ordered))
    return f"rank{'s'[: len(ordered) > 1]} {listed(word for words in runs for word in words)}"


def parse_ranks(text: str) -> frozenset[int]:
    """The ranks of `0,4-7`; a ValueError where it is something else.

    Example:
        >>> sorted(parse_ranks("0,4-6"))
        [0, 4, 5, 6]
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] is not None and int(match[1]) > int(match[2])):
            raise ValueError(f"{text!r} names no ranks: write them as 0,4-7")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def listed(words: Iterable[str], most: int = 16) -> str:
    """Words in one line; what is more than so many is counted: `n1, n2 and 1 more`."""
    words = list(words)
    shown = ", ".join(words[:most])
    return f"{shown} and {len(words) - most} more" if len(words) > most else shown


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    cuts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    return ((ordered[a], ordered[b - 1]) for a, b in pairwise(cuts) if b > a)


def _reached(beat: Beat) -> tuple[int, int]:
    return beat.step, beat.turn


def _standing_elsewhere(beats: Sequence[Beat]) -> list[Beat]:
    """The ranks that do not wait while others do; else those at the rarest location, if most stand elsewhere."""
    busy = [b for b in beats if not waits_there(b.location)]
    if len(busy) < len(beats):
        return busy
    rarest = min(grouped(beats), key=len)
    return list(rarest) if 2 * len(rarest) < len(beats) else []


def _named(
    why: Literal["behind", "elsewhere", "silent"], behind: Sequence[Beat], beats: Sequence[Beat]
) -> Waiting | None:
    ranks = {b.rank for b in behind}
    others = tuple(b for b in beats if b.rank not in ranks)
    return Waiting(why, tuple(behind), others) if behind and others else None
