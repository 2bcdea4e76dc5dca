"""Who a task of an LSF job is: of `jsrun` (JSM's variables) or of `blaunch` (LSF_PM_TASKID).

`blaunch` without host names starts one task per slot, in the order of LSB_HOSTS, and numbers them from 1. JSM numbers
ranks from 0 and names the local rank, but not the node: that is this host's position among the hosts of the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.errors import ConfigError
from fairlead.interfaces import Claim, Setting, Specificity, Topology
from fairlead.starts import Start
from fairlead.topology import check_ranks
from fairlead.variables import integer, present, required, text
from fairlead_environments.lsf.hosts import index_of, read_hosts
from fairlead_environments.shared import MainAddressConfig
from fairlead_environments.variables import given_address, meeting

_JSRUN = ("LSB_JOBID", "JSM_NAMESPACE_RANK")
_BLAUNCH = ("LSB_JOBID", "LSF_PM_TASKID")


def find_task(environ: Mapping[str, str]) -> Claim | None:
    """The evidence that `jsrun` or `blaunch` started this process; None when neither did."""
    if present(environ, _JSRUN):
        # jsrun is a launcher inside the job; Spectrum MPI's variables are its own doing.
        return Claim(f"JSM_NAMESPACE_RANK={environ['JSM_NAMESPACE_RANK']}", Specificity.LAUNCHER)
    if present(environ, _BLAUNCH):
        return Claim(f"LSF_PM_TASKID={environ['LSF_PM_TASKID']}", Specificity.SCHEDULER)
    return None


def topology(config: MainAddressConfig, environ: Mapping[str, str], hostname: str) -> Topology:
    """The topology of this task; `hostname` is the name of this machine, full or short."""
    found = _of_jsrun if present(environ, _JSRUN) else _of_blaunch
    return check_ranks(found(config, environ, hostname), "LSF")


def _of_jsrun(config: MainAddressConfig, environ: Mapping[str, str], hostname: str) -> Topology:
    job = read_hosts(environ)
    world = required(environ, "JSM_NAMESPACE_SIZE", by="jsrun", minimum=1)
    rank = required(environ, "JSM_NAMESPACE_RANK", by="jsrun")
    # JSM calls the number of ranks on this node LOCAL_SIZE; not every release sets it.
    local = integer(environ, "JSM_NAMESPACE_LOCAL_SIZE", minimum=1)
    even = local is not None and world.value % local.value == 0
    nodes = job.compute_hosts(world.value // local.value if local is not None and even else None)
    hosts: tuple[str, ...] = nodes.value
    index = index_of(hostname, hosts)
    if index is not None:
        node_rank = Setting(index, f"position of {hostname} among the hosts in {job.reason}")
    elif local is not None and even:  # another name for this host, as in a container
        node_rank = Setting(rank.value // local.value, f"{rank.reason} / {local.reason}")
    else:
        raise _not_of_the_job(hostname, hosts, job.reason)
    if local is None and world.value % len(hosts) == 0:
        local = Setting(world.value // len(hosts), f"{world.reason} / {nodes.reason}")
    # jsrun's resource sets decide where a rank runs; only the hosts are known.
    port, start = _meeting(config, environ, hosts, ())
    return Topology(
        launched=True,
        num_nodes=Setting(len(hosts), nodes.reason),
        local_world_size=local,
        world_size=world,
        node_rank=node_rank,
        local_rank=required(environ, "JSM_NAMESPACE_LOCAL_RANK", by="jsrun"),
        global_rank=rank,
        main_address=_main_address(config, environ, hosts[0], nodes.reason),
        main_port=port,
        start=start,
    )


def _of_blaunch(config: MainAddressConfig, environ: Mapping[str, str], hostname: str) -> Topology:
    job = read_hosts(environ)
    task = required(environ, "LSF_PM_TASKID", by="blaunch", minimum=1)
    rank = task.value - 1
    if rank >= len(job.slots):
        raise ConfigError(
            f"LSF_PM_TASKID is {task.value}, but the job has {len(job.slots)} slots ({job.reason})",
            where="environment variable LSF_PM_TASKID",
            why="blaunch numbers its tasks from 1, one per slot",
            fix="start all ranks with one `blaunch fairlead fit JOB`",
        )
    host = job.slots[rank]
    here = index_of(hostname, job.hosts)
    if here is not None and job.hosts[here] != host:
        raise ConfigError(
            f"task {task.value} of the job belongs on {host}, but this is {hostname}",
            where="environment variable LSF_PM_TASKID",
            why="several blaunch commands each count their tasks from 1, so ranks would be given twice",
            fix="start all ranks with one `blaunch fairlead fit JOB`, without host names",
        )
    local = job.slots.count(host)
    port, start = _meeting(config, environ, job.hosts, job.slots)
    return Topology(
        launched=True,
        num_nodes=Setting(len(job.hosts), f"unique hosts in {job.reason}"),
        local_world_size=Setting(local, f"slots on {host} in {job.reason}"),
        world_size=Setting(len(job.slots), f"slots in {job.reason}"),
        node_rank=Setting(job.hosts.index(host), f"position of {host} in {job.reason}"),
        local_rank=Setting(job.slots[:rank].count(host), f"position of task {task.value} among the slots on {host}"),
        global_rank=Setting(rank, f"LSF_PM_TASKID={task.value}, which counts from 1"),
        main_address=_main_address(config, environ, job.hosts[0], f"hosts in {job.reason}"),
        main_port=port,
        start=start,
    )


def _main_address(config: MainAddressConfig, environ: Mapping[str, str], first: str, reason: str) -> Setting:
    return given_address(config.main_address, environ) or Setting(first, f"first of the {reason}")


def _meeting(
    config: MainAddressConfig, environ: Mapping[str, str], hosts: tuple[str, ...], rank_hosts: tuple[str, ...]
) -> tuple[Setting, Start]:
    parts = {
        "job": required(environ, "LSB_JOBID", by="LSF").value,
        "array index": environ.get("LSB_JOBINDEX", "0"),
    }
    step = text(environ, "PMIX_NAMESPACE")  # of each jsrun its own: two of one job may share a host
    if step is not None:
        parts["step"] = step.value
    return meeting(config.main_port, environ, parts, hosts=hosts, rank_hosts=rank_hosts)


def _not_of_the_job(hostname: str, hosts: tuple[str, ...], reason: str) -> ConfigError:
    return ConfigError(
        f"this host, {hostname!r}, is not one of the job's hosts",
        where=f"environment variable {reason}",
        why=f"it names {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}",
        fix="start it with jsrun inside the job; in a container, keep the host's name",
    )
