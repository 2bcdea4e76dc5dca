"""Who a task of a SLURM step is; a step may be smaller than its job, so its variables come before the job's.

HOSTNAME is not used: bash exports it, srun passes it on, and on every other node it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.errors import ConfigError
from fairlead.hostlist import expand, tasks_per_node
from fairlead.interfaces import Setting, Topology
from fairlead.topology import check_ranks
from fairlead.variables import malformed, required, text
from fairlead_environments.shared import MainAddressConfig
from fairlead_environments.variables import given_address, meeting

_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


def topology(config: MainAddressConfig, environ: Mapping[str, str]) -> Topology:
    """The topology of this task."""
    num_nodes = _step_before_job(environ, _NODES)
    world_size = _step_before_job(environ, _TASKS)
    node_rank = required(environ, "SLURM_NODEID", by="srun")
    counts = _tasks_per_node(environ, num_nodes, world_size, node_rank)
    hosts = listed_nodes(environ, *_NODELIST)
    port, start = meeting(
        config.main_port,
        environ,
        {
            "job": required(environ, "SLURM_JOB_ID", "SLURM_JOBID", by="srun").value,
            "step": required(environ, "SLURM_STEP_ID", "SLURM_STEPID", by="srun").value,
            "restart": environ.get("SLURM_RESTART_COUNT", "0"),  # unset until the first requeue
        },
        hosts=hosts.value if hosts is not None else (),
        rank_hosts=_rank_hosts(environ, counts.value, node_rank.value, hosts),
    )
    return check_ranks(
        Topology(
            launched=True,
            num_nodes=num_nodes,
            local_world_size=Setting(
                counts.value[node_rank.value], f"{counts.reason} at SLURM_NODEID={node_rank.value}"
            ),
            world_size=world_size,
            node_rank=node_rank,
            local_rank=required(environ, "SLURM_LOCALID", by="srun"),
            global_rank=required(environ, "SLURM_PROCID", by="srun"),
            main_address=_main_address(config, environ, hosts),
            main_port=port,
            start=start,
        ),
        "SLURM",
    )


def _step_before_job(environ: Mapping[str, str], names: tuple[str, ...]) -> Setting:
    """The step's number, with a reason that says how it relates to the job's."""
    found = required(environ, *names, by="srun", minimum=1)
    others = [name for name in names if name != found.reason and environ.get(name, "").strip()]
    differing = [f"{name}={environ[name].strip()}" for name in others if environ[name].strip() != str(found.value)]
    if differing:
        return Setting(found.value, f"{found.reason}: the step; the job has {', '.join(differing)}")
    return Setting(found.value, ", ".join([found.reason, *others]))


def _tasks_per_node(environ: Mapping[str, str], num_nodes: Setting, world_size: Setting, node_rank: Setting) -> Setting:
    """Tasks on each node; nodes may differ (`3,1`)."""
    found = text(environ, *_TASKS_PER_NODE)
    if found is None:
        raise _absent(
            _TASKS_PER_NODE[0], "the number of tasks on each node, such as 2(x2)", "name another `environment`"
        )
    try:
        counts = tasks_per_node(found.value)
    except ValueError as error:
        raise malformed(found.reason, found.value, "a list of tasks per node such as 2(x2) or 3,1") from error
    if len(counts) != num_nodes.value or sum(counts) != world_size.value or node_rank.value >= len(counts):
        raise ConfigError(
            f"{found.reason} is {found.value!r}: {sum(counts)} tasks on {len(counts)} nodes; "
            f"expected {world_size.value} tasks ({world_size.reason}) on {num_nodes.value} nodes ({num_nodes.reason})",
            where=f"environment variable {found.reason}",
            why="variables of two jobs or steps are mixed",
            fix="start the command anew with srun, from a shell outside of other steps",
        )
    return Setting(tuple(counts), f"{found.reason}={found.value}")


def _rank_hosts(
    environ: Mapping[str, str], counts: tuple[int, ...], node_rank: int, hosts: Setting | None
) -> tuple[str, ...]:
    """The node of each rank, if the ranks of this one show in which of the two usual orders srun dealt them out."""
    here = text(environ, "SLURM_GTIDS")
    if hosts is None or here is None or len(hosts.value) != len(counts):
        return ()
    orders = {
        "block": [node for node, count in enumerate(counts) for _ in range(count)],
        "cyclic": [node for turn in range(max(counts)) for node, count in enumerate(counts) if count > turn],
    }
    fitting = [
        order
        for order in orders.values()
        if ",".join(str(rank) for rank, node in enumerate(order) if node == node_rank) == here.value
    ]
    if fitting and fitting[0] != fitting[-1]:  # from here they look alike; inside an allocation srun says it
        requested = environ.get("SLURM_DISTRIBUTION", "").partition(":")[0]
        fitting = [orders[requested]] if requested in orders else []
    if not fitting:
        return ()
    return tuple(hosts.value[node] for node in fitting[0])


def _main_address(config: MainAddressConfig, environ: Mapping[str, str], hosts: Setting | None) -> Setting:
    given = given_address(config.main_address, environ)
    if given is not None:
        return given
    if hosts is None:
        raise _absent(_NODELIST[0], "the nodes of the step, such as n[1-2]", "set `environment.main_address`")
    return Setting(hosts.value[0], f"first node of {hosts.reason}")


def listed_nodes(environ: Mapping[str, str], *names: str) -> Setting | None:
    """The nodes of the first of the variables that is set, in order."""
    found = text(environ, *names)
    if found is None:
        return None
    try:
        hosts = expand(found.value)
    except ValueError as error:
        raise malformed(found.reason, found.value, "a list of hosts such as n[1-2] or a1,b[02-03]") from error
    if not hosts:
        raise malformed(found.reason, found.value, "a list of hosts such as n[1-2] or a1,b[02-03]")
    return Setting(tuple(hosts), f"{found.reason}={_shortened(found.value)}")


def _absent(name: str, meaning: str, otherwise: str) -> ConfigError:
    return ConfigError(
        f"{name} is not set",
        where=f"environment variable {name}",
        why=f"srun sets it in every task to {meaning}",
        fix=f"do not unset it between srun and this process, or {otherwise}",
    )


def _shortened(value: str, most: int = 60) -> str:
    return value if len(value) <= most else f"{value[: most - 3]}..."
