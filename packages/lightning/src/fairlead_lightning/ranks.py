"""The variables that hand a run from the process that starts ranks to the ranks it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from fairlead.errors import ConfigError

__all__ = ["HANDOFF", "LAUNCHED", "Handoff", "rank_environment"]

HANDOFF: Final = "FAIRLEAD_RUN"
"""Holds a `Handoff` as JSON: which run, which start, which checkpoint; decided once for all ranks."""
LAUNCHED: Final = "FAIRLEAD_LAUNCHED"
"""Set in ranks that Fairlead started on this machine."""


@dataclass(frozen=True)
class Handoff:
    """What one process decided for all ranks.

    Args:
        path: The run directory.
        start: The number of this start, from 1.
        checkpoint: The file to resume from, or None.
        asked: Which run was asked for: a rank that runs the whole script again meets the fits before this one too.
    """

    path: str
    start: int
    checkpoint: str | None
    asked: str = ""

    def to_json(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Handoff | None:
        """The decision that the starting process handed over, or None.

        Raises:
            ConfigError: The variable is set, but not by us.
        """
        text = environ.get(HANDOFF)
        if text is None:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{HANDOFF} is not readable", why=str(error), fix=f"unset {HANDOFF}") from error


def rank_environment(
    environ: Mapping[str, str],
    *,
    local_rank: int,
    devices: int,
    num_nodes: int,
    node_rank: int,
    address: str,
    port: int,
    threads: int,
) -> dict[str, str]:
    """The environment of one rank on this machine.

    OMP_NUM_THREADS is set, unless the user did, so that N ranks do not each start a thread a core;
    PYTHONFAULTHANDLER, so that a crash in native code leaves the Python frames that led to it.
    """
    rank = {
        LAUNCHED: "1",
        "RANK": str(node_rank * devices + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(devices * num_nodes),
        "LOCAL_WORLD_SIZE": str(devices),
        "NODE_RANK": str(node_rank),
        "NNODES": str(num_nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONFAULTHANDLER": "1"}
    return {**defaults, **environ, **rank}
