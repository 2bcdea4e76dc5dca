"""Which run, start and checkpoint the process that starts the ranks has decided on, for the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from fairlead.errors import ConfigError

HANDOFF: Final = "FAIRLEAD_RUN"
"""Holds a `Handoff` as JSON: which run, which start, which checkpoint; decided once for all ranks."""


@dataclass(frozen=True)
class Handoff:
    """What one process decided for all ranks: the run directory, the number of the start, the file to resume from.

    `asked` is the run that was asked for: a rank that runs the whole script again meets the fits before this one too.
    `finished` says how a run ended that has nothing left to do; `weights` is what one begins with that resumes nothing.
    """

    path: str
    start: int
    checkpoint: str | None
    requested: str = ""
    finished: str | None = None
    weights: str | None = None

    def to_json(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Handoff | None:
        """The decision that was handed over, or None; `ConfigError` where the variable is not ours."""
        text = environ.get(HANDOFF)
        if text is None:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{HANDOFF} is not readable", why=str(error), fix=f"unset {HANDOFF}") from error
