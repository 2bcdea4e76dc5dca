"""The objects that `kubernetes` and `kubeflow` make for a job, as data: its ConfigMap, its pods, an Indexed Job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from fairlead import yaml
from fairlead.errors import ConfigError
from fairlead_launch.submission.interface import Request
from fairlead_launch.submission.pods import PodSubmitterConfig, VolumeConfig, grace_seconds
from fairlead_runs.exit_codes import ExitCode

PORT: Final = 29500
"""Where the ranks meet, on the first pod."""
_JOB: Final = "/etc/fairlead"
"""Where the job file is in the containers."""
FINAL_CODE: Final = 3
"""The exit code of a stop after which no other start is wanted. Not 143: a pod that is ended before it hears signals
ends with that, too."""
_LONGEST: Final = 40
"""Letters of a name: Kubernetes and Kubeflow add to it, up to 63 in all."""


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
        own = f"{name}-{index}" if request.sweep else name
        job = _job_in_pods(config, request, text, run)
        found.append(Member(own, job, {**common, selector(own): ""}, config.queue))
    return found


def config_map(member: Member) -> dict[str, Any]:
    """The job file's way into the pods."""
    data = {"job.yaml": yaml.dump(member.job)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": member.metadata, "data": data}


def text_of(objects: Iterable[Mapping[str, Any]]) -> str:
    """Objects as kubectl takes them."""
    return "---\n".join(yaml.dump(one) for one in objects)


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
    tolerations = [
        _set(key=one.key, operator=one.operator, value=one.value, effect=one.effect, tolerationSeconds=one.seconds)
        for one in config.tolerations
    ]
    runs = _set(
        name=container,
        image=config.image,
        imagePullPolicy=config.pull_policy,
        command=command,
        workingDir=working_dir,
        env=[{"name": name, "value": str(value)} for name, value in env.items()],
        envFrom=[{"secretRef": {"name": name}} for name in config.secrets],
        resources=_set(limits=requested, requests=requested),
        volumeMounts=mounts,
    )
    return {
        "metadata": _set(labels=dict(member.labels), annotations=config.annotations),
        "spec": _set(
            **config.pod,
            **spec,
            terminationGracePeriodSeconds=grace_seconds(config, request.warn_s),
            serviceAccountName=config.service_account,
            priorityClassName=config.priority_class,
            nodeSelector=config.node_selector,
            tolerations=tolerations,
            imagePullSecrets=[{"name": name} for name in config.pull_secrets],
            containers=[runs],
            volumes=volumes,
        ),
    }


def time_limit(config: PodSubmitterConfig) -> dict[str, int]:
    """The field for the time limit of all starts together, which both kinds of jobs call alike."""
    return {} if config.time is None else {"activeDeadlineSeconds": int(config.time.total_seconds())}


def _job_in_pods(config: PodSubmitterConfig, request: Request, text: str, run: Path) -> dict[str, Any]:
    """The job with the places that the pods know, the pod's devices, and exit codes that the manifest reads alike."""
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
            why=f"it is in {request.folder}, which no volume of `submit.volumes` holds at the same place",
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
    """Whether a volume that outlives the pods holds this folder at the same place."""
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
    job = VolumeConfig(path=_JOB, config_map=member.name, read_only=True)
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
        volumes.append({"name": name, **_source(volume)})
    return mounts, volumes


def _source(volume: VolumeConfig) -> dict[str, Any]:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    return {"emptyDir": {"medium": "Memory"} if volume.empty_dir == "memory" else {}}


def _set(**fields: Any) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}
