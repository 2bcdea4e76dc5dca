"""Who a worker of torch's elastic agent is.

The variables are set in `torch/distributed/elastic/agent/server/local_elastic_agent.py`
(`_start_workers`). "Group" is torch's word for the workers of one agent, so GROUP_RANK is the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.errors import ConfigError
from fairlead.interfaces import Setting, Topology
from fairlead_environments.variables import check_ranks, integer, present, required, text

__all__ = ["EVIDENCE", "is_worker", "topology"]

EVIDENCE = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK")
"""The last two tell a worker from a process beside the agent that inherited the run's id."""


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether an elastic agent started this process or an ancestor of it."""
    return present(environ, EVIDENCE)


def topology(environ: Mapping[str, str]) -> Topology:
    """The topology of this worker.

    Raises:
        ConfigError: A variable of the agent is absent or malformed.
    """
    by = "torchrun"
    world = required(environ, "WORLD_SIZE", by=by, minimum=1)
    local = required(environ, "LOCAL_WORLD_SIZE", by=by, minimum=1)
    nodes = integer(environ, "GROUP_WORLD_SIZE", minimum=1)
    if nodes is None and world.value % local.value == 0:
        nodes = Setting(world.value // local.value, "WORLD_SIZE / LOCAL_WORLD_SIZE")
    address = text(environ, "MASTER_ADDR")
    if address is None:
        raise ConfigError(
            "MASTER_ADDR is not set",
            where="environment variable MASTER_ADDR",
            why="torchrun sets it in every worker to the host of rank 0",
            fix="do not unset it between torchrun and this process",
        )
    return check_ranks(
        Topology(
            launched=True,
            num_nodes=nodes,
            local_world_size=local,
            world_size=world,
            node_rank=required(environ, "GROUP_RANK", by=by),
            local_rank=required(environ, "LOCAL_RANK", by=by),
            global_rank=required(environ, "RANK", by=by),
            main_address=address,
            main_port=required(environ, "MASTER_PORT", by=by, minimum=1),
        ),
        by,
    )
