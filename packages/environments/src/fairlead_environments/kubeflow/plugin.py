"""What `kubeflow` contributes."""

from __future__ import annotations

from collections.abc import Mapping

from fairlead import Claim, EnvironmentConfigBase, EnvironmentPlugin, Specificity, Topology, hookimpl
from fairlead_environments.fields import LIGHTNING
from fairlead_environments.kubeflow.config import KubeflowEnvironmentConfig
from fairlead_environments.kubeflow.topology import find_pod, topology

__all__ = ["Kubeflow", "kubeflow"]


class Kubeflow(EnvironmentPlugin):
    """Pods of a Kubeflow job."""

    config = KubeflowEnvironmentConfig
    runtime = "fairlead_environments.runtime:build"
    aliases = ("KubeflowEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "kubeflow"
    requeue = "exit_code"

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a pod with the variables of Kubeflow's operators."""
        evidence = find_pod(environ)
        return None if evidence is None else Claim(evidence, Specificity.SCHEDULER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the operator's variables; the ranks in a pod are Fairlead's to start."""
        return topology(environ)


kubeflow = Kubeflow()
