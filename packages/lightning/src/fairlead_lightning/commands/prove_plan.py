"""What the ranks of a proof are told: where they save, where they are killed, where they leave notes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PLAN: Final = "FAIRLEAD_PROVE_RESUME"
"""Set by `fairlead fit --prove-resume` for the processes that it starts."""


@dataclass(frozen=True)
class Plan:
    """Where things happen, in optimizer steps.

    Args:
        steps: How many are trained.
        checkpoint: The one that is saved and resumed from.
        kill: The ranks are killed when so many are done.
    """

    steps: int
    checkpoint: int
    kill: int

    @classmethod
    def of(cls, steps: int) -> Plan:
        """Saves in the middle, and is killed in the middle of the rest.

        Example:
            >>> Plan.of(8)
            Plan(steps=8, checkpoint=4, kill=6)
        """
        checkpoint = steps // 2
        return cls(steps, checkpoint, checkpoint + max(1, (steps - checkpoint) // 2))

    def to_json(self, notes: Path, *, kill: bool) -> str:
        """For the environment of one start.

        Args:
            notes: Where its ranks leave what they note.
            kill: Whether they are killed.
        """
        return json.dumps({"notes": str(notes), "checkpoint": self.checkpoint, "kill": self.kill if kill else None})

    @staticmethod
    def read(text: str) -> dict[str, Any]:
        """What `to_json` has written."""
        found: dict[str, Any] = json.loads(text)
        return found
