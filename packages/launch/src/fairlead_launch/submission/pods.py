"""What the submitters `kubernetes` and `kubeflow` have in common: the settings of a pod."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from fairlead.config_bases import ConfigModel, SubmitterConfigBase

_WRITTEN: Final = (
    *("containers", "volumes", "restartPolicy", "subdomain", "nodeSelector", "tolerations", "serviceAccountName"),
    *("priorityClassName", "imagePullSecrets", "terminationGracePeriodSeconds"),
)
"""The fields of a pod that have a setting of their own, or that no setting may change."""


def _absolute(path: str) -> str:
    if not re.fullmatch(r"/[^:\s]*", path) or ".." in path.split("/"):
        raise ValueError(f"{path!r} is no place in a container; write an absolute path, as /runs")
    return path.rstrip("/") or "/"


Place = Annotated[str, AfterValidator(_absolute)]
"""A folder in the containers, absolute."""


class RunVolumeConfig(ConfigModel):
    """The volume that holds the run directories; the pods share it."""

    claim: str = Field(min_length=1)
    """The PersistentVolumeClaim; its access mode has to be ReadWriteMany where there are several pods."""
    path: Place = "/runs"
    """Where the pods see it: there `run.dir` is, whatever it is on the machine that submits."""
    sub_path: str | None = None
    """A folder on the volume to use instead of its root."""


class VolumeConfig(ConfigModel):
    """A volume of the pods, from exactly one of `claim`, `host_path`, `config_map`, `secret`, `empty_dir`."""

    path: Place
    """Where the pods see it."""
    claim: str | None = None
    """A PersistentVolumeClaim."""
    host_path: Place | None = None
    """A folder of the machines, such as one that all of them mount."""
    config_map: str | None = None
    """A ConfigMap, whose keys are files."""
    secret: str | None = None
    """A Secret, whose keys are files."""
    empty_dir: Literal["disk", "memory"] | None = None
    """A folder that is gone with the pod, on the machine's disk or in its memory."""
    sub_path: str | None = None
    """A folder on the volume to use instead of its root."""
    read_only: bool = False
    """Whether the pods may only read."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = ("claim", "host_path", "config_map", "secret", "empty_dir")
        if sum(getattr(self, name) is not None for name in sources) != 1:
            raise ValueError(f"the volume at {self.path} needs exactly one of {', '.join(sources)}")
        return self


class TolerationConfig(ConfigModel):
    """A taint of machines that the pods accept, as `{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}`."""

    key: str | None = None
    """The taint's key. Default null: any, with `operator: Exists`."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal` compares the value too."""
    value: str | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect that is accepted. Default null: every one."""
    seconds: int | None = Field(default=None, ge=0)
    """How long a `NoExecute` is accepted. Default null: for ever."""


class PodSubmitterConfig(SubmitterConfigBase):
    """A job whose nodes are pods."""

    image: str = Field(min_length=1)
    """The container image, with Fairlead and the job's code in it."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a machine fetches the image. Default null: Kubernetes' own rule."""
    pull_secrets: list[str] = Field(default_factory=list)
    """Secrets that the registry asks for."""
    context: str | None = None
    """The context of kubectl, and with it the cluster. Default null: the current one."""
    namespace: str | None = None
    """The namespace. Default null: that of the context."""
    runs: RunVolumeConfig | None = None
    """The volume of the run directories: `{claim: runs}`. Default null: one of `volumes` holds `run.dir` as it is."""
    volumes: list[VolumeConfig] = Field(default_factory=list)
    """Further volumes: `[{path: /data, claim: data, read_only: true}]`."""
    code: Place | None = None
    """The folder of the job's code in the containers. Default null: their working directory."""
    working_dir: Place | None = None
    """The working directory of the containers. Default null: that of the image, or the present one where a volume
    holds it."""
    snapshot: bool | list[str] = False
    """Whether a copy of the code as it is now runs, as `submit` does elsewhere; only where the pods see the folder of
    the submission at the same place. Default false: the code is that of the image."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls its devices, such as `amd.com/gpu`; each pod asks for `devices_per_node` of them."""
    resources: dict[str, str | int] = Field(default_factory=dict)
    """What else each pod asks for: `{vpc.amazonaws.com/efa: 4, ephemeral-storage: 100Gi}`."""
    shared_memory: str | None = None
    """The most memory for `/dev/shm`, such as `16Gi`: loaders' workers and NCCL need more than the 64 MiB that a
    container gets. Default null: as much as the pod may use."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the machines must have: `{cloud.google.com/gke-accelerator: nvidia-h100-80gb}`."""
    tolerations: list[TolerationConfig] = Field(default_factory=list)
    """Taints of machines that the pods accept."""
    service_account: str | None = None
    """The pods' service account."""
    secrets: list[str] = Field(default_factory=list)
    """Secrets whose keys become environment variables of the ranks, such as one with WANDB_API_KEY."""
    priority_class: str | None = None
    """The pods' priority class."""
    queue: str | None = None
    """Kueue's queue, in this namespace, which decides when the job starts."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of all that is made."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods: `{sidecar.istio.io/inject: "false"}`."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the pods' `spec`, as Kubernetes calls them: `{hostNetwork: true}`."""
    max_failures: int = Field(default=3, ge=0)
    """How often the job is restarted after a failure. Stops that request a restart, evictions and preemptions do not
    count; `trainer.requeue.max_requeues` limits those."""
    grace: int | None = Field(default=None, ge=30)
    """Seconds from the signal that ends a pod to its kill: a step and a save have to fit into them. Default null:
    three times the longest save in the run's history and a minute, but not less than 120."""

    @field_validator("pod")
    @classmethod
    def _not_ours(cls, pod: dict[str, Any]) -> dict[str, Any]:
        ours = sorted(pod.keys() & set(_WRITTEN))
        if ours:
            raise ValueError(
                f"{', '.join(ours)} cannot be set here: there are settings of `submit` for what may differ"
            )
        return pod

    @field_validator("template")
    @classmethod
    def _no_template(cls, template: str | None) -> str | None:
        if template is not None:
            raise ValueError(
                "manifests are not made from a template: set `pod` and `extra`, or change what `--dry-run` prints and "
                "hand it to kubectl yourself"
            )
        return template


def grace_seconds(config: PodSubmitterConfig, measured_s: int) -> int:
    """Seconds between the signal that ends a pod and its kill; never less than Kubernetes' own default, 30."""
    return config.grace if config.grace is not None else max(measured_s, 30)
