"""What `torchelastic` contributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fairlead import (
    Claim,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    Finding,
    Resolution,
    Specificity,
    Topology,
    hookimpl,
)
from fairlead_environments.checks import LOOPBACK_CODES, loopback_address
from fairlead_environments.fields import LIGHTNING
from fairlead_environments.torchelastic.config import TorchElasticEnvironmentConfig
from fairlead_environments.torchelastic.topology import is_worker, topology

__all__ = ["TorchElastic", "torchelastic"]


class TorchElastic(EnvironmentPlugin):
    """Workers of `torchrun`."""

    config = TorchElasticEnvironmentConfig
    runtime = "fairlead_environments.runtime:build"
    aliases = ("TorchElasticEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "lightning"
    codes = LOOPBACK_CODES

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a worker, also inside a scheduler's task: the agent is the nearer parent."""
        if not is_worker(environ):
            return None
        return Claim(f"TORCHELASTIC_RUN_ID={environ['TORCHELASTIC_RUN_ID']}", Specificity.AGENT)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the variables of the agent."""
        return topology(environ)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """`--master_addr localhost` on several nodes; a warning, because tests do that on one machine."""
        return loopback_address(resolution, "warning")


torchelastic = TorchElastic()
