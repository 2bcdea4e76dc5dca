"""Kills a run at random or chosen moments, starts it again until it ends, and says where the kills fell."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from integration_tests.exact.attempts import Attempt
from integration_tests.exact.cases import Case, Starter, run
from integration_tests.exact.jobs.probe import DISK, PAUSE, PLACE

__all__ = ["AIMS", "PHASES", "Aim", "Kill", "disturbed", "draw"]

Aim = Literal["start-up", "step", "validation", "save", "retention", "any"]
AIMS: Final[tuple[Aim, ...]] = ("start-up", "step", "validation", "save", "retention", "any")
PHASES: Final = ("start-up", "step", "validation", "save", "retention", "end")
"""Where a kill can fall: `save` is from the stage to `latest`; `end` is behind the last step."""

_WIDER: Final[dict[Aim, dict[str, str]]] = {
    "step": {PAUSE: "train_batch_start=0.02"},
    "validation": {PAUSE: "validation_batch_start=0.04"},
    "save": {DISK: "0.01"},
    "retention": {DISK: "0.01"},
}
_FINE_S: Final[dict[Aim, float]] = {"step": 0.03, "validation": 0.12, "save": 0.25, "retention": 0.1}
_LIMIT_S: Final = 120.0


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Args:
        aim: What to hit; `any`: a moment of the time that an undisturbed run takes.
        who: All processes, or one rank.
        part: From 0 to 1: how far into the run.
        fine: From 0 to 1: how far into the phase, once it is there.
        rank: Which one, with `one`.
    """

    aim: Aim
    who: Literal["all", "one"] = "all"
    part: float = 0.5
    fine: float = 0.0
    rank: int = 0

    def __str__(self) -> str:
        who = "all ranks" if self.who == "all" else f"rank {self.rank}"
        return f"{self.aim} at {self.part:.3f}+{self.fine:.3f} of {who}"


def draw(generator: random.Random, case: Case, aim: Aim | None = None) -> Kill:
    """A random kill."""
    return Kill(
        aim=aim if aim is not None else generator.choice(AIMS),
        who=generator.choice(("all", "one")),
        part=generator.random(),
        fine=generator.random(),
        rank=generator.randrange(case.ranks),
    )


def disturbed(
    case: Case, cwd: Path, starter: Starter, kills: Sequence[Kill], *, seconds: float, steps: int
) -> list[str]:
    """Starts a job once for each kill and then until it ends.

    Args:
        case: The job.
        cwd: Where; new.
        starter: How.
        kills: One for each start.
        seconds: What an undisturbed run takes when it is started like this.
        steps: Its optimizer steps.

    Returns:
        The phases in which the kills fell; a start that ended before its kill has none.

    Raises:
        AssertionError: A start hangs, leaves a process behind, or does not end well without a kill.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    fell = []
    for kill in kills:
        attempt = starter(case, cwd, _WIDER.get(kill.aim, {}))
        phase = _inflict(kill, attempt, case, cwd, seconds, steps)
        ended = attempt.end()
        if phase is not None:
            fell.append(phase)
        else:
            assert ended.code == 0, f"{case} ended with {ended.code} before it was killed: {ended.text}"
    run(case, cwd, starter)
    return fell


def _inflict(kill: Kill, attempt: Attempt, case: Case, cwd: Path, seconds: float, steps: int) -> str | None:
    """Waits for the moment and kills; the phase in which it fell, or None."""
    rank = kill.rank if kill.who == "one" else 0
    watched = 0 if kill.aim == "retention" else rank  # rank 0 alone deletes
    target = int(kill.part * steps)
    began = time.monotonic()

    def reached() -> bool:
        name, step = _place(cwd, watched)
        passed = time.monotonic() - began
        if kill.aim == "any":
            return passed > kill.part * seconds
        if kill.aim == "start-up":
            return bool(name) or passed > kill.part * seconds / 2
        prefix = {"step": "train_batch"}.get(kill.aim, kill.aim)
        return name.startswith(prefix) and step >= target

    if not _until(reached, attempt):
        return None
    time.sleep(kill.fine * _FINE_S.get(kill.aim, 0.0))
    if not attempt.running():
        return None
    if kill.who == "all" or not attempt.kill_rank(rank):
        attempt.kill_all()
    return _phase(_place(cwd, rank)[0])


def _until(reached: Callable[[], bool], attempt: Attempt) -> bool:
    deadline = time.monotonic() + _LIMIT_S
    looked = 0.0
    while not reached():
        now = time.monotonic()
        assert now < deadline, "the moment of the kill never came"
        if now - looked > 0.05:  # dearer than the look at the place
            looked = now
            if not attempt.running():
                return False
        time.sleep(0.0005)
    return True


def _place(cwd: Path, rank: int) -> tuple[str, int]:
    """Where a rank is: the name of a hook of the `Probe`, and the optimizer step."""
    try:
        words = (cwd / PLACE.format(rank=rank)).read_text().split()
    except FileNotFoundError:
        return "", 0
    return (words[0], int(words[1])) if len(words) == 2 else ("", 0)


def _phase(place: str) -> str:
    """The phase that a kill has ended, from the last place."""
    if place in ("", "setup"):
        return "start-up"
    known = {"save": "save", "publish": "save", "retention": "retention", "train_end": "end", "fit_end": "end"}
    return known.get(place, "validation" if place.startswith("validation") else "step")
