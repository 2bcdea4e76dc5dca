"""One machine: no ranks were started yet, or Fairlead's launcher did, or Lightning's (its sign is LOCAL_RANK)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from fairlead import Claim, EnvironmentConfigBase, Finding, Resolution, Specificity, Topology, hookimpl
from fairlead.errors import ConfigError
from fairlead.interfaces import Job, Setting
from fairlead.topology import check_ranks
from fairlead.variables import integer, text
from fairlead_environments.shared import Port, ResolvedRanks
from fairlead_environments.variables import given_port, supervised

PBS_RECORDED: Final = ("PBS_JOBID", "PBS_JOBNAME", "PBS_ARRAY_INDEX", "PBS_QUEUE", "PBS_NUM_PPN", "PBS_O_WORKDIR")
"""The variables of a PBS job that a run's provenance keeps."""
_ONE_MACHINE: Final = Setting(1, "one machine")


class LightningEnvironmentConfig(EnvironmentConfigBase):
    """One machine without a launcher: Fairlead, or Lightning, starts the ranks.

    Example:
        >>> LightningEnvironmentConfig(main_port=29501).main_port
        29501
    """

    name: Literal["lightning"] = "lightning"
    main_port: Port | None = None
    """TCP port on which the ranks meet; None takes MASTER_PORT if it is exported, else a free one."""


class Lightning(ResolvedRanks):
    """One machine, without a launcher."""

    config = LightningEnvironmentConfig
    aliases = ("LightningEnvironmentPlugin",)
    extra = "lightning"
    example_environ: ClassVar[Mapping[str, str]] = {}
    codes: ClassVar[Mapping[str, str]] = {
        "node-rank-ignored": "NODE_RANK or NNODES says that this is one of several nodes; not which.",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim:
        """Claims every machine, at the lowest specificity."""
        launched = text(environ, "FAIRLEAD_LAUNCHED", "LOCAL_RANK")
        evidence = "no launcher is seen" if launched is None else f"{launched.reason}={launched.value}"
        return Claim(evidence, Specificity.MACHINE)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """One machine; the ranks where a launcher of this machine has already started them."""
        assert isinstance(config, LightningEnvironmentConfig)
        if (started_here := supervised(environ)) is not None:
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
                why="each rank would choose its own port, and they would wait for each other",
                fix="export the same free MASTER_PORT for all ranks; or unset LOCAL_RANK, and Fairlead starts them",
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

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """One of several nodes by its variables, but without a rendezvous."""
        node, nodes = text(environ, "NODE_RANK", "GROUP_RANK"), text(environ, "NNODES")
        given = node if node is not None and node.value != "0" else nodes
        if given is not None and (given is node or given.value != "1") and not resolution.topology.launched:
            missing = "NODE_RANK" if text(environ, "MASTER_ADDR") is not None else "MASTER_ADDR"
            yield Finding(
                "error",
                "node-rank-ignored",
                f"{given.reason} is {given.value}, but {missing} is not set: this node would train alone",
                where=f"environment variable {given.reason}",
                fix=f"export MASTER_ADDR, NODE_RANK and NNODES on each node; or unset {given.reason}",
            )

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """A job of PBS or Grid Engine, for which this package has no environment."""
        pbs, index = text(environ, "PBS_JOBID"), text(environ, "PBS_ARRAY_INDEX")
        if pbs is not None:
            task = index.value if index is not None and index.value.isdecimal() else None
            return Job(f"pbs:{pbs.value}", array_task=task, variables=PBS_RECORDED)
        job, task_id = text(environ, "JOB_ID"), text(environ, "SGE_TASK_ID")  # `undefined` outside of an array
        if job is None or task_id is None:
            return None
        if not task_id.value.isdecimal():
            return Job(f"sge:{job.value}")
        return Job(f"sge:{job.value}.{task_id.value}", array_task=task_id.value)


lightning = Lightning()
