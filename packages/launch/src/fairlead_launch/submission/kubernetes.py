"""The submitter `kubernetes`: an Indexed Job, for clusters without an operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.interface import JobState, Request
from fairlead_launch.submission.kubectl import KubectlSubmitter, state_by
from fairlead_launch.submission.pods import (
    PORT,
    Member,
    PodSubmitterConfig,
    config_map,
    indexed_job,
    pod_template,
    time_limit,
)


class KubernetesSubmitterConfig(PodSubmitterConfig):
    """An Indexed Job of Kubernetes: a pod for each node, whose index is the rank of its node.

    `time` limits the job, all of its starts together; `extra` are further fields of the Job's `spec`.

    Example:
        >>> KubernetesSubmitterConfig(image="registry.example.com/sine:1", runs={"claim": "runs"}).name
        'kubernetes'
    """

    name: Literal["kubernetes"] = "kubernetes"


class Kubernetes(SubmitterPlugin):
    """Hands jobs to Kubernetes."""

    config = KubernetesSubmitterConfig
    runtime = "fairlead_launch.submission.kubernetes:build"
    example: ClassVar[Mapping[str, Any]] = {"image": "registry.example.com/sine:1", "runs": {"claim": "runs"}}


class KubernetesSubmitter(KubectlSubmitter):
    """Hands a job to Kubernetes as a ConfigMap, a headless Service and an Indexed Job."""

    config: KubernetesSubmitterConfig
    kinds = ("jobs.batch", "services", "configmaps")

    def objects(self, request: Request, member: Member) -> list[dict[str, Any]]:
        """The job file, the name under which the ranks meet, and the Job."""
        meet = {
            "MASTER_ADDR": f"{member.name}-0.{member.name}",
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_WORLD_SIZE": str(request.devices_per_node),
        }
        pod = pod_template(
            self.config,
            request,
            member,
            container="fairlead",
            variables=meet,
            restartPolicy="Never",
            subdomain=member.name,  # the service: a pod is reached as <job>-<index>.<service>
        )
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the ranks meet before any pod is ready
            "selector": {"batch.kubernetes.io/job-name": member.name},
            "ports": [{"name": "ranks", "port": PORT}],
        }
        job = indexed_job(self.config, request, member, pod)
        return [
            config_map(member),
            {"apiVersion": "v1", "kind": "Service", "metadata": member.metadata, "spec": service},
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": member.queued,
                "spec": {**time_limit(self.config), **self.config.extra, **job},
            },
        ]

    def read(self, status: Mapping[str, Any]) -> JobState:
        """https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/#JobStatus."""
        counts = {name: str(status[name]) for name in ("active", "ready", "succeeded", "failed") if status.get(name)}
        if (over := state_by(status, counts)) is not None:
            return over
        if status.get("ready"):
            return JobState("running", details=counts)
        return JobState("queued", "no pod is ready", counts)


build = KubernetesSubmitter.build
kubernetes = Kubernetes()
