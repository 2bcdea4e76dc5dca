"""What is known of devices by name, and what a job's `resources.device` is told of."""

from __future__ import annotations

import csv
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fairlead.config import JobConfig, ResourcesConfig
from fairlead.jobs import LoadedJob
from fairlead.plugins import PluginManager
from fairlead_runs.device_models import NVIDIA, check_device, device_names, find_device, vendors


@pytest.mark.parametrize(
    ("name", "model", "memory", "capability", "accelerator"),
    [
        ("h100", "h100", 80, "9.0", "cuda"),
        ("H100", "h100", 80, "9.0", "cuda"),
        ("NVIDIA H100 80GB HBM3", "h100", 80, "9.0", "cuda"),
        ("NVIDIA H100 NVL 94GB", "h100", 94, "9.0", "cuda"),
        ("nvidia_a100-sxm4-80gb", "a100", 80, "8.0", "cuda"),
        ("a100", "a100", 40, "8.0", "cuda"),
        ("NVIDIA A100-SXM4-40GB", "a100", 40, "8.0", "cuda"),
        ("NVIDIA GH200 480GB", "gh200", 96, "9.0", "cuda"),
        ("NVIDIA L40S", "l40s", 48, "8.9", "cuda"),
        ("Tesla T4", "t4", 16, "7.5", "cuda"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090", 24, "8.9", "cuda"),
        ("rtx4090", "rtx 4090", 24, "8.9", "cuda"),
        ("NVIDIA RTX A6000", "rtx a6000", 48, "8.6", "cuda"),
        ("mi300x", "mi300x", 192, "gfx942", "cuda"),
        ("AMD gfx90a", "gfx90a", None, "gfx90a", "cuda"),
        ("Intel(R) Data Center GPU Max 1550", "max 1550", 128, "", "xpu"),
        ("pvc", "max 1550", 128, "", "xpu"),
        ("v4-8", "v4", 32, "", "xla"),
        ("tpu v5litepod-16", "v5e", 16, "", "xla"),
        ("v5p-128", "v5p", 95, "", "xla"),
        ("v6e", "v6e", 32, "", "xla"),
        ("Apple M2 Max", "m2", None, "", "mps"),
        ("gaudi3", "gaudi3", 128, "", None),
    ],
)
def test_devices_are_found_by_the_names_that_they_have(
    name: str, model: str, memory: int | None, capability: str, accelerator: str | None
) -> None:
    found = find_device(name)
    assert found is not None
    assert (found.name, found.memory_of(name)) == (model, memory)
    assert (found.capability, found.vendor.accelerator) == (capability, accelerator)


@pytest.mark.parametrize("name", ["h200x", "", "gpu", "v9", "a1000", "my-cluster-gpu", "xh100", "rtx"])
def test_of_other_names_nothing_is_claimed(name: str) -> None:
    assert find_device(name) is None


def test_the_table_is_whole() -> None:
    """Every name finds its own row; NVIDIA's units follow from the compute capability; each has a source."""
    assert len(set(device_names())) == len(device_names())
    with files("fairlead_runs").joinpath("device_models.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row["bf16"] in ("yes", "no") and row["fp8"] in ("yes", "no") for row in rows)
    for name in device_names():
        model = find_device(name)
        assert model is not None
        assert model.name == name
        assert model.vendor.source
        assert list(model.memory_gb) == sorted(model.memory_gb)
        if model.vendor is NVIDIA:
            capability = tuple(map(int, model.capability.split(".")))
            assert (model.bf16, model.fp8) == (capability >= (8, 0), capability >= (8, 9))
    named = PluginManager().names("accelerator")
    if named:  # where the plugins are installed, each vendor's accelerator is one of them
        assert {str(vendor.accelerator) for vendor in vendors()} <= set(named)


@pytest.mark.parametrize(
    ("device", "severity", "code", "fix"),
    [
        (None, None, None, ""),
        ("h100", None, None, ""),
        ("v4-8", None, None, ""),
        ("nvidia_a100-sxm4-80gb", None, None, ""),
        ("h200x", "error", "device-unknown", "did you mean 'h200' (or 'gh200', 'h20')?"),
        ("qqq", "error", "device-unknown", "fairlead capabilities --devices"),
        ("gaudi3", "error", "device-not-driven", "fairlead capabilities --devices"),
        ("trn2", "error", "device-not-driven", "fairlead capabilities --devices"),
    ],
)
def test_a_wrong_device_is_said(device: str | None, severity: str | None, code: str | None, fix: str) -> None:
    job = JobConfig.model_validate({"model": {"class": "m:N"}, "resources": {"device": device}})
    assert job.resources == ResourcesConfig(device=device)
    unused: Any = None  # it looks at the job alone
    found = check_device(LoadedJob(job, {}, "job.yaml", unused), unused, {}, Path()).findings
    assert [(one.severity, one.code) for one in found] == ([(severity, code)] if code else [])
    assert all(one.where == "resources.device" and fix in str(one.fix) for one in found)


def test_a_name_of_the_scheduler_is_a_gpu_if_its_memory_is_given() -> None:
    job = JobConfig.model_validate({"model": {"class": "m:N"}, "resources": {"device": "banana", "memory_gib": 80}})
    unused: Any = None
    (found,) = check_device(LoadedJob(job, {}, "job.yaml", unused), unused, {}, Path()).findings
    assert (found.severity, found.code) == ("warning", "device-unknown")
