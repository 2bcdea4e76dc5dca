"""Which pod of an Indexed Job this is, without any operator.

Kubernetes gives each pod of such a Job its JOB_COMPLETION_INDEX and the host name `<job>-<index>`
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode, and `completionIndexEnvName` in
`pkg/controller/job/indexed_job_utils.go` of kubernetes/kubernetes). How many pods there are, and by which name the
first one is reached through a headless service, the manifest has to say: MASTER_ADDR, and NNODES or WORLD_SIZE.
`fairlead submit --to kubernetes` writes all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fairlead import Claim, EnvironmentConfigBase, Specificity, Topology, hookimpl
from fairlead.errors import ConfigError
from fairlead.interfaces import Setting
from fairlead.topology import check_ranks
from fairlead.variables import integer, required, text
from fairlead_environments.kubeflow import find_pod
from fairlead_environments.shared import LaunchedEnvironment, MainAddressConfig
from fairlead_environments.variables import (
    COMPLETION_INDEX,
    DEFAULT_PORT,
    given_address,
    given_port,
    in_kubernetes,
    local_world_size,
    supervised,
)


class KubernetesEnvironmentConfig(MainAddressConfig):
    """Pods of a Kubernetes Indexed Job that train together.

    A pod is a node, and its completion index the node's rank. With LOCAL_WORLD_SIZE=1 the pod's process is the rank;
    otherwise Fairlead starts `devices` ranks in each pod. The manifest sets MASTER_ADDR and WORLD_SIZE, or NNODES.

    Example:
        >>> KubernetesEnvironmentConfig().name
        'kubernetes'
    """

    name: Literal["kubernetes"] = "kubernetes"


class Kubernetes(LaunchedEnvironment):
    """Pods of an Indexed Job."""

    config = KubernetesEnvironmentConfig
    extra = "lightning"
    requeue = "exit_code"
    example_environ: ClassVar[Mapping[str, str]] = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        COMPLETION_INDEX: "1",
        "MASTER_ADDR": "job-0.job",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a pod with an index and a rendezvous address; without that, indexes are runs apart."""
        pod, index, address = in_kubernetes(environ), text(environ, COMPLETION_INDEX), text(environ, "MASTER_ADDR")
        if pod is None or index is None or address is None or find_pod(environ) is not None:
            return None
        return Claim(f"{COMPLETION_INDEX}={index.value}, MASTER_ADDR in a pod ({pod.reason})", Specificity.SCHEDULER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the pod's index and the manifest's variables; several ranks in a pod are Fairlead's to start."""
        assert isinstance(config, MainAddressConfig)
        if (started_here := supervised(environ)) is not None:
            return started_here
        address = given_address(config.main_address, environ)
        if address is None:
            raise _missing("MASTER_ADDR", "by which name the first pod is reached", "<job>-0.<headless service>")
        world, nodes = integer(environ, "WORLD_SIZE", minimum=1), integer(environ, "NNODES", minimum=1)
        if world is None and nodes is None:
            raise _missing("WORLD_SIZE", "how many pods train together", "<pods x devices in each>")
        per_pod = local_world_size(environ, world, nodes)
        if per_pod is not None and world is not None and world.value % per_pod.value:
            raise ConfigError(
                f"WORLD_SIZE is {world.value}, which is not a multiple of {per_pod.reason}={per_pod.value}",
                where="environment variable WORLD_SIZE",
                why="all pods of a Job are alike, and so is the number of ranks in each",
                fix=f"set it to the Job's `completions` times {per_pod.value}",
            )
        if per_pod is not None and world is not None and nodes is None:
            nodes = Setting(world.value // per_pod.value, f"WORLD_SIZE / {per_pod.reason}")
        if per_pod is not None and nodes is not None and world is None:
            world = Setting(nodes.value * per_pod.value, f"NNODES x {per_pod.reason}")
        node_rank = required(environ, COMPLETION_INDEX, by="Kubernetes")
        single = per_pod is not None and per_pod.value == 1
        return check_ranks(
            Topology(
                launched=single,
                num_nodes=nodes,
                local_world_size=per_pod,
                world_size=world,
                node_rank=node_rank,
                local_rank=Setting(0, f"{per_pod.reason}=1") if per_pod is not None and single else None,
                global_rank=node_rank if single else None,
                main_address=address,
                main_port=given_port(config.main_port, environ) or Setting(DEFAULT_PORT, "no MASTER_PORT is set"),
            ),
            "an Indexed Job",
        )


kubernetes = Kubernetes()


def _missing(name: str, what: str, value: str) -> ConfigError:
    return ConfigError(
        f"{name} is not set",
        where=f"environment variable {name}",
        why=f"Kubernetes tells a pod its index, but not {what}",
        fix=f"write `{name}: {value}` into the `env` of the container; `fairlead submit` does it for you",
    )
