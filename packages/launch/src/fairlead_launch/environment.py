"""The environment variables of a rank that is started on this machine."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Mapping
from typing import Any, Final

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


PLAN: Final = "FAIRLEAD_PLAN"
"""In a rank that Fairlead started: the file descriptor that it has inherited, and what is in the file."""


def plan_to_inherit(plan: object) -> tuple[int, str]:
    """A file descriptor for the ranks to inherit, and their `FAIRLEAD_PLAN`."""
    data = pickle.dumps(plan)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        fd = os.dup(file.fileno())
    return fd, f"{fd}:{hashlib.sha256(data).hexdigest()}"


def inherited_plan(environ: Mapping[str, str]) -> Any:
    """The plan that this rank was started with; None in any other process, also in one that a rank starts."""
    fd, _, digest = environ.get(PLAN, "").partition(":")
    if not fd:
        return None
    try:
        data = os.pread(int(fd), os.fstat(int(fd)).st_size, 0)  # the ranks share one offset
    except OSError:  # a descriptor is not passed on further, the variable is
        return None
    return pickle.loads(data) if hashlib.sha256(data).hexdigest() == digest else None
