"""Who a worker of torch's elastic agent is; "group" is torch's word for the workers of one agent, the node.

The variables are set in `torch/distributed/elastic/agent/server/local_elastic_agent.py` (`_start_workers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from fairlead import Claim, EnvironmentConfigBase, Finding, Resolution, Specificity, Topology, hookimpl
from fairlead.variables import present
from fairlead_environments.passing_on import PASSED_ON, check_torchrun
from fairlead_environments.shared import LaunchedEnvironment
from fairlead_environments.variables import workers

_WORKER = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK")  # the last two: not a process beside the agent


class TorchElasticEnvironmentConfig(EnvironmentConfigBase):
    """Workers that `torchrun` (torch's elastic agent) started on this node.

    Ranks, address and port are the agent's; it may change them at each restart, so nothing here overrides them.

    Example:
        >>> TorchElasticEnvironmentConfig().name
        'torchelastic'
    """

    name: Literal["torchelastic"] = "torchelastic"


class TorchElastic(LaunchedEnvironment):
    """Workers of `torchrun`."""

    config = TorchElasticEnvironmentConfig
    aliases = ("TorchElasticEnvironmentPlugin",)
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {**LaunchedEnvironment.codes, **PASSED_ON}
    loopback = "warning"  # tests start two 'nodes' on one machine
    example_environ: ClassVar[Mapping[str, str]] = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a worker, also inside a scheduler's task: the agent is the nearer parent."""
        if not present(environ, _WORKER):
            return None
        return Claim(f"TORCHELASTIC_RUN_ID={environ['TORCHELASTIC_RUN_ID']}", Specificity.AGENT)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the variables of the agent."""
        return workers(environ, by="torchrun", nodes="GROUP_WORLD_SIZE", node_rank="GROUP_RANK")

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """What a stop would not survive."""
        yield from super().fairlead_check(resolution, environ)
        yield from check_torchrun(resolution, environ)


torchelastic = TorchElastic()
