"""Who a process is among the ranks of a start, as its launcher says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fairlead.errors import ConfigError
from fairlead.facts import Setting
from fairlead.starts import Start
from fairlead.variables import integer, required, text

__all__ = ["Topology", "check_ranks"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Who this process is and who else is there, each with its reason; None: not known, or not decided here.

    Args:
        launched: True when every rank was started from outside; False when Fairlead starts the
            ranks of this node itself.
        local_world_size: Ranks on *this* node; nodes may differ.
        main_address: Host name or address of the node with rank 0.
        main_port: TCP port of the store on it; None lets the ranks agree on one.
        start: What all ranks of this start know of it alike, the ports among which they agree included.
    """

    launched: bool
    num_nodes: Setting | None = None
    local_world_size: Setting | None = None
    world_size: Setting | None = None
    node_rank: Setting | None = None
    local_rank: Setting | None = None
    global_rank: Setting | None = None
    main_address: Setting | None = None
    main_port: Setting | None = None
    start: Start | None = None

    @classmethod
    def from_variables(
        cls,
        environ: Mapping[str, str],
        *,
        by: str,
        global_rank: str,
        world_size: str,
        local_rank: str,
        local_world_size: str | None = None,
        node_rank: str | None = None,
        num_nodes: str | None = None,
        main_address: str | None = None,
        main_port: str | None = None,
    ) -> Self:
        """The topology of a rank that a launcher started, from the names of the variables that it sets.

        Args:
            environ: The environment variables of the process.
            by: The launcher, for messages.
            global_rank: The variable with this rank's index in all; the others are named likewise. Those that are
                named must be set, `main_address` and `main_port` excepted: rank 0's host and port may be found
                otherwise.

        Raises:
            ConfigError: A variable is absent or no integer, or the numbers do not go together.

        Example:
            >>> environ = {"NOVA_RANK": "1", "NOVA_SIZE": "2", "NOVA_LOCAL": "1", "NOVA_HEAD": "node7"}
            >>> topology = Topology.from_variables(
            ...     environ,
            ...     by="novarun",
            ...     global_rank="NOVA_RANK",
            ...     world_size="NOVA_SIZE",
            ...     local_rank="NOVA_LOCAL",
            ...     main_address="NOVA_HEAD",
            ... )
            >>> topology.global_rank, topology.main_address
            (Setting(value=1, reason='NOVA_RANK'), Setting(value='node7', reason='NOVA_HEAD'))
        """

        def read(name: str | None, minimum: int = 0) -> Setting | None:
            return required(environ, name, by=by, minimum=minimum) if name is not None else None

        topology = cls(
            launched=True,
            num_nodes=read(num_nodes, 1),
            local_world_size=read(local_world_size, 1),
            world_size=read(world_size, 1),
            node_rank=read(node_rank),
            local_rank=read(local_rank),
            global_rank=read(global_rank),
            main_address=text(environ, main_address) if main_address is not None else None,
            main_port=integer(environ, main_port, minimum=1) if main_port is not None else None,
        )
        check_ranks(topology, by)
        return topology


def check_ranks(topology: Topology, source: str) -> Topology:
    """The topology, if its numbers go together: in a shell inside a job, variables of two jobs may be mixed."""
    pairs = (
        (topology.global_rank, topology.world_size),
        (topology.local_rank, topology.local_world_size),
        (topology.node_rank, topology.num_nodes),
        (topology.local_world_size, topology.world_size),
        (topology.num_nodes, topology.world_size),
    )
    for index, (low, high) in enumerate(pairs):
        if low is None or high is None:
            continue
        if low.value > high.value or (index < 3 and low.value == high.value):
            raise ConfigError(
                f"{low.value} ({low.reason}) does not go with {high.value} ({high.reason})",
                where=f"environment variables of {source}",
                why="the first counts within the second; variables of two jobs or steps may be mixed",
                fix="start the command anew under its launcher, from a shell outside of other jobs",
            )
    return topology
