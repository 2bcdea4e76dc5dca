"""Settings of the environment `kubeflow`."""

from __future__ import annotations

from typing import Literal

from fairlead import EnvironmentConfigBase

__all__ = ["KubeflowEnvironmentConfig"]


class KubeflowEnvironmentConfig(EnvironmentConfigBase):
    """Pods of a Kubeflow PyTorchJob or TrainJob.

    A pod is a node: Kubernetes starts one process in it. With one rank per pod that process is the
    rank; with several (`nprocPerNode`, or `devices` in the job) Fairlead starts them in the pod.
    Inside `torchrun` the environment is `torchelastic`.

    Example:
        >>> KubeflowEnvironmentConfig().name
        'kubeflow'
    """

    name: Literal["kubeflow"] = "kubeflow"
