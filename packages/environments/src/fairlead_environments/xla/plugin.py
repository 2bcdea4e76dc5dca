"""What `xla` contributes."""

from __future__ import annotations

from collections.abc import Mapping

from fairlead import Claim, EnvironmentConfigBase, EnvironmentPlugin, Specificity, Topology, hookimpl
from fairlead_environments.fields import LIGHTNING
from fairlead_environments.xla.config import XLAEnvironmentConfig
from fairlead_environments.xla.topology import find_worker, is_tpu_machine, topology

__all__ = ["XLA", "xla"]


class XLA(EnvironmentPlugin):
    """Hosts of a TPU slice."""

    config = XLAEnvironmentConfig
    runtime = "fairlead_environments.xla.runtime:build"
    aliases = ("XLAEnvironmentPlugin",)
    engines = (*LIGHTNING, "torch-xla>=2.9")
    extra = "xla"

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a host of a slice; a machine on which PJRT_DEVICE=TPU was exported only as by hand."""
        evidence = find_worker(environ)
        if evidence is not None:
            return Claim(evidence, Specificity.SCHEDULER)
        return Claim("PJRT_DEVICE=TPU", Specificity.MANUAL) if is_tpu_machine(environ) else None

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """Number and index of the hosts; PyTorch/XLA starts the ranks."""
        return topology(environ)


xla = XLA()
