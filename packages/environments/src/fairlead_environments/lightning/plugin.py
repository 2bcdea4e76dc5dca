"""What `lightning` contributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

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
from fairlead_environments.fields import LIGHTNING
from fairlead_environments.kubeflow.topology import idle_job
from fairlead_environments.lightning.config import LightningEnvironmentConfig
from fairlead_environments.lightning.topology import topology
from fairlead_environments.lsf.hosts import idle_job as idle_lsf_job
from fairlead_environments.slurm.step import idle_allocation
from fairlead_environments.variables import text

__all__ = ["Lightning", "lightning"]


class Lightning(EnvironmentPlugin):
    """One machine, without a launcher."""

    config = LightningEnvironmentConfig
    runtime = "fairlead_environments.runtime:build"
    aliases = ("LightningEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {
        "allocation-unused": "The scheduler gave this job more nodes or tasks than the run will use.",
        "node-rank-ignored": "NODE_RANK says that this is one of several nodes, but not where the first one is.",
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
        return topology(config, environ)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Allocations of which a single process would use one node, silently."""
        unused = (
            (idle_allocation(environ), "this process is no task of a step: srun did not start it", "srun"),
            (idle_lsf_job(environ), "this process is one task: neither jsrun nor blaunch started it", "blaunch"),
            (idle_job(environ), "torchrun did not start this process", "torchrun"),
        )
        for what, why, launcher in unused:
            if what is not None and not resolution.topology.launched:
                yield Finding(
                    "warning",
                    "allocation-unused",
                    f"{what}, but the run will use this machine only",
                    where="trainer.environment",
                    why=why,
                    fix=f"start it with {launcher}, or ask for one node and one task",
                )
        node = text(environ, "NODE_RANK")
        if node is not None and node.value != "0" and not resolution.topology.launched:
            yield Finding(
                "warning",
                "node-rank-ignored",
                f"NODE_RANK is {node.value}, but MASTER_ADDR is not set: this node would run by itself",
                where="environment variable NODE_RANK",
                fix="export MASTER_ADDR and NNODES too, or unset NODE_RANK",
            )


lightning = Lightning()
