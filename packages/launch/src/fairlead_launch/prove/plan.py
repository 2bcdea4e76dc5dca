"""The instructions for the ranks of a proof, in their environment: where they save, are killed, and leave notes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

PLAN: Final = "FAIRLEAD_PROVE_RESUME"
"""Set by `--prove-resume` for the processes that it starts."""
RESTORED: Final = "restored"
"""The note of what a rank keeps where the checkpoint is made, and where a resume begins."""
END: Final = "end"
"""The note of what it keeps after the last step."""


@dataclass(frozen=True)
class Plan:
    """Optimizer steps: how many are trained, which one is saved and resumed from, and where the ranks are killed."""

    steps: int
    checkpoint: int
    kill: int

    @classmethod
    def of(cls, steps: int) -> Self:
        """Saves in the middle, and is killed in the middle of the rest."""
        checkpoint = steps // 2
        return cls(steps, checkpoint, checkpoint + max(1, (steps - checkpoint) // 2))

    def to_json(self, notes: Path, *, kill: bool, runs: str, resumes: bool) -> str:
        """For the environment of one start.

        Args:
            notes: Where its ranks leave what they note.
            kill: Whether the ranks are killed.
            runs: The folder of the run.
            resumes: Whether the run is resumed.
        """
        return json.dumps({"notes": str(notes), "kill": kill, "plan": asdict(self), "runs": runs, "resumes": resumes})


def at_step(step: int) -> str:
    """The note of what a rank keeps after a step between the plan's checkpoint and its kill."""
    return f"step-{step}"


def instructions_in(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What `to_json` has written, in a process that a proof has started."""
    found: dict[str, Any] | None = json.loads(environ.get(PLAN, "null"))
    return found


def note(notes: Path, name: str, rank: int) -> Path:
    """The file of a note of one rank."""
    return notes / f"{name}-{rank:05d}.json"
