"""One machine: what this process knows of the ranks on it.

Three cases. Nobody started ranks yet: almost nothing is decided. Fairlead's launcher started this
rank: FAIRLEAD_LAUNCHED and all the rest are set. Lightning's launcher (or a person) started it:
LOCAL_RANK is set, which is Lightning's own sign, and at least MASTER_PORT has to be.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.errors import ConfigError
from fairlead.interfaces import Setting, Topology
from fairlead_environments.lightning.config import LightningEnvironmentConfig
from fairlead_environments.variables import check_ranks, given_port, integer, supervised, text

__all__ = ["topology"]

_ONE_MACHINE = Setting(1, "one machine")


def topology(config: LightningEnvironmentConfig, environ: Mapping[str, str]) -> Topology:
    """The topology of this process.

    Raises:
        ConfigError: A variable is malformed, or a started rank does not know where to meet the others.
    """
    started_here = supervised(environ)
    if started_here is not None:
        return started_here
    address = text(environ, "MASTER_ADDR") or Setting("127.0.0.1", "one machine")
    port = given_port(config.main_port, environ)
    local_rank = integer(environ, "LOCAL_RANK")
    if local_rank is None:
        return Topology(
            launched=False,
            num_nodes=_ONE_MACHINE,
            node_rank=Setting(0, "one machine"),
            main_address=address,
            main_port=port,
        )
    world = integer(environ, "WORLD_SIZE", minimum=1)
    if port is None and (local_rank.value > 0 or (world is not None and world.value > 1)):
        raise ConfigError(
            f"LOCAL_RANK is {local_rank.value}, but MASTER_PORT is not set",
            where="environment variable MASTER_PORT",
            why="each rank would choose a port of its own, and they would wait for each other",
            fix="export the same free MASTER_PORT for all ranks; or unset LOCAL_RANK, and Fairlead starts the ranks",
        )
    return check_ranks(
        Topology(
            launched=True,
            num_nodes=_ONE_MACHINE,
            local_world_size=world,
            world_size=world,
            node_rank=Setting(0, "one machine"),
            local_rank=local_rank,
            global_rank=integer(environ, "RANK") or Setting(local_rank.value, "LOCAL_RANK, on one machine"),
            main_address=address,
            main_port=port,
        ),
        "Lightning's launcher",
    )
