"""The submitter `kubernetes`: an Indexed Job, for clusters without an operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fairlead.plugin_classes import SubmitterPlugin
from fairlead_launch.submission.pods import PodSubmitterConfig


class KubernetesSubmitterConfig(PodSubmitterConfig):
    """An Indexed Job of Kubernetes: a pod for each node, whose index is the rank of its node.

    `time` limits the whole job, all of its starts together; `extra` are further fields of the Job's `spec`.

    Example:
        >>> KubernetesSubmitterConfig(image="registry.example.com/sine:1", runs={"claim": "runs"}).name
        'kubernetes'
    """

    name: Literal["kubernetes"] = "kubernetes"


class Kubernetes(SubmitterPlugin):
    """Hands jobs to Kubernetes."""

    config = KubernetesSubmitterConfig
    runtime = "fairlead_launch.submission.kubernetes_runtime:build"
    example: ClassVar[Mapping[str, Any]] = {"image": "registry.example.com/sine:1", "runs": {"claim": "runs"}}


kubernetes = Kubernetes()
