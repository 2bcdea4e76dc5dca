"""What `slurm` contributes."""

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
from fairlead_environments.slurm.config import SLURMEnvironmentConfig
from fairlead_environments.slurm.step import find_step
from fairlead_environments.slurm.topology import topology

__all__ = ["SLURM", "slurm"]


class SLURM(EnvironmentPlugin):
    """Tasks of a SLURM job step."""

    config = SLURMEnvironmentConfig
    runtime = "fairlead_environments.runtime:build"
    aliases = ("SLURMEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "slurm"
    requeue = "slurm"
    codes = LOOPBACK_CODES

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a task of a *step*, never a mere allocation: shells and notebooks live in allocations too."""
        evidence = find_step(environ)
        return None if evidence is None else Claim(evidence, Specificity.SCHEDULER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the variables of `srun`, the step's before the job's."""
        assert isinstance(config, SLURMEnvironmentConfig)
        return topology(config, environ)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A MASTER_ADDR that was exported for another job."""
        return loopback_address(resolution)


slurm = SLURM()
