"""What `fairlead submit` hands to Kubernetes and Kubeflow: valid by their published models, and right for its pods.

No cluster can be had here. The models are those of the projects' own packages on PyPI, which are generated from their
API definitions; what the pods' controllers add to the variables is a fake, written after their sources.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubeflow_trainer_api.models as trainer_models
import kubernetes.client
import pytest
import yaml

from fairlead import PluginManager
from fairlead.checks import check_trainer
from fairlead.config import JobConfig
from fairlead_launch.ports import free_port
from fairlead_launch.submission.plan import make_plan
from integration_tests.jobs import JOB, changed, names, repository, start

KINDS = {
    "Job": {"to": "kubernetes"},
    "TrainJob": {"to": "kubeflow"},
}
PLAIN: dict[str, Any] = {"image": "registry.example.com/small:1", "runs": {"claim": "runs"}}
EVERYTHING: dict[str, Any] = {
    **PLAIN,
    "time": "24:00:00",
    "setup": ["source /opt/env.sh"],
    "env": {"NCCL_DEBUG": "INFO", "LEVEL": 2},
    "network": "efa",
    "namespace": "research",
    "volumes": [
        {"path": "/data", "claim": "data", "sub_path": "small", "read_only": True},
        {"path": "/nfs", "host_path": "/mnt/nfs"},
        {"path": "/keys", "source": {"secret": {"secretName": "keys"}}},
    ],
    "code": "/app",
    "working_dir": "/app",
    "gpu_resource": "amd.com/gpu",
    "resources": {"rdma/ib": 1, "ephemeral-storage": "100Gi"},
    "shared_memory": "16Gi",
    "secrets": ["wandb"],
    "queue": "gpus",
    "labels": {"team": "vision"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "pod": {
        "hostNetwork": True,
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
    "container": {"imagePullPolicy": "Always"},
    "max_failures": 5,
    "grace": 300,
}


def manifests(kind: str, settings: Mapping[str, Any], folder: Path, **resources: Any) -> dict[str, Any]:
    """What `fairlead submit --dry-run` prints, by kind."""
    hardware = {"nodes": 2, "devices_per_node": 4, "device": "h100", **resources}
    trainer = {"accelerator": "cpu" if hardware["device"] == "cpu" else "cuda", "devices": "auto"}
    job = changed(JOB, trainer=trainer, resources=hardware, submit={**KINDS[kind], **settings})
    made = make_plan(
        str(repository(folder, job=job)),
        to=None,
        overrides=(),
        sweep=(),
        max_parallel=None,
        environ={"PATH": os.environ["PATH"]},
        plugins=PluginManager(),
        cwd=folder,
    )
    [text] = made.files.values()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def as_the_model_has_it(made: dict[str, Any]) -> Any:
    """What the published model of its kind makes of an object: what it does not know is missing or raises."""
    kind = made["kind"]
    if made["apiVersion"].startswith("trainer.kubeflow.org"):
        return getattr(trainer_models, f"TrainerV1alpha1{kind}").from_dict(made).to_dict()
    api: Any = kubernetes.client.ApiClient()
    read = api.deserialize(SimpleNamespace(data=json.dumps(made)), f"V1{kind}")
    return api.sanitize_for_serialization(read)


@pytest.mark.parametrize("settings", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_what_the_published_models_say(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """No field that they do not have, none of another type, none that has to be there and is not."""
    made = manifests(kind, settings, tmp_path, host_memory_gib=64.0, cpus_per_device=8)
    assert kind in made
    for one in made.values():
        assert as_the_model_has_it(one) == one
    [pod] = pods(made)
    rules_of_kubernetes(made, pod)
    if settings is EVERYTHING:
        asked = pod["containers"][0]["resources"]["limits"]
        own = {"rdma/ib": "1", "ephemeral-storage": "100Gi"}
        assert asked == {"amd.com/gpu": "4", "cpu": "32", "memory": "65536Mi", **own}
        assert pod["terminationGracePeriodSeconds"] == 300
        assert pod["hostNetwork"] is True
        assert pod["containers"][0]["command"][:2] == ["bash", "-ec"]
        environ = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert {"NCCL_DEBUG": "INFO", "LEVEL": "2", "FI_PROVIDER": "efa"}.items() <= environ.items()


def test_a_model_would_not_take_what_is_wrong(tmp_path: Path) -> None:
    """The check above can fail: a field's name, its type, one that is missing."""
    job = manifests("Job", PLAIN, tmp_path)["Job"]
    wrongs: list[dict[str, Any]] = [{"completion": 2}, {"completions": "two"}, {"template": {"spec": {}}}]
    for wrong in wrongs:
        broken = {**job, "spec": {**job["spec"], **wrong}}
        try:
            read = as_the_model_has_it(broken)
        except ValueError:
            continue
        assert read != broken


def pods(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `spec` of each kind of pod that there is."""
    found: list[dict[str, Any]] = []

    def look(tree: Any) -> None:
        if isinstance(tree, dict):
            if "containers" in tree:
                found.append(tree)
            for one in tree.values():
                look(one)
        elif isinstance(tree, list):
            for one in tree:
                look(one)

    look(list(made.values()))
    return found


def rules_of_kubernetes(made: Mapping[str, Any], pod: Mapping[str, Any]) -> None:
    """What the API server checks and the models do not have.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy, and
    `pkg/apis/batch/validation/validation.go`.
    """
    names = {one["metadata"]["name"] for one in made.values()}
    assert len(names) == 1
    assert len(names.pop()) < 50  # a pod's has up to 63
    volumes = [one["name"] for one in pod["volumes"]]
    assert sorted(volumes) == sorted({mount["name"] for mount in pod["containers"][0]["volumeMounts"]})
    paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert len(set(paths)) == len(paths)
    assert made["ConfigMap"]["metadata"]["name"] in [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    spec = made["Job"]["spec"] if "Job" in made else node_of(made)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"
    for rule in spec["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values


def node_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of the Job that a TrainJob's JobSet makes for its nodes."""
    [node] = made["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec: dict[str, Any] = node["template"]["spec"]
    return spec


def in_pod(made: Mapping[str, Any], index: int) -> dict[str, str]:
    """The variables of a pod: those of the manifest, and fakes of what each controller adds.

    An Indexed Job and a TrainJob (https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch):
    JOB_COMPLETION_INDEX; a TrainJob PET_*.
    """
    container = pods(made)[0]["containers"][0]
    environ = {one["name"]: one["value"] for one in container.get("env", [])}
    environ |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
    if "TrainJob" in made:
        asked = made["TrainJob"]["spec"]["trainer"]
        environ |= {"PET_NNODES": str(asked["numNodes"]), "PET_NPROC_PER_NODE": str(asked["numProcPerNode"])}
        environ |= {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "small-1-node-0-0.small-1"}
        environ |= {"PET_MASTER_PORT": "29500"}
    return environ


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_pod_has_its_rank_and_the_world_fits_the_devices(kind: str, device: str, tmp_path: Path) -> None:
    """Three pods of four devices: three node ranks, twelve ranks, one meeting point, as many devices as ranks."""
    made = manifests(kind, PLAIN, tmp_path, nodes=3, device=device)
    plugins = PluginManager()
    job = JobConfig.model_validate(yaml.safe_load(made["ConfigMap"]["data"]["job.yaml"]), context={"plugins": plugins})
    assert (job.run.dir, job.run.name, job.submit) == ("/runs", "small", None)
    cpu = job.trainer.model_copy(update={"accelerator": "cpu"})  # this machine has no GPUs; the ranks are the same
    cpu = type(job.trainer).model_validate(cpu.model_dump(mode="json"), context={"plugins": plugins})
    found = [check_trainer(cpu, environ=in_pod(made, index), plugins=plugins) for index in range(3)]
    assert [[one for one in findings if one.severity == "error"] for _, findings in found] == [[]] * 3
    resolutions = [resolution for resolution, _ in found]
    assert {one.value("environment") for one in resolutions} == {"kubernetes" if kind == "Job" else "kubeflow"}
    assert [one.value("node_rank") for one in resolutions] == [0, 1, 2]
    assert {(one.world_size, one.num_nodes, one.devices) for one in resolutions} == {(12, 3, 4)}
    assert len({(one.value("main_address"), one.value("main_port")) for one in resolutions}) == 1
    assert {one.value("requeue") for one in resolutions} == {"exit_code"}
    limits = pods(made)[0]["containers"][0].get("resources", {}).get("limits", {})
    assert limits.get("nvidia.com/gpu") == ("4" if device == "h100" else None)


@pytest.mark.full
def test_pods_are_evicted_and_made_anew(tmp_path: Path) -> None:
    """The manifest's own command and variables, in processes that stand for two pods: one gets a SIGTERM, both save
    and end with the code that the manifest does not count, and the next pods finish the run."""
    made = manifests("Job", PLAIN, tmp_path, devices_per_node=1, device="cpu")
    spec, [pod] = made["Job"]["spec"], pods(made)
    _, evicted, again = spec["podFailurePolicy"]["rules"]
    assert (evicted["action"], again["action"]) == ("Ignore", "Ignore")
    job = yaml.safe_load(made["ConfigMap"]["data"]["job.yaml"])
    # The volume is a folder here, and the service's name this machine's.
    job = changed(job, run={"dir": str(tmp_path / "volume")}, model={"args": {"width": 4, "delay": 0.05}})
    job = changed(job, trainer={"max_steps": 60, "checkpoint": {"every_n_steps": 10}})
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    program, *words = pod["containers"][0]["command"]
    assert (program, words) == ("fairlead", ["fit", "/etc/fairlead/job.yaml"])

    def started() -> list[Any]:
        here = {"MASTER_ADDR": os.uname().nodename, "MASTER_PORT": str(free_port())}
        environs = [{**in_pod(made, index), **here} for index in range(spec["completions"])]
        return [start("fit", str(tmp_path / "job.yaml"), cwd=tmp_path, environ=one) for one in environs]

    run = tmp_path / "volume" / "small"
    first, second = started()
    first.until(lambda: "checkpoint" in names(run), "the first checkpoint")
    os.kill(second.process.pid, signal.SIGTERM)
    ended = [first.end(), second.end()]
    assert [one.code for one in ended] == again["onExitCodes"]["values"] * 2, [one.text for one in ended]
    ended = [one.end() for one in started()]
    assert [one.code for one in ended] == [0, 0], [one.text for one in ended]
    assert names(run).count("start") == 2
    assert "finished" in names(run)
