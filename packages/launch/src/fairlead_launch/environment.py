"""The environment variables of a rank that is started on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LAUNCHED: Final = "FAIRLEAD_LAUNCHED"
"""Set in ranks that Fairlead started on this machine."""
BACKEND: Final = "FAIRLEAD_BACKEND"
"""In ranks of `fairlead launch --backend`: what `init_process_group(backend="auto")` takes."""


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
    """The environment of one rank on this machine, with two defaults that the user's own variables override.

    OMP_NUM_THREADS: so that N ranks do not each start a thread a core. PYTHONFAULTHANDLER: so that a crash in native
    code leaves the Python frames that led to it.
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
