"""What the ranks of a proof are told: where they save, where they are killed, where they leave notes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PLAN: Final = "FAIRLEAD_PROVE_RESUME"
"""Set by `fairlead fit --prove-resume` for the processes that it starts."""


@dataclass(frozen=True)
class Plan:
    """Optimizer steps: how many are trained, which one is saved and resumed from, and where the ranks are killed."""

    steps: int
    checkpoint: int
    kill: int

    @classmethod
    def of(cls, steps: int) -> Plan:
        """Saves in the middle, and is killed in the middle of the rest."""
        checkpoint = steps // 2
        return cls(steps, checkpoint, checkpoint + max(1, (steps - checkpoint) // 2))

    def to_json(self, notes: Path, *, kill: bool) -> str:
        """For the environment of one start, whose ranks leave what they note in `notes`."""
        return json.dumps({"notes": str(notes), "checkpoint": self.checkpoint, "kill": self.kill if kill else None})
