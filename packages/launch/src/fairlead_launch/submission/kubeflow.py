"""The submitter `kubeflow`: a TrainJob of Kubeflow Trainer (v2), with a TrainingRuntime of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.interface import JobState, Request
from fairlead_launch.submission.kubectl import KubectlSubmitter, state_by
from fairlead_launch.submission.pods import (
    Member,
    PodSubmitterConfig,
    config_map,
    indexed_job,
    pod_template,
    time_limit,
)


class KubeflowSubmitterConfig(PodSubmitterConfig):
    """A TrainJob of Kubeflow Trainer (v2), with a TrainingRuntime of its own.

    `time` limits the job, all of its starts together; `extra` are further fields of the TrainJob's `spec`.

    Example:
        >>> KubeflowSubmitterConfig(image="registry.example.com/sine:1", runs={"claim": "runs"}).name
        'kubeflow'
    """

    name: Literal["kubeflow"] = "kubeflow"


class Kubeflow(SubmitterPlugin):
    """Hands jobs to Kubeflow."""

    config = KubeflowSubmitterConfig
    runtime = "fairlead_launch.submission.kubeflow:build"
    example: ClassVar[Mapping[str, Any]] = {"image": "registry.example.com/sine:1", "runs": {"claim": "runs"}}
    extra = "kubeflow"


_TRAINER: Final = "trainer.kubeflow.org/v1alpha1"


class KubeflowSubmitter(KubectlSubmitter):
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
        """From the conditions and the jobs of the JobSet."""
        if (over := state_by(status, {})) is not None:
            return over
        if any(job.get("ready") for job in status.get("jobsStatus") or []):
            return JobState("running")
        return JobState("queued", "not all pods are ready")


build = KubeflowSubmitter.build
kubeflow = Kubeflow()
