"""Where the ranks of a start meet, and what launchers that set torchrun's variables promise."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping

from fairlead.errors import ConfigError
from fairlead.interfaces import Setting, Topology
from fairlead.starts import Start
from fairlead.topology import check_ranks
from fairlead.variables import integer, malformed, required, text

PORTS = range(20000, 30000)
"""Where derived ports lie: below Linux's ephemeral range (32768 on), above most services."""
CANDIDATES = 16
"""How many ports the ranks of a start try."""
DEFAULT_PORT = 29500
"""The port that torch's documentation uses."""
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""What Kubernetes sets in every container of an Indexed Job: the index of its pod."""


def candidate_ports(identity: str) -> tuple[int, ...]:
    """Ports that every rank of a start computes alike without talking to the others, none twice.

    The first candidates of two starts are the same in one of 10,000 cases. Rank 0 takes the first that is free, and the
    others look for it; so a port that is taken costs nothing.
    """
    derived = (PORTS.start + zlib.crc32(f"{identity}/{n}".encode()) % len(PORTS) for n in itertools.count())
    found: dict[int, None] = {}
    while len(found) < CANDIDATES:
        found[next(derived)] = None
    return tuple(found)


def given_address(requested: str | None, environ: Mapping[str, str]) -> Setting | None:
    """The config's main address, else MASTER_ADDR; None leaves it to the environment."""
    return text(environ, "MASTER_ADDR") if requested is None else Setting(requested, "environment.main_address")


def given_port(requested: int | None, environ: Mapping[str, str]) -> Setting | None:
    """The config's port, else MASTER_PORT; None leaves it to the ranks."""
    if requested is not None:
        return Setting(requested, "environment.main_port")
    exported = integer(environ, "MASTER_PORT", minimum=1)
    if exported is not None and exported.value > 65535:
        raise malformed("MASTER_PORT", str(exported.value), "a TCP port from 1 to 65535")
    return exported


def meeting(
    requested: int | None,
    environ: Mapping[str, str],
    parts: Mapping[str, object],
    *,
    hosts: Iterable[str] = (),
    rank_hosts: Iterable[str] = (),
) -> tuple[Setting, Start]:
    """`main_port` with its reason, and what else the ranks of this start know of it before they meet.

    `parts` is what all of them share and no other start does, named for messages; the hosts are those of each node rank
    and of each rank, where known.
    """
    identity = ", ".join(f"{name} {value}" for name, value in parts.items())
    given = given_port(requested, environ)
    ports = () if given is not None else candidate_ports(identity)
    first = given or Setting(
        ports[0], f"the first free one of {len(ports)} ports derived from {identity}; this is the first"
    )
    return first, Start(identity, ports, tuple(hosts), tuple(rank_hosts))


def in_kubernetes(environ: Mapping[str, str]) -> Setting | None:
    """The evidence that this process is in a pod; None when it is not."""
    return text(environ, "KUBERNETES_SERVICE_HOST", "KUBERNETES_PORT")


def local_world_size(environ: Mapping[str, str], world: Setting | None, nodes: Setting | None) -> Setting | None:
    """LOCAL_WORLD_SIZE, else the ranks of a node where all ranks and nodes are known and go together."""
    known = integer(environ, "LOCAL_WORLD_SIZE", minimum=1)
    if known is not None or world is None or nodes is None:
        return known
    if world.value % nodes.value:
        raise ConfigError(
            f"WORLD_SIZE is {world.value} and NNODES is {nodes.value}: the ranks per node differ",
            where="environment variable LOCAL_WORLD_SIZE",
            fix="export LOCAL_WORLD_SIZE on each node, the number of ranks on it",
        )
    return Setting(world.value // nodes.value, "WORLD_SIZE / NNODES")


def short_name(host: str) -> str:
    """A host name without its domain; an address stays unchanged."""
    head, _, _ = host.partition(".")
    return host.lower() if head.isdigit() or ":" in host else head.lower()


def supervised(environ: Mapping[str, str]) -> Topology | None:
    """The topology of a rank that Fairlead's own launcher on this node started; else None."""
    if text(environ, "FAIRLEAD_LAUNCHED") is None:
        return None
    return workers(environ, by="Fairlead's launcher", nodes="NNODES", node_rank="NODE_RANK")


def workers(environ: Mapping[str, str], *, by: str, nodes: str, node_rank: str) -> Topology:
    """The topology of a rank from torchrun's variables, which Fairlead's own launcher sets too.

    `nodes` and `node_rank` are variables; where the first is not set, it is WORLD_SIZE / LOCAL_WORLD_SIZE.
    """
    world = required(environ, "WORLD_SIZE", by=by, minimum=1)
    local = required(environ, "LOCAL_WORLD_SIZE", by=by, minimum=1)
    num_nodes = integer(environ, nodes, minimum=1)
    if num_nodes is None and world.value % local.value == 0:
        num_nodes = Setting(world.value // local.value, "WORLD_SIZE / LOCAL_WORLD_SIZE")
    address = text(environ, "MASTER_ADDR")
    if address is None:
        raise ConfigError(
            "MASTER_ADDR is not set",
            where="environment variable MASTER_ADDR",
            why=f"{by} sets it in every rank to the host of rank 0",
            fix=f"do not unset it between {by} and this process",
        )
    return check_ranks(
        Topology(
            launched=True,
            num_nodes=num_nodes,
            local_world_size=local,
            world_size=world,
            node_rank=required(environ, node_rank, by=by),
            local_rank=required(environ, "LOCAL_RANK", by=by),
            global_rank=required(environ, "RANK", by=by),
            main_address=address,
            main_port=required(environ, "MASTER_PORT", by=by, minimum=1),
        ),
        by,
    )
