"""Whether a scheduler or another launcher has started `fairlead launch`, as a rank or once on each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fairlead.detect import FALLBACK, choose_environment
from fairlead.errors import ConfigError
from fairlead.plugins import PluginManager
from fairlead.topology import Topology
from fairlead_launch.environment import LAUNCHED
from fairlead_launch.ports import DEFAULT_PORT


@dataclass(frozen=True)
class OuterLaunch:
    """Which of the processes of another launcher or of a scheduler, `by`, this one is.

    With `rank` it is one of the ranks; else the launcher of its node.
    """

    by: str
    num_nodes: int
    node_rank: int
    address: str
    port: int
    tasks: int
    rank: int | None = None
    local_rank: int = 0
    world_size: int = 0

    def variables(self) -> dict[str, str]:
        """What a script expects of its launcher, for a rank."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.tasks,
            "NODE_RANK": self.node_rank,
            "MASTER_PORT": self.port,
        }
        return {"MASTER_ADDR": self.address, **{name: str(value) for name, value in numbers.items()}}


def find_outer_launch(
    requested: int | str, count: int, environ: Mapping[str, str], plugins: PluginManager
) -> OuterLaunch | None:
    """Which process of a scheduler or of another launcher this is; None: it was started alone.

    Several tasks of a node are its ranks. A single one is the launcher of its node where `count`, the processes that
    the node is to have, is more than one.

    Raises:
        ConfigError: `--nproc` does not go with the tasks of the node, or the first node is not known.
    """
    if LAUNCHED in environ:
        return None  # in a rank of ours: what it launches is another job
    chosen = choose_environment("auto", environ, plugins, starting=True)
    topology = chosen.topology
    if topology is None or chosen.setting.value == FALLBACK:
        return None
    nodes, tasks, world = (
        int(setting.value) if setting is not None else 1
        for setting in (topology.num_nodes, topology.local_world_size, topology.world_size)
    )
    if not topology.launched:
        tasks, world = 1, nodes  # started by hand on each node, or once in each pod
    if world == 1:
        return None
    by = f"{chosen.setting.value} ({chosen.setting.reason})"
    if tasks > 1 and isinstance(requested, int) and requested != tasks:
        raise ConfigError(
            f"there are {tasks} processes on this node already, and --nproc asks for {requested}",
            where=by,
            why="each of them would start that many",
            fix=f"start one on each node (srun --ntasks-per-node=1), or leave --nproc out: these are the {world} ranks",
        )
    node = OuterLaunch(
        by,
        num_nodes=nodes,
        node_rank=int(topology.node_rank.value) if topology.node_rank is not None else 0,
        address=_address(topology, nodes, by),
        port=_port(topology),
        tasks=tasks,
    )
    if not topology.launched or (tasks == 1 and count > 1):
        return node if nodes > 1 else None
    rank, local = topology.global_rank, topology.local_rank
    assert rank is not None  # the topology of a launched rank has both
    assert local is not None
    return replace(node, rank=int(rank.value), local_rank=int(local.value), world_size=world)


def _address(topology: Topology, nodes: int, by: str) -> str:
    if topology.main_address is not None:
        return str(topology.main_address.value)
    if nodes == 1:
        return "127.0.0.1"
    raise ConfigError(
        "the first node is not known",
        where=by,
        why="it tells its processes their numbers, and not where the first one is",
        fix="export MASTER_ADDR, a name of the first node that the others reach, and pass it on: mpirun -x MASTER_ADDR",
    )


def _port(topology: Topology) -> int:
    """The given port, or the first of those that all ranks of this start would look at."""
    if topology.main_port is not None:
        return int(topology.main_port.value)
    ports = topology.start.ports if topology.start is not None else ()
    return ports[0] if ports else DEFAULT_PORT
