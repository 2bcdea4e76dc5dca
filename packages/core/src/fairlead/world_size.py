"""WORLD_SIZE, which people and scripts export by hand: it is used, or it is contradicted aloud."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fairlead.facts import Setting
from fairlead.findings import Finding
from fairlead.topology import Topology

_VARIABLE = "WORLD_SIZE"


def nodes_from_world_size(topology: Topology, devices: int) -> Topology:
    """The topology with the number of nodes that follows, where a person has exported WORLD_SIZE without NNODES."""
    world = topology.world_size
    if topology.launched or topology.num_nodes is not None or world is None or world.value % devices:
        return topology
    nodes = Setting(world.value // devices, f"{world.reason} / {devices} {'device' if devices == 1 else 'devices'}")
    return dataclasses.replace(topology, num_nodes=nodes)


def contradicted(environ: Mapping[str, str], topology: Topology, world_size: Setting) -> Finding | None:
    """What to say where WORLD_SIZE is exported, and the run would have another number of ranks.

    A launcher knows its ranks, so the variable is only wrong; ranks that are not started yet would train alone.
    """
    exported = environ.get(_VARIABLE, "").strip()
    if not exported or exported == str(world_size.value):
        return None
    launched, ranks = topology.launched, "1 rank" if world_size.value == 1 else f"{world_size.value} ranks"
    return Finding(
        "warning" if launched else "error",
        "world-size-contradicted",
        f"WORLD_SIZE is {exported}, but this start has {ranks}",
        where=f"environment variable {_VARIABLE}",
        why=f"{world_size.value} comes from {world_size.reason}"
        + ("" if launched else "; each node would train alone, and end as if all was well"),
        fix="unset WORLD_SIZE: the launcher knows the number"
        if launched
        else "several nodes: export MASTER_ADDR, NODE_RANK and WORLD_SIZE (devices of a node x nodes) on each of them\n"
        "this machine alone: unset WORLD_SIZE",
    )
