"""The instructions to the processes of a verification, and the names of the files that they leave; torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, Self

PLAN: Final = "FAIRLEAD_VERIFY"
"""Set by `fairlead verify` for the processes that it starts."""

REPORT: Final = "report.json"
START: Final = "start.pt"


@dataclass(frozen=True)
class Plan:
    """One start of a verification.

    Attributes:
        role: The ranks of the layout, or the one process that they are compared with.
        notes: The folder that both share.
        repeats: How often the reference is trained with its samples in another order.
        batch_dim: The dimension of the samples; None: batches are not put together.
    """

    role: Literal["layout", "reference"]
    notes: str
    repeats: int = 4
    batch_dim: int | None = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """That of this process; None in any other start."""
        text = environ.get(PLAN)
        return cls(**json.loads(text)) if text is not None else None

    def to_json(self) -> str:
        """For the environment of one start."""
        return json.dumps(asdict(self))

    @property
    def folder(self) -> Path:
        """Where notes are left."""
        return Path(self.notes)


def rank_file(rank: int) -> str:
    """The notes of one rank."""
    return f"rank-{rank:05d}.pt"


def batches_file(replica: int) -> str:
    """The batches of one data-parallel replica."""
    return f"batches-{replica:05d}.pt"
