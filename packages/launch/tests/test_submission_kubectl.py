"""Jobs on Kubernetes: what is refused before anything is made, and what becomes of kubectl's answers (a stand-in's)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fairlead.errors import FairleadError
from fairlead_launch.submission import Request
from fairlead_launch.submission.kubectl import KubectlSubmitter
from fairlead_launch.submission.kubeflow import KubeflowSubmitter, KubeflowSubmitterConfig
from fairlead_launch.submission.kubernetes import KubernetesSubmitter, KubernetesSubmitterConfig

STAND_IN = Path(__file__).with_name("kubectl_stand_in.py")
JOB = """
run: {name: sine, dir: /home/me/runs, code: /home/me/sine}
model: {class: net:Net}
submit: {to: kubernetes, image: sine:1}
"""
Submit = Callable[..., KubectlSubmitter]


def request(*texts: str, **changed: Any) -> Request:
    texts = texts or (JOB,)
    folder = Path("/home/me/runs/sine/submissions/1")
    runs = [Path(f"/home/me/runs/sine-{i}") for i in range(len(texts))]
    given = Request("sine", folder, [folder / "job.yaml"], runs, job_texts=texts, cwd=Path("/home/me/sine"))
    return replace(given, **{"nodes": 2, "devices_per_node": 4, "gpus": True, **changed})


def objects(submitter: KubectlSubmitter, asked: Request) -> dict[str, Any]:
    """What is rendered, by its kind."""
    [text] = submitter.render(asked).values()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def on_kubernetes(environ: Mapping[str, str] | None = None, **settings: Any) -> KubernetesSubmitter:
    given = {"image": "sine:1", "runs": {"claim": "runs"}, **settings}
    return KubernetesSubmitter(KubernetesSubmitterConfig.model_validate(given), environ or {})


def on_kubeflow() -> KubectlSubmitter:
    return KubeflowSubmitter(KubeflowSubmitterConfig.model_validate({"image": "sine:1", "runs": {"claim": "runs"}}), {})


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The variables with which a stand-in for kubectl is found; its objects are files below `store`."""
    (tmp_path / "bin").mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    kubectl.chmod(0o755)
    (tmp_path / "store").mkdir()
    return {"PATH": f"{kubectl.parent}:{os.environ['PATH']}", "STAND_IN_STORE": str(tmp_path / "store")}


def written(submitter: KubectlSubmitter, asked: Request, folder: Path) -> list[Path]:
    files = []
    for name, text in submitter.render(asked).items():
        files.append(folder / name)
        files[-1].write_text(text)
    return files


def set_status(cluster: Mapping[str, str], kind: str, name: str, **status: Any) -> None:
    file = Path(cluster["STAND_IN_STORE"]) / "research" / f"{kind}%{name}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "status": status}))


def test_a_job_from_its_submission_to_its_end(cluster: dict[str, str], tmp_path: Path) -> None:
    submitter = on_kubernetes(cluster, namespace="research", context="lab")
    files = written(submitter, request(), tmp_path)
    job = submitter.submit(request(), files)
    assert job == "sine-1"
    store = Path(cluster["STAND_IN_STORE"])
    made = sorted(file.stem for file in (store / "research").iterdir())
    assert made == ["configmap%sine-1", "job.batch%sine-1", "service%sine-1"]
    assert submitter.state(job).phase == "queued"
    set_status(cluster, "job.batch", job, active=2, ready=2)
    assert submitter.state(job).phase == "running"
    said = subprocess.run(submitter.logs_command(job), env=cluster, capture_output=True, text=True, check=True)
    assert said.stdout == "[pod/sine-1-0-x7k2p/fairlead] step 10\n"
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "it failed 6 times"}
    set_status(cluster, "job.batch", job, failed=6, conditions=[failed])
    state = submitter.state(job)
    assert (state.phase, state.reason) == ("failed", "BackoffLimitExceeded: it failed 6 times")
    assert state.details == {"failed": "6"}
    with pytest.raises(FairleadError, match=r'(?s)did not take the job.*"sine-1" already exists'):
        submitter.submit(request(), files)
    assert sorted(file.stem for file in (store / "research").iterdir()) == made  # what was there before stays
    submitter.cancel(job)
    assert not list((store / "research").iterdir())
    assert submitter.state(job).phase == "unknown"
    with pytest.raises(FairleadError, match="there is no job sine-1"):
        submitter.cancel(job)
    calls = [json.loads(line) for line in (store / "calls.txt").read_text().splitlines()]
    assert all(call[:2] == ["--context=lab", "--namespace=research"] for call in calls)


def test_nothing_is_left_of_what_is_refused_in_part(cluster: dict[str, str], tmp_path: Path) -> None:
    submitter = on_kubernetes({**cluster, "STAND_IN_FORBIDS": "job"}, namespace="research")
    with pytest.raises(FairleadError, match=r"(?s)jobs is forbidden.*can-i create jobs"):
        submitter.submit(request(), written(submitter, request(), tmp_path))
    assert not list((Path(cluster["STAND_IN_STORE"]) / "research").iterdir())


def test_a_sweep_is_a_job_for_each_member(cluster: dict[str, str], tmp_path: Path) -> None:
    submitter = on_kubernetes(cluster, namespace="research")
    sweep = request(JOB, JOB, indices=(0, 1))
    job = submitter.submit(sweep, written(submitter, sweep, tmp_path))
    first, second = (submitter.member(job, index) for index in (0, 1))
    maps = [one for one in yaml.safe_load_all(*submitter.render(sweep).values()) if one["kind"] == "ConfigMap"]
    names = [yaml.safe_load(one["data"]["job.yaml"])["run"]["name"] for one in maps]
    assert names == ["sine-0", "sine-1"]  # a run directory for each
    set_status(cluster, "job.batch", first, conditions=[{"type": "Complete", "status": "True"}])
    set_status(cluster, "job.batch", second, active=2, ready=2)
    assert [submitter.state(one).phase for one in (first, second, job)] == ["finished", "running", "running"]
    submitter.cancel(second)
    assert [submitter.state(one).phase for one in (first, second, job)] == ["finished", "unknown", "finished"]
    with pytest.raises(FairleadError, match="no limit for the members of a sweep"):
        submitter.render(replace(sweep, max_parallel=1))


def test_without_kubectl(tmp_path: Path) -> None:
    submitter = on_kubernetes({"PATH": str(tmp_path)})
    with pytest.raises(FairleadError, match=r"(?s)kubectl is not on the PATH.*--dry-run"):
        submitter.submit(request(), [tmp_path / "manifests.yaml"])
    state = submitter.state("sine-1")
    assert (state.phase, state.reason) == ("unknown", "kubectl is not on the PATH")


def test_a_cluster_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    """As kubectl 1.32 does it, behind the log of its libraries, which is longer than what is shown."""
    noise = 'E1123 23:00:22.729634   13544 memcache.go:265] "Unhandled Error" err="could not get the list: refused"\n'
    kubectl = tmp_path / "kubectl"
    said = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    kubectl.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{noise * 9}{said}\nEND\nexit 1\n")
    kubectl.chmod(0o755)
    submitter = on_kubernetes({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert submitter.state("sine-1").reason == said
    with pytest.raises(FairleadError) as raised:
        submitter.cancel("sine-1")
    assert raised.value.why == said


HOLDS = {"status": "True"}


@pytest.mark.parametrize(
    ("kind", "status", "phase"),
    [
        ("Job", {"conditions": [{"type": "Suspended", **HOLDS}]}, "queued"),
        ("Job", {"conditions": [{"type": "Suspended", "status": "False"}], "active": 1, "ready": 1}, "running"),
        ("TrainJob", {"jobsStatus": [{"name": "node", "active": 1, "ready": 0}]}, "queued"),
        ("TrainJob", {"jobsStatus": [{"name": "node", "active": 1, "ready": 1}]}, "running"),
        ("TrainJob", {"conditions": [{"type": "Complete", **HOLDS}]}, "finished"),
        ("TrainJob", {"conditions": [{"type": "Failed", **HOLDS}]}, "failed"),
        ("TrainJob", {"conditions": [{"type": "Suspended", **HOLDS}]}, "queued"),
    ],
)
def test_what_a_status_means(kind: str, status: dict[str, Any], phase: str) -> None:
    """As the APIs describe it; `status` is a fake."""
    submitter = on_kubernetes() if kind == "Job" else on_kubeflow()
    assert submitter.read(status).phase == phase


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"runs": None}, "no volume of the pods holds /home/me/runs/sine-0"),
        ({"runs": None, "volumes": [{"path": "/home", "source": {"emptyDir": {}}}]}, "no volume of the pods holds"),
        ({"snapshot": True}, "the pods do not see the copy of the code"),
    ],
)
def test_what_pods_do_not_see_is_said_before_anything_is_made(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(FairleadError, match=told) as raised:
        on_kubernetes(**settings).render(request())
    assert raised.value.fix


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"image": ""}, "at least 1 character"),
        ({"template": "mine.yaml"}, "manifests are not made from a template"),
        ({"pod": {"restartPolicy": "Always"}}, "restartPolicy cannot be set here"),
        ({"runs": {"claim": "runs", "path": "runs"}}, "write an absolute path"),
        ({"volumes": [{"path": "/data"}]}, "needs exactly one of claim"),
        ({"container": {"env": []}}, "env cannot be set here"),
        ({"grace": 5}, "greater than or equal to 30"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        on_kubernetes(**settings)


def test_a_folder_that_all_machines_mount_is_used_as_it_is() -> None:
    """Then the pods run the copy of the code, in the folder where the job was submitted."""
    volumes = [{"path": "/home", "host_path": "/nfs/home"}]
    made = objects(on_kubernetes(runs=None, volumes=volumes, snapshot=True), request())
    job = yaml.safe_load(made["ConfigMap"]["data"]["job.yaml"])
    assert job["run"] == {"name": "sine-0", "dir": "/home/me/runs", "code": ["/home/me/sine"]}
    [container] = made["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == "/home/me/sine"


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ("auto", (75, 3)),
        ({"name": "exit_code", "code": 200, "final_code": 4}, (200, 4)),
        ({"name": "exit_code", "max_requeues": 9}, (75, 3)),
        ("none", None),
    ],
)
def test_the_codes_of_the_job_are_those_that_the_manifest_counts_with(
    asked: Any, codes: tuple[int, int] | None
) -> None:
    text = f"{JOB}trainer: {{requeue: {json.dumps(asked)}}}\n"
    made = objects(on_kubeflow(), request(text))
    requeue = yaml.safe_load(made["ConfigMap"]["data"]["job.yaml"])["trainer"]["requeue"]
    assert codes is None or (requeue["code"], requeue["final_code"]) == codes
    assert requeue.get("max_requeues") == (asked.get("max_requeues") if isinstance(asked, dict) else None)
    [node] = made["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    final, evicted, again = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (again["action"], again["onExitCodes"]["values"]) == ("Ignore", [codes[0] if codes else 75])
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [2, codes[1] if codes else 3])
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("gpt-lr0.001", "3", "gpt-lr0-001-3"),
        ("3b_Größe", "1", "run-3b-gr-e-1"),
        ("x" * 80, "12", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-d929cdee-12"),
    ],
)
def test_names_are_such_as_kubernetes_takes(name: str, folder: str, expected: str) -> None:
    """RFC 1035: letters, digits and dashes; not over 63 with what is added for pods."""
    made = objects(on_kubernetes(), request(name=name, folder=Path("/home/me/runs/x/submissions") / folder))
    assert {one["metadata"]["name"] for one in made.values()} == {expected}
