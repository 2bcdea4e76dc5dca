"""PBS: the settings, and what this plugin contributes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from fairlead import Claim, EnvironmentConfigBase, EnvironmentPlugin, Job, Setting, Topology, hookimpl
from fairlead.errors import ConfigError


class PBSEnvironmentConfig(EnvironmentConfigBase):
    """Ranks started by `pbsdsh`, one for each line of PBS_NODEFILE."""

    name: Literal["pbs"] = "pbs"
    """The tag."""
    main_port: int = Field(default=29500, ge=1024, le=65535)
    """The TCP port of the ranks' store on the first host."""


class PBS(EnvironmentPlugin):
    """A task of `pbsdsh`: PBS_NODEFILE lists a host for each rank, PBS_TASKNUM numbers them."""

    config = PBSEnvironmentConfig
    # Of two nodes with two ranks each, this is the first rank of the second.
    example_environ: ClassVar[Mapping[str, str]] = {
        "PBS_JOBID": "17.server",
        "PBS_NODEFILE": str(Path(__file__).with_name("example.nodefile")),
        "PBS_VNODENUM": "2",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a task, not a job: PBS_TASKNUM is set for the script as well, PBS_VNODENUM by pbsdsh only."""
        if "PBS_NODEFILE" in environ and "PBS_VNODENUM" in environ:
            return Claim(evidence="PBS_NODEFILE, PBS_VNODENUM")
        return None

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """The job around this process: it names the runs of an array's tasks, and whoever holds a run's lock."""
        job = environ.get("PBS_JOBID")
        if not job:
            return None
        recorded = ("PBS_JOBID", "PBS_JOBNAME", "PBS_ARRAY_INDEX", "PBS_QUEUE")
        return Job(f"pbs:{job}", array_task=environ.get("PBS_ARRAY_INDEX"), cancel=f"qdel {job}", variables=recorded)

    @hookimpl
    def fairlead_topology(self, config: PBSEnvironmentConfig, environ: Mapping[str, str]) -> Topology:
        """Counts hosts and ranks in the node file."""
        path = Path(environ.get("PBS_NODEFILE", ""))
        try:
            hosts = path.read_text().split()
            rank = int(environ["PBS_VNODENUM"])
            host = hosts[rank]
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                "PBS does not say which rank this is",
                where="PBS_NODEFILE, PBS_VNODENUM",
                why=f"{type(error).__name__}: {error}",
                fix="start the ranks with pbsdsh inside a job",
            ) from error
        nodes = list(dict.fromkeys(hosts))
        return Topology(
            launched=True,
            num_nodes=Setting(len(nodes), "hosts in PBS_NODEFILE"),
            world_size=Setting(len(hosts), "lines in PBS_NODEFILE"),
            local_world_size=Setting(hosts.count(host), f"lines of {host} in PBS_NODEFILE"),
            global_rank=Setting(rank, "PBS_VNODENUM"),
            local_rank=Setting(hosts[:rank].count(host), f"lines of {host} before this one"),
            node_rank=Setting(nodes.index(host), f"the place of {host} in PBS_NODEFILE"),
            main_address=Setting(hosts[0], "the first host in PBS_NODEFILE"),
            main_port=Setting(config.main_port, "environment.main_port"),
        )


pbs = PBS()
