"""The submitter `kubeflow`: a TrainJob of Kubeflow Trainer (v2), or a PyTorchJob of its training operator (v1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.pods import PodSubmitterConfig


class KubeflowSubmitterConfig(PodSubmitterConfig):
    """A TrainJob or PyTorchJob of Kubeflow.

    `time` limits the whole job, all of its starts together; `extra` are further fields of a TrainJob's `spec`, or of a
    PyTorchJob's `runPolicy`.

    Example:
        >>> KubeflowSubmitterConfig(image="registry.example.com/sine:1", kind="PyTorchJob").name
        'kubeflow'
    """

    name: Literal["kubeflow"] = "kubeflow"
    kind: Literal["TrainJob", "PyTorchJob"] = "TrainJob"
    """`TrainJob` for Kubeflow Trainer (v2), with a TrainingRuntime of its own; `PyTorchJob` for the training operator
    (v1). The latter restarts only exit codes of 128 or more, without limit; it has no `max_failures`."""


class Kubeflow(SubmitterPlugin):
    """Hands jobs to Kubeflow."""

    config = KubeflowSubmitterConfig
    runtime = "fairlead_launch.submission.kubeflow_runtime:build"
    example: ClassVar[Mapping[str, Any]] = {"image": "registry.example.com/sine:1", "runs": {"claim": "runs"}}
    extra = "kubeflow"


kubeflow = Kubeflow()
