"""What `lsf` contributes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from fairlead import Claim, EnvironmentConfigBase, EnvironmentPlugin, Finding, Resolution, Topology, hookimpl
from fairlead_environments.checks import LOOPBACK_CODES, loopback_address
from fairlead_environments.fields import LIGHTNING
from fairlead_environments.lsf.config import LSFEnvironmentConfig
from fairlead_environments.lsf.topology import find_task, topology

__all__ = ["LSF", "lsf"]


class LSF(EnvironmentPlugin):
    """Tasks of an LSF job."""

    config = LSFEnvironmentConfig
    runtime = "fairlead_environments.runtime:build"
    aliases = ("LSFEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "lsf"
    requeue = "lsf"
    codes = LOOPBACK_CODES

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims tasks of `jsrun` and `blaunch`; a plain `bsub` starts one process only."""
        found = find_task(environ)
        return None if found is None else Claim(*found)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From JSM's or blaunch's variables and the job's hosts."""
        assert isinstance(config, LSFEnvironmentConfig)
        # The one thing about this task that LSF does not put into a variable.
        return topology(config, environ, socket.gethostname())

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A MASTER_ADDR that was exported for another job."""
        return loopback_address(resolution)


lsf = LSF()
