"""Nodes or ranks that are started by hand, with the variables of torch's `env://`, torchrun and Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fairlead import Claim, EnvironmentConfigBase, Specificity, Topology, hookimpl
from fairlead.errors import ConfigError
from fairlead.interfaces import Setting
from fairlead.topology import check_ranks
from fairlead.variables import integer, required, text
from fairlead_environments.shared import LaunchedEnvironment, MainAddressConfig, is_loopback
from fairlead_environments.variables import DEFAULT_PORT, given_address, given_port, local_world_size, supervised


class ManualEnvironmentConfig(MainAddressConfig):
    """Nodes or ranks that a person starts one by one, with variables exported by hand.

    One command per node, Fairlead starts the ranks of each: MASTER_ADDR, NODE_RANK, and NNODES or
    WORLD_SIZE, the number of all ranks. One command per rank: MASTER_ADDR, RANK, WORLD_SIZE and
    LOCAL_RANK. MASTER_PORT is 29500 unless set.

    Example:
        >>> ManualEnvironmentConfig(main_address="n1", node_rank=1).node_rank
        1
    """

    name: Literal["manual"] = "manual"
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """Index of this node, from 0; None takes NODE_RANK. Differs per node, so set it on the command line."""


class Manual(LaunchedEnvironment):
    """Nodes or ranks started by hand."""

    config = ManualEnvironmentConfig
    aliases = ("ManualEnvironmentPlugin",)
    extra = "lightning"
    loopback = "warning"  # two 'nodes' on one machine are a fair test
    example_environ: ClassVar[Mapping[str, str]] = {
        "MASTER_ADDR": "127.0.0.1",
        "NODE_RANK": "1",
        "NNODES": "2",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims exported ranks; any launcher's own claim comes before it."""
        if text(environ, "FAIRLEAD_LAUNCHED") is not None:  # the same variables, but Fairlead set them
            return None
        address, rank, node = text(environ, "MASTER_ADDR"), text(environ, "RANK"), text(environ, *NODE)
        if address is None or (rank is None and node is None):
            return None
        nodes = text(environ, "NNODES")
        one_machine = rank is None and node is not None and node.value == "0" and (nodes is None or nodes.value == "1")
        one_machine &= text(environ, "WORLD_SIZE") is None or text(environ, "LOCAL_RANK") is not None
        if one_machine and is_loopback(address.value):  # what Lightning's own launcher exports on one machine
            return None
        known = ("MASTER_ADDR", *NODE, "NNODES", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        found = [f"{name}={environ[name].strip()}" for name in known if text(environ, name) is not None]
        return Claim(", ".join(found), Specificity.MANUAL)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the variables that torch's `env://`, torchrun and Lightning share."""
        assert isinstance(config, ManualEnvironmentConfig)
        if (started_here := supervised(environ)) is not None:
            return started_here
        address = _main_address(config, environ)
        port = given_port(config.main_port, environ) or Setting(DEFAULT_PORT, "the default of a manual start")
        world = integer(environ, "WORLD_SIZE", minimum=1)
        nodes = integer(environ, "NNODES", minimum=1)
        local_world = local_world_size(environ, world, nodes)
        if nodes is None and world is not None and local_world is not None and world.value % local_world.value == 0:
            nodes = Setting(world.value // local_world.value, "WORLD_SIZE / LOCAL_WORLD_SIZE")
        rank, local_rank = integer(environ, "RANK"), integer(environ, "LOCAL_RANK")
        if rank is None and local_rank is None:
            return check_ranks(
                Topology(
                    launched=False,
                    num_nodes=nodes,
                    local_world_size=local_world,
                    world_size=world,
                    node_rank=_node_rank(config, environ) or required(environ, "NODE_RANK", by="a manual start"),
                    main_address=address,
                    main_port=port,
                ),
                "a manual start",
            )
        if rank is not None and world is None:
            world = required(environ, "WORLD_SIZE", by="a manual start of each rank", minimum=1)
        node_rank = _node_rank(config, environ)
        if node_rank is None and rank is not None and local_world is not None:
            node_rank = Setting(rank.value // local_world.value, f"RANK / {local_world.reason}")
        return check_ranks(
            Topology(
                launched=True,
                num_nodes=nodes,
                local_world_size=local_world,
                world_size=world,
                node_rank=node_rank,
                local_rank=local_rank or _derived_local_rank(rank, world, local_world),
                global_rank=rank or _derived_global_rank(node_rank, local_rank, local_world),
                main_address=address,
                main_port=port,
            ),
            "a manual start",
        )


manual = Manual()


NODE = ("NODE_RANK", "GROUP_RANK")
"""The variables that Lightning takes the index of a node from."""


def _main_address(config: ManualEnvironmentConfig, environ: Mapping[str, str]) -> Setting:
    given = given_address(config.main_address, environ)
    if given is not None:
        return given
    raise ConfigError(
        "MASTER_ADDR is not set",
        where="environment variable MASTER_ADDR",
        why="nodes that are started by hand meet at the address of the first one",
        fix="on every node: export MASTER_ADDR=<first node> NNODES=<number of nodes> NODE_RANK=<0 on the first, ...>",
    )


def _node_rank(config: ManualEnvironmentConfig, environ: Mapping[str, str]) -> Setting | None:
    if config.node_rank is not None:
        return Setting(config.node_rank, "environment.node_rank")
    return integer(environ, *NODE)


def _derived_local_rank(rank: Setting | None, world: Setting | None, local_world: Setting | None) -> Setting:
    if rank is not None and local_world is not None:
        return Setting(rank.value % local_world.value, f"RANK modulo {local_world.reason}")
    if world is not None and world.value == 1:
        return Setting(0, "WORLD_SIZE=1")
    raise ConfigError(
        "LOCAL_RANK is not set",
        where="environment variable LOCAL_RANK",
        why="RANK alone does not tell which ranks share this node's devices",
        fix="export LOCAL_RANK, the index of this process on its node; or LOCAL_WORLD_SIZE or NNODES, to derive it",
    )


def _derived_global_rank(
    node_rank: Setting | None, local_rank: Setting | None, local_world: Setting | None
) -> Setting | None:
    """None leaves it to the config's `devices`: NODE_RANK x devices + LOCAL_RANK, as Lightning does."""
    if node_rank is None or local_rank is None or local_world is None:
        return None
    return Setting(
        node_rank.value * local_world.value + local_rank.value,
        f"{node_rank.reason} x ({local_world.reason}) + LOCAL_RANK",
    )
