"""Reading what a launcher promised: values with their reason, errors that name the variable.

An empty variable counts as absent: shells and pod templates leave such behind.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping

from fairlead.errors import ConfigError
from fairlead.interfaces import Setting, Topology
from fairlead.starts import Start

PORTS = range(20000, 30000)
"""Where derived ports lie: below Linux's ephemeral range (32768 on), above most services."""
CANDIDATES = 16
"""How many ports the ranks of a start try."""


def malformed(name: str, value: str, expected: str) -> ConfigError:
    """The error for a variable that is set to something else than its launcher would set."""
    return ConfigError(
        f"{name} is {value!r}, which is not {expected}",
        where=f"environment variable {name}",
        fix=f"find out who set it (`env | grep {name}`), and unset it if the launcher did not",
    )


def text(environ: Mapping[str, str], *names: str) -> Setting | None:
    """The first of the variables that is set and not empty."""
    for name in names:
        value = environ.get(name, "").strip()
        if value:
            return Setting(value, name)
    return None


def present(environ: Mapping[str, str], names: Iterable[str]) -> bool:
    """Whether all of the variables are set and not empty."""
    return all(environ.get(name, "").strip() for name in names)


def integer(environ: Mapping[str, str], *names: str, minimum: int = 0) -> Setting | None:
    """The first of the variables that is set, as a whole number from `minimum` on."""
    found = text(environ, *names)
    if found is None:
        return None
    # Not int(): it would take "1_0", "+1" and digits of other scripts.
    if not (found.value.isascii() and found.value.isdigit()) or int(found.value) < minimum:
        raise malformed(found.reason, found.value, f"a whole number from {minimum} on, such as {max(minimum, 1)}")
    return Setting(int(found.value), found.reason)


def number(environ: Mapping[str, str], name: str) -> Setting | None:
    """A whole number from 1 on; None where the variable holds anything else, for values that no rank depends on."""
    value = environ.get(name, "").strip()
    return Setting(int(value), name) if value.isascii() and value.isdigit() and int(value) else None


def required(environ: Mapping[str, str], *names: str, by: str, minimum: int = 0) -> Setting:
    """Like `integer`, for a variable that the launcher `by` always sets."""
    found = integer(environ, *names, minimum=minimum)
    if found is not None:
        return found
    raise ConfigError(
        f"{names[0]} is not set",
        where=f"environment variable {names[0]}",
        why=f"{by} sets {' or '.join(names)} to a whole number from {minimum} on in every process that it starts",
        fix=f"do not unset it between {by} and this process, or name another `environment`",
    )


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


def given_address(asked: str | None, environ: Mapping[str, str]) -> Setting | None:
    """The config's main address, else MASTER_ADDR; None leaves it to the environment."""
    return text(environ, "MASTER_ADDR") if asked is None else Setting(asked, "environment.main_address")


def given_port(asked: int | None, environ: Mapping[str, str]) -> Setting | None:
    """The config's port, else MASTER_PORT; None leaves it to the ranks."""
    if asked is not None:
        return Setting(asked, "environment.main_port")
    exported = integer(environ, "MASTER_PORT", minimum=1)
    if exported is not None and exported.value > 65535:
        raise malformed("MASTER_PORT", str(exported.value), "a TCP port from 1 to 65535")
    return exported


def meeting(
    asked: int | None,
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
    given = given_port(asked, environ)
    ports = () if given is not None else candidate_ports(identity)
    first = given or Setting(
        ports[0], f"the first free one of {len(ports)} ports derived from {identity}; this is the first"
    )
    return first, Start(identity, ports, tuple(hosts), tuple(rank_hosts))


def short_name(host: str) -> str:
    """A host name without its domain; an address stays whole."""
    head, _, _ = host.partition(".")
    return host.lower() if head.isdigit() or ":" in host else head.lower()


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
