"""Plugins from outside the repository: installed by pip, discovered, checked by the public suites, and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fairlead.testing import CONFORMANCE, write_dist
from fairlead_distributed import free_port
from integration_tests.jobs import JOB, changed, events, fairlead, names, repository, start

PLUGINS = Path(__file__).parent.parent / "examples" / "plugins"
EXAMPLES = sorted(project.parent.name for project in PLUGINS.glob("*/pyproject.toml"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the plugins are installed, beside what is installed here."""
    folder = tmp_path_factory.mktemp("plugins")
    site = folder / "site"
    sources = [shutil.copytree(PLUGINS / name, folder / name) for name in EXAMPLES]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "--target", str(site), *map(str, sources)],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PIP_BUILD_CONSTRAINT"},  # pip: not without isolation
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {"PYTHONPATH": str(site)}


def test_they_are_discovered(tmp_path: Path, installed: Mapping[str, str]) -> None:
    call = fairlead("plugins", "--json", cwd=tmp_path, environ=installed)
    found = {f"{record['axis']}.{record['name']}": record for record in json.loads(call.out)}
    theirs = {key: record for key, record in found.items() if record["dist"].removeprefix("fairlead-") in EXAMPLES}
    assert set(CONFORMANCE) == {record["axis"] for record in theirs.values()}, "an axis without an example"
    assert all(record["available"] for record in theirs.values()), theirs


def test_the_page_says_which_example_is_of_which_axis() -> None:
    """A reader finds the axis in the table, and there is what it names."""
    page = (PLUGINS.parents[1] / "docs" / "write-a-plugin.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| .* \| `examples/plugins/(\w+)`", page, re.MULTILINE))
    assert shown.keys() == CONFORMANCE.keys()
    for axis, name in shown.items():
        project = tomllib.loads((PLUGINS / name / "pyproject.toml").read_text())["project"]
        assert any(key.startswith(f"{axis}.") for key in project["entry-points"]["fairlead"]), (axis, name)


@pytest.mark.full
def test_their_own_tests_pass(tmp_path: Path, installed: Mapping[str, str]) -> None:
    tests = [str(file) for name in EXAMPLES for file in (PLUGINS / name / "tests").glob("test_*.py")]
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    call = fairlead(*tests, cwd=tmp_path, environ=installed, command=command)
    assert call.code == 0, call.text
    assert "passed" in call.out
    assert len(tests) == len(EXAMPLES)


@pytest.mark.full
def test_a_job_of_all_the_others_trains_is_requeued_and_resumes(tmp_path: Path, installed: Mapping[str, str]) -> None:
    """Each does what it is for: in one job that is stopped by SIGTERM and started again."""
    chosen = {
        "accelerator": "numa",
        "devices": 1,
        "strategy": "ddp",  # of one rank: a layer sync is applied by strategies of several
        "precision": "tf32",
        "layer_sync": "frozen_batchnorm",
        "checkpoint_io": "npy",
        "requeue": {"name": "spool", "folder": str(tmp_path / "spool")},
        "loggers": ["jsonl"],
    }
    job = repository(tmp_path / "repo", job=changed(JOB, model={"args": {"delay": 0.1}}, trainer=chosen))
    model = tmp_path / "repo" / "mine" / "model.py"
    layer = "torch.nn.Linear(4, width)"
    model.write_text(model.read_text().replace(layer, f"torch.nn.Sequential(torch.nn.BatchNorm1d(4), {layer})"))
    (tmp_path / "spool").mkdir()
    environ = {**installed, "WEIGHTS": "1", "SCRATCH": str(tmp_path)}
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"

    running = start("fit", str(job), cwd=tmp_path, environ=environ)
    running.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "three steps")
    running.process.send_signal(signal.SIGTERM)
    stopped = running.end()
    assert stopped.code == 75, stopped.text
    assert "scratch-is-purged" in stopped.err
    assert [file.read_text() for file in (tmp_path / "spool").iterdir()] == [str(tmp_path)]
    with metrics.open("a") as file:
        file.write("what a start logs behind its last checkpoint\n")

    again = fairlead("fit", str(job), cwd=tmp_path, environ=environ)
    assert again.code == 0, again.text
    assert "resumes from" in again.text
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(8))
    end = torch.load(tmp_path / "weights-0.pt", weights_only=True)
    assert end["layer.0.num_batches_tracked"] == 0
    assert not torch.equal(end["layer.0.weight"], torch.ones(4))

    listed = fairlead("checkpoint", "verify", "runs/small", cwd=tmp_path, environ=installed)
    assert (listed.code, "step-00000008: ok" in listed.out) == (0, True), listed.text
    assert list((tmp_path / "runs" / "small" / "checkpoints" / "step-00000008" / "state.ckpt").glob("*.npy"))
    used = fairlead("disk", "--json", cwd=tmp_path, environ=installed)
    assert json.loads(used.out)["small"] > 0


def weights(folder: Path) -> list[torch.Tensor]:
    """The weights of each rank at the end of the training."""
    return [torch.load(folder / f"weights-{rank}.pt", weights_only=True)["layer.weight"] for rank in (0, 1)]


@pytest.mark.full
def test_local_sgd_trains_and_averages(tmp_path: Path, installed: Mapping[str, str]) -> None:
    """With plain SGD, averaging the weights after every step is what DDP does with the gradients."""
    job = str(repository(tmp_path / "repo"))
    environ = {**installed, "WEIGHTS": "1"}
    ends: dict[str, list[torch.Tensor]] = {}
    for name, strategy in (
        ("ddp", "ddp"),
        ("always", "{name: localsgd, period: 1}"),
        ("seldom", "{name: localsgd, period: 5}"),
    ):
        words = ("--set", f"trainer.strategy={strategy}", "--set", f"run.name={name}")
        call = fairlead("fit", job, *words, cwd=tmp_path, environ=environ)
        assert call.code == 0, call.text
        ends[name] = weights(tmp_path)
    torch.testing.assert_close(*ends["always"], rtol=0, atol=0)
    torch.testing.assert_close(ends["always"][0], ends["ddp"][0])
    # Three steps after the last averaging the ranks have gone their own ways, but not far.
    assert not torch.equal(*ends["seldom"])
    torch.testing.assert_close(*ends["seldom"], rtol=0, atol=0.1)


def test_a_wrong_field_of_theirs_is_found_as_ours_are(tmp_path: Path, installed: Mapping[str, str]) -> None:
    job = str(repository(tmp_path / "repo"))
    wrong = fairlead(
        "check", job, "--set", "trainer.strategy={name: localsgd, perod: 1}", cwd=tmp_path, environ=installed
    )
    assert wrong.code == 2
    assert "did you mean 'period'?" in wrong.err
    near = fairlead("check", job, "--set", "trainer.strategy=localsg", cwd=tmp_path, environ=installed)
    assert near.code == 2
    assert "did you mean 'localsgd'?" in near.err


@pytest.mark.full
def test_pbs_tells_two_processes_who_they_are(tmp_path: Path, installed: Mapping[str, str]) -> None:
    job = str(repository(tmp_path / "repo"))
    nodes = tmp_path / "nodefile"
    nodes.write_text("localhost\nlocalhost\n")
    ranks = [{**installed, "PBS_NODEFILE": str(nodes), "PBS_VNODENUM": str(rank)} for rank in (0, 1)]
    told = fairlead("explain", job, "--json", cwd=tmp_path, environ=ranks[1])
    settings = json.loads(told.out)["settings"]
    assert settings["environment"] == {"value": "pbs", "reason": "PBS_NODEFILE, PBS_VNODENUM"}
    assert settings["global_rank"] == {"value": 1, "reason": "PBS_VNODENUM"}

    port = ("--set", f"trainer.environment={{name: pbs, main_port: {free_port()}}}")
    running = [start("fit", job, *port, cwd=tmp_path, environ=environ) for environ in ranks]
    for call in [one.end() for one in running]:
        assert call.code == 0, call.text
    run = tmp_path / "runs" / "small"
    assert events(run)[0]["world_size"] == 2
    assert names(run).count("start") == 1
    assert names(run)[-1] == "finished"


def test_two_plugins_of_one_name_are_a_record_that_names_both(tmp_path: Path, installed: Mapping[str, str]) -> None:
    write_dist(
        tmp_path / "site",
        "another-localsgd",
        entry_points={"strategy.localsgd": "another_localsgd:plugin"},
        files={"another_localsgd/__init__.py": "plugin = None\n"},
    )
    environ = {"PYTHONPATH": f"{tmp_path / 'site'}:{installed['PYTHONPATH']}"}
    listed = fairlead("plugins", "--axis", "strategy", "--json", cwd=tmp_path, environ=environ)
    record = next(record for record in json.loads(listed.out) if record["name"] == "localsgd")
    assert not record["available"]
    assert "another-localsgd and fairlead-localsgd" in record["error"]
    job = str(repository(tmp_path / "repo"))
    assert fairlead("check", job, cwd=tmp_path, environ=environ).code == 0
    chosen = fairlead("check", job, "--set", "trainer.strategy=localsgd", cwd=tmp_path, environ=environ)
    assert chosen.code == 2
    assert "another-localsgd and fairlead-localsgd" in chosen.err
