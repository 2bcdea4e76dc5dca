"""What the submitters `kubernetes` and `kubeflow` have in common: the settings of a pod, and what is made of them.

The objects are data: the ConfigMap with the job file, the template of the pods, the spec of an Indexed Job.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

from pydantic import AfterValidator, Field, field_validator, model_validator

from fairlead import yaml
from fairlead.config_bases import ConfigModel, SubmitterConfigBase
from fairlead.errors import ConfigError
from fairlead_launch.submission.interface import Request
from fairlead_runs.exit_codes import ExitCode

PORT: Final = 29500
"""Where the ranks meet, on the first pod."""
FINAL_CODE: Final = 3
"""The exit code of a stop after which no other start is wanted. Not 143: a pod that is ended before it hears signals
ends with that, too."""
_JOB: Final = "/etc/fairlead"
"""Where the job file is in the containers."""
_LONGEST: Final = 40
"""Letters of a name: Kubernetes and Kubeflow add to it, up to 63 in all."""
_WRITTEN: Final = (
    *("containers", "volumes", "restartPolicy", "subdomain", "terminationGracePeriodSeconds", "name", "image"),
    *("command", "workingDir", "env", "envFrom", "resources", "volumeMounts"),
)
"""The fields of a pod and of its container that have their own setting, or that no setting may change."""


def _absolute(path: str) -> str:
    if not re.fullmatch(r"/[^:\s]*", path) or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path in a container; write an absolute path, as /runs")
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
    """A volume of the pods, from exactly one of `claim`, `host_path`, `source`."""

    path: Place
    """Where the pods see it."""
    claim: str | None = None
    """A PersistentVolumeClaim."""
    host_path: Place | None = None
    """A folder of the machines, such as one that all of them mount."""
    source: dict[str, Any] | None = None
    """Any other source, as Kubernetes writes it: `{secret: {secretName: keys}}`, `{emptyDir: {}}`."""
    sub_path: str | None = None
    """A folder on the volume to use instead of its root."""
    read_only: bool = False
    """Whether the pods may only read."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(one is not None for one in (self.claim, self.host_path, self.source)) != 1:
            raise ValueError(f"the volume at {self.path} needs exactly one of claim, host_path, source")
        return self

    def as_kubernetes(self) -> dict[str, Any]:
        """What it is, as an item of a pod's `volumes` without its name."""
        if self.claim is not None:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        return {"hostPath": {"path": self.host_path}} if self.host_path is not None else dict(self.source or {})


class PodSubmitterConfig(SubmitterConfigBase):
    """A job whose nodes are pods."""

    image: str = Field(min_length=1)
    """The container image, with Fairlead and the job's code in it."""
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
    the submission under the same path. Default false: the code is that of the image."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls its devices, such as `amd.com/gpu`; each pod asks for `devices_per_node` of them."""
    resources: dict[str, str | int] = Field(default_factory=dict)
    """What else each pod asks for: `{vpc.amazonaws.com/efa: 4, ephemeral-storage: 100Gi}`."""
    shared_memory: str | None = None
    """The most memory for `/dev/shm`, such as `16Gi`: loaders' workers and NCCL need more than the 64 MiB that a
    container gets. Default null: as much as the pod may use."""
    secrets: list[str] = Field(default_factory=list)
    """Secrets whose keys become environment variables of the ranks, such as one with WANDB_API_KEY."""
    queue: str | None = None
    """Kueue's queue, in this namespace, which decides when the job starts."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of all that is made."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods: `{sidecar.istio.io/inject: "false"}`."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the pods' `spec`, as Kubernetes calls them: `{nodeSelector: {gpu: h100},
    priorityClassName: high, tolerations: [{key: gpu, operator: Exists}], imagePullSecrets: [{name: registry}]}`."""
    container: dict[str, Any] = Field(default_factory=dict)
    """Further fields of their container, likewise: `{imagePullPolicy: Always}`."""
    max_failures: int = Field(default=3, ge=0)
    """How often the job is restarted after a failure. Stops that request a restart, evictions and preemptions do not
    count; `trainer.requeue.max_requeues` limits those."""
    grace: int | None = Field(default=None, ge=30)
    """Seconds from the signal that ends a pod to its kill: a step and a save have to fit into them. Default null:
    three times the longest save in the run's history and a minute, but not less than 120."""

    @field_validator("pod", "container")
    @classmethod
    def _not_ours(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(fields.keys() & set(_WRITTEN)):
            raise ValueError(
                f"{', '.join(ours)} cannot be set here: there are settings of `submit` for what may differ"
            )
        return fields

    @field_validator("template")
    @classmethod
    def _no_template(cls, template: str | None) -> str | None:
        if template is not None:
            raise ValueError(
                "manifests are not made from a template: set `pod` and `extra`, or change what `--dry-run` prints and "
                "hand it to kubectl yourself"
            )
        return template


@dataclass(frozen=True)
class Member:
    """One run of a submission: its objects' name, and its job as the pods are to read it."""

    name: str
    job: Mapping[str, Any]
    labels: Mapping[str, str]
    queue: str | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """Of every object of it."""
        return {"name": self.name, "labels": dict(self.labels)}

    @property
    def queued(self) -> dict[str, Any]:
        """Of the job itself, which is what Kueue holds back until there is room for all of its pods."""
        queue = {} if self.queue is None else {"kueue.x-k8s.io/queue-name": self.queue}
        return {"name": self.name, "labels": {**self.labels, **queue}}

    @property
    def exit_codes(self) -> tuple[int, int]:
        """The codes that ask for another start, and that want none."""
        requeue = self.job["trainer"]["requeue"]
        if requeue["name"] == "exit_code":
            return requeue["code"], requeue["final_code"]
        return int(ExitCode.AGAIN), FINAL_CODE


def selector(job: str) -> str:
    """The label of all that was made for a submission, or for one member of a sweep."""
    return f"fairlead.job/{job}"


def object_name(request: Request) -> str:
    """The name of a submission's objects: the run's, as Kubernetes takes it, and the submission's number."""
    number = re.sub(r"[^a-z0-9]", "", request.folder.name.lower()) or "1"
    name = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".strip("-")
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{name}-{number}"


def members(config: PodSubmitterConfig, request: Request) -> list[Member]:
    """The runs of a submission."""
    if request.max_parallel is not None:
        raise ConfigError(
            "Kubernetes has no limit for the members of a sweep that run at once",
            where="max_parallel",
            fix="leave it out; Kueue's queues have quotas: `submit.queue`",
        )
    name = object_name(request)
    found = []
    common = {**config.labels, "app.kubernetes.io/managed-by": "fairlead", "app.kubernetes.io/instance": name}
    common[selector(name)] = ""
    for index, text, run in zip(request.indices or [0], request.job_texts, request.runs, strict=True):
        own = f"{name}-{index}" if request.indices else name
        job = _job_in_pods(config, request, text, run)
        found.append(Member(own, job, {**common, selector(own): ""}, config.queue))
    return found


def config_map(member: Member) -> dict[str, Any]:
    """The job file's way into the pods."""
    data = {"job.yaml": yaml.dump(member.job)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": member.metadata, "data": data}


def indexed_job(config: PodSubmitterConfig, request: Request, member: Member, pod: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a Job with a pod for each node, in which only failures count.

    Where one pod fails, all do: their ranks miss its ranks. A pod that is made anew waits for the old one to be gone.
    """
    requeue_code, final = member.exit_codes
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted({int(ExitCode.WRONG), final})}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [requeue_code]}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": config.max_failures * request.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }


def pod_template(
    config: PodSubmitterConfig,
    request: Request,
    member: Member,
    *,
    container: str,
    variables: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """The pods of a member: one container that runs `fairlead fit`; `spec` are further fields of the pod."""
    command = ["fairlead", "fit", f"{_JOB}/job.yaml"]
    if config.setup:
        command = ["bash", "-ec", "\n".join([*config.setup, f"exec {' '.join(command)}"])]
    env = {**request.variables, **(variables or {})}
    mounts, volumes = _volumes(config, member)
    requested = _resources(config, request)
    working_dir = config.working_dir or (str(request.cwd) if _seen(config, request.cwd) else None)
    runs = _set(
        name=container,
        image=config.image,
        command=command,
        workingDir=working_dir,
        env=[{"name": name, "value": str(value)} for name, value in env.items()],
        envFrom=[{"secretRef": {"name": name}} for name in config.secrets],
        resources=_set(limits=requested, requests=requested),
        volumeMounts=mounts,
        **config.container,
    )
    return {
        "metadata": _set(labels=dict(member.labels), annotations=config.annotations),
        "spec": _set(
            **config.pod,
            **spec,
            terminationGracePeriodSeconds=config.grace or max(request.warn_s, 30),  # 30: Kubernetes' own default
            containers=[runs],
            volumes=volumes,
        ),
    }


def time_limit(config: PodSubmitterConfig) -> dict[str, int]:
    """The field for the time limit of all starts together, which both kinds of jobs call alike."""
    return {} if config.time is None else {"activeDeadlineSeconds": int(config.time.total_seconds())}


def _job_in_pods(config: PodSubmitterConfig, request: Request, text: str, run: Path) -> dict[str, Any]:
    """The job with the paths that the pods know, the pod's devices, and exit codes that the manifest reads alike."""
    job = cast("dict[str, Any]", yaml.load(text, source=str(request.folder / "job.yaml")).data)
    job.pop("submit", None)  # the image need not know the submitter
    section = job.setdefault("run", {})
    section["name"] = run.name  # a member's own: pods are no array, whose tasks find their names themselves
    section["dir"] = config.runs.path if config.runs is not None else _run_folder(config, run)
    folders = section.pop("code", None) or []
    folders = [folders] if isinstance(folders, str) else folders
    if config.code is not None:
        section["code"] = config.code
    elif folders and all(_seen(config, Path(folder)) for folder in folders):
        section["code"] = folders
    elif config.snapshot is not False:
        raise ConfigError(
            "the pods do not see the copy of the code",
            where="submit.snapshot",
            why=f"it is in {request.folder}, which no volume of `submit.volumes` holds under the same path",
            fix="leave `snapshot` out, and have the code in the image; or mount that folder as a volume",
        )
    trainer = job.setdefault("trainer", {})
    if trainer.get("devices", "auto") == "auto":
        trainer["devices"] = request.devices_per_node
    requeue = trainer.get("requeue") or "auto"
    requested: dict[str, Any] = {"name": requeue} if isinstance(requeue, str) else dict(requeue)
    if requested["name"] in ("auto", "exit_code"):
        settings_given = {name: value for name, value in requested.items() if value is not None}
        requested = {"code": int(ExitCode.AGAIN), "final_code": FINAL_CODE, **settings_given, "name": "exit_code"}
    trainer["requeue"] = requested
    return job


def _run_folder(config: PodSubmitterConfig, run: Path) -> str:
    if not _seen(config, run):
        raise ConfigError(
            f"no volume of the pods holds {run}: what they save would be gone with them",
            where="submit.runs",
            fix="name the claim of a volume for the run directories, `runs: {claim: NAME}`; "
            "or mount that folder as one of `submit.volumes`",
        )
    return str(run.parent)


def _seen(config: PodSubmitterConfig, folder: Path) -> bool:
    """Whether a volume that outlives the pods holds this folder under the same path."""
    lasting = (volume for volume in config.volumes if volume.claim is not None or volume.host_path is not None)
    return any(folder.is_relative_to(volume.path) for volume in lasting)


def _resources(config: PodSubmitterConfig, request: Request) -> dict[str, str]:
    requested: dict[str, str | int] = {config.gpu_resource: request.devices_per_node} if request.gpus else {}
    if request.cpus_per_device is not None:
        requested["cpu"] = request.cpus_per_device * request.devices_per_node
    if request.host_memory_gib is not None:
        requested["memory"] = f"{int(request.host_memory_gib * 1024)}Mi"
    return {name: str(amount) for name, amount in {**requested, **config.resources}.items()}


def _volumes(config: PodSubmitterConfig, member: Member) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Where the container sees its volumes, and what they are."""
    job = VolumeConfig(path=_JOB, source={"configMap": {"name": member.name}}, read_only=True)
    given = [job, *config.volumes]
    if config.runs is not None:
        given.append(VolumeConfig(path=config.runs.path, claim=config.runs.claim, sub_path=config.runs.sub_path))
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": _set(medium="Memory", sizeLimit=config.shared_memory)}
    ]
    for index, volume in enumerate(given):
        name = "job" if volume is job else f"volume-{index}"
        mounts.append(
            _set(name=name, mountPath=volume.path, subPath=volume.sub_path, readOnly=volume.read_only or None)
        )
        volumes.append({"name": name, **volume.as_kubernetes()})
    return mounts, volumes


def _set(**fields: Any) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}
