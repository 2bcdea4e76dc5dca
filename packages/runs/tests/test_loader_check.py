"""What is said of a loader's workers and memory, from the job alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.facts import Job, Setting
from fairlead.findings import Finding
from fairlead.jobs import load_job
from fairlead.resolve import Resolution
from fairlead.testing import FakeEntryPoint, minimal_resolution, stand_ins
from fairlead_runs.loader_check import Loading, check_loaders, loader_findings

PLUGINS = PluginManager([FakeEntryPoint(name, plugin) for name, plugin in stand_ins().items()])


def machine(device: str = "cuda", *, devices: int = 8, cpus: int = 64) -> Resolution:
    """A node of a scheduler with so many CPUs for so many ranks."""
    found = minimal_resolution(PLUGINS, devices=devices)
    job = Job("slurm:1", cpus_on_node=Setting(cpus, "SLURM_CPUS_ON_NODE"))
    return dataclasses.replace(found, device_type=device, job=job, inside_job=True)


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)), raising=False)


def said(loading: Loading, resolution: Resolution) -> list[Finding]:
    return list(loader_findings(loading, resolution))


def test_more_workers_than_cpus_are_a_warning_with_the_rule() -> None:
    """16 workers of 8 ranks want 128 processes on 64 CPUs; min(4 x 8 devices, 64) = 32, so 4 for each rank."""
    (found,) = said(Loading(16, True, "data.args.num_workers"), machine())
    assert (found.severity, found.code) == ("warning", "workers-too-many")
    assert found.what == "128 workers would load data on each node, which has 64 CPUs for them"
    assert found.why is not None
    assert "num_workers=16 for each of 8 ranks" in found.why
    assert found.fix == "num_workers=4: the ranks of a node share min(4 x 8, 64 CPUs)"
    (few,) = said(Loading(16, True, ""), machine(cpus=16))
    assert few.fix == "num_workers=2: the ranks of a node share min(4 x 8, 16 CPUs)"
    assert said(Loading(8, True, ""), machine()) == []  # as many as there are CPUs


def test_none_beside_a_gpu_and_memory_that_is_not_pinned_are_told() -> None:
    none, pinned = said(Loading(0, False, "x"), machine())
    assert (none.severity, none.code, none.fix) == (
        "info",
        "workers-none",
        "num_workers=4 (64 CPUs for 8 ranks on this node)",
    )
    assert (pinned.severity, pinned.code, pinned.fix) == (
        "info",
        "memory-not-pinned",
        "DataLoader(..., pin_memory=True)",
    )
    assert said(Loading(None, None, "x"), machine()) == []  # nothing is known


def test_nothing_is_said_of_a_small_job_on_cpus() -> None:
    for workers in (0, 2):
        assert said(Loading(workers, False, ""), machine("cpu", devices=2, cpus=2)) == []
    assert said(Loading(4, True, ""), machine("cpu", devices=1, cpus=2)) == []


@pytest.mark.parametrize(
    ("args", "codes"),
    [
        ({}, []),
        ({"num_workers": 0}, ["workers-none"]),
        ({"num_workers": 40, "pin_memory": False}, ["workers-too-many", "memory-not-pinned"]),
    ],
)
def test_the_arguments_of_the_data_are_read(tmp_path: Path, args: dict[str, Any], codes: list[str]) -> None:
    (tmp_path / "job.yaml").write_text(f"model: data:Plain\ndata: {{class: data:Any, args: {args}}}\n")
    loaded = load_job("job.yaml", plugins=PLUGINS, cwd=tmp_path, environ={})
    found = check_loaders(loaded, machine(), {}, tmp_path).findings
    assert [one.code for one in found] == codes
    assert all(one.where == "data.args" for one in found)


def test_of_a_machine_elsewhere_the_resources_say_the_cpus(tmp_path: Path) -> None:
    text = "model: data:Plain\ndata: {class: data:Any, args: {num_workers: 40}}\n"
    (tmp_path / "job.yaml").write_text(text + "resources: {devices_per_node: 8, device: h100, cpus_per_device: 12}\n")
    (tmp_path / "bare.yaml").write_text(text)
    there = machine()
    there = dataclasses.replace(there, settings={k: v for k, v in there.settings.items() if k != "threads"})
    loaded = load_job("job.yaml", plugins=PLUGINS, cwd=tmp_path, environ={})
    (found,) = check_loaders(loaded, there, {}, tmp_path).findings
    assert found.what == "320 workers would load data on each node, which has 96 CPUs for them"
    loaded = load_job("bare.yaml", plugins=PLUGINS, cwd=tmp_path, environ={})
    assert check_loaders(loaded, there, {}, tmp_path).findings == ()
