"""Submits a TrainJob with a TrainingRuntime of its own, or a PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_launch.submission.interface import JobState, Request
from fairlead_launch.submission.kubectl import KubectlSubmitter, conditions, said_by
from fairlead_launch.submission.kubeflow import KubeflowSubmitterConfig
from fairlead_launch.submission.manifests import Member, config_map, indexed_job, pod_template, time_limit


class TrainJobSubmitter(KubectlSubmitter):
    """Hands a job to Kubeflow Trainer (v2) as a ConfigMap, a TrainingRuntime and a TrainJob.

    The runtime says how pods are made, the TrainJob how many there are; the trainer makes a JobSet of both, with an
    Indexed Job for the nodes (https://www.kubeflow.org/docs/components/trainer/operator-guides/runtime/).
    """

    config: KubeflowSubmitterConfig
    kinds = ("trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org", "configmaps")

    def objects(self, request: Request, member: Member) -> list[dict[str, Any]]:
        """The job file, the runtime, and the TrainJob."""
        # The trainer looks for the container and the replicated job `node`, and for the label of the job's template.
        pod = pod_template(self.config, request, member, container="node", restartPolicy="Never")
        node = {
            "name": "node",
            "template": {
                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                "spec": indexed_job(self.config, request, member, pod),
            },
        }
        runtime = {
            "apiVersion": _TRAINER,
            "kind": "TrainingRuntime",
            "metadata": {
                **member.metadata,
                "labels": {**member.labels, "trainer.kubeflow.org/framework": "torch"},
            },
            "spec": {
                "mlPolicy": {"numNodes": request.nodes, "torch": {}},
                "template": {"spec": {"replicatedJobs": [node]}},
            },
        }
        job = {
            **time_limit(self.config),
            **self.config.extra,
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": member.name},
            "trainer": {"numNodes": request.nodes, "numProcPerNode": request.devices_per_node},
        }
        train_job = {"apiVersion": _TRAINER, "kind": "TrainJob", "metadata": member.queued, "spec": job}
        return [config_map(member), runtime, train_job]

    def read(self, status: Mapping[str, Any]) -> JobState:
        """From conditions, the jobs of the JobSet, and what the ranks have told of their progress."""
        told = status.get("trainerStatus") or {}
        details = {name: str(value) for name, value in told.items() if name != "metrics"}
        details |= {f"metrics.{one['name']}": str(one["value"]) for one in told.get("metrics") or []}
        if (over := said_by(status, details)) is not None:
            return over
        if any(job.get("ready") for job in status.get("jobsStatus") or []):
            return JobState("running", details=details)
        return JobState("queued", "not all pods are ready", details)


class PyTorchJobSubmitter(KubectlSubmitter):
    """Hands a job to Kubeflow's training operator (v1) as a ConfigMap and a PyTorchJob.

    `restartPolicy: ExitCode` starts a pod again that ended with 128 or more
    (https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/job-scheduling/).
    """

    config: KubeflowSubmitterConfig
    kinds = ("pytorchjobs.kubeflow.org", "configmaps")

    @property
    def exit_code(self) -> int:
        """One that the operator starts again."""
        return 200

    def objects(self, request: Request, member: Member) -> list[dict[str, Any]]:
        """The job file, and the PyTorchJob, whose first node is the master."""
        pod = pod_template(self.config, request, member, container="pytorch")  # the operator looks for that name
        replicas = {"Master": 1, "Worker": request.nodes - 1}
        specs = {
            name: {"replicas": count, "restartPolicy": "ExitCode", "template": pod}
            for name, count in replicas.items()
            if count
        }
        spec = {
            "runPolicy": {"cleanPodPolicy": "None", **time_limit(self.config), **self.config.extra},
            "nprocPerNode": str(request.devices_per_node),
            "pytorchReplicaSpecs": specs,
        }
        return [
            config_map(member),
            {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": member.queued, "spec": spec},
        ]

    def read(self, status: Mapping[str, Any]) -> JobState:
        """The last of the operator's conditions that holds."""
        replicas = status.get("replicaStatuses") or {}
        details = {f"{name}.{what}": str(n) for name, counts in replicas.items() for what, n in counts.items()}
        if (over := said_by(status, details, "Succeeded")) is not None:
            return over
        return JobState("running" if "Running" in conditions(status) else "queued", "", details)


_TRAINER = "trainer.kubeflow.org/v1alpha1"


def build(config: KubeflowSubmitterConfig, context: BuildContext) -> KubectlSubmitter:
    """The submitter of the kind that the job names."""
    kind = TrainJobSubmitter if config.kind == "TrainJob" else PyTorchJobSubmitter
    return kind(config, context.environ)
