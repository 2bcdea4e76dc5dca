"""What `manual` contributes."""

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
from fairlead_environments.manual.config import ManualEnvironmentConfig
from fairlead_environments.manual.topology import find_variables, topology

__all__ = ["Manual", "manual"]


class Manual(EnvironmentPlugin):
    """Nodes or ranks started by hand."""

    config = ManualEnvironmentConfig
    runtime = "fairlead_environments.runtime:build"
    aliases = ("ManualEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "lightning"
    codes = LOOPBACK_CODES

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims exported ranks; any launcher's own claim comes before it."""
        evidence = find_variables(environ)
        return None if evidence is None else Claim(evidence, Specificity.MANUAL)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the variables that torch's `env://`, torchrun and Lightning share."""
        assert isinstance(config, ManualEnvironmentConfig)
        return topology(config, environ)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """`MASTER_ADDR=localhost` on several nodes; a warning, because two 'nodes' on one machine are a fair test."""
        return loopback_address(resolution, "warning")


manual = Manual()
