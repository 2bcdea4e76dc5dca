"""What devices can compute, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead import (
    PluginManager,
)
from fairlead.errors import ConfigError
from fairlead_precision import (
    FP8Recipe,
    HalfPrecisionConfig,
    MixedPrecisionConfig,
    TorchAOFloat8PrecisionConfig,
    TransformerEnginePrecisionConfig,
)

Build = Callable[..., Any]


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", True, True),
        ("NVIDIA H200", True, True),
        ("NVIDIA GH200 480GB", True, True),
        ("NVIDIA B200", True, True),
        ("NVIDIA L40S", True, True),
        ("NVIDIA L4", True, True),
        ("NVIDIA GeForce RTX 4090", True, True),
        ("NVIDIA RTX 6000 Ada Generation", True, True),
        ("NVIDIA A100-SXM4-80GB", True, False),
        ("NVIDIA A10G", True, False),
        ("NVIDIA RTX A6000", True, False),
        ("NVIDIA GeForce RTX 3090", True, False),
        ("Tesla V100-SXM2-32GB", False, False),
        ("Tesla T4", False, False),
        ("Quadro RTX 4000", False, False),
        ("NVIDIA GeForce RTX 2080 Ti", False, False),
        ("AMD gfx942", True, True),
        ("AMD gfx90a", True, False),
        ("mi300x", True, True),
        ("NVIDIA RTX 4000 SFF Ada Generation", True, True),
        ("NVIDIA RTX A2000", True, False),
        ("NVIDIA GeForce GTX 1660", False, False),
        ("h100", True, True),
        ("a100", True, False),
        ("v100", False, False),
        ("Some Other Device", None, None),
    ],
)
def test_what_devices_can_compute(name: str, bf16: bool | None, fp8: bool | None) -> None:
    """By name, for checks on a machine without the device."""
    from fairlead_precision.hardware import has_bf16, has_fp8

    assert (has_bf16(name), has_fp8(name)) == (bf16, fp8)


@pytest.mark.parametrize(
    ("config", "device", "strategy", "code", "fix"),
    [
        (TransformerEnginePrecisionConfig(), "NVIDIA A100-SXM4-80GB", "ddp", "precision-fp8", "bf16-mixed"),
        (TransformerEnginePrecisionConfig(), "Tesla V100-SXM2-32GB", "ddp", "precision-fp8", "16-mixed"),
        (TransformerEnginePrecisionConfig(), "NVIDIA H100 80GB HBM3", "ddp", None, None),
        (TransformerEnginePrecisionConfig(), "Some Other Device", "ddp", None, None),
        (TorchAOFloat8PrecisionConfig(), "NVIDIA A100-SXM4-80GB", "ddp", "precision-fp8-units", "bf16-mixed"),
        (TorchAOFloat8PrecisionConfig(), "Tesla T4", "ddp", "precision-fp8-units", "16-mixed"),
        (TorchAOFloat8PrecisionConfig(emulate=True), "NVIDIA A100-SXM4-80GB", "ddp", None, None),
        (TorchAOFloat8PrecisionConfig(), "NVIDIA H100 80GB HBM3", "ddp", None, None),
        (TorchAOFloat8PrecisionConfig(), "AMD gfx942", "ddp", None, None),
        (MixedPrecisionConfig(), "Tesla V100-SXM2-32GB", "ddp", "precision-emulated", "16-mixed"),
        (MixedPrecisionConfig(dtype="float16"), "Tesla V100-SXM2-32GB", "ddp", None, None),
        (MixedPrecisionConfig(), "NVIDIA A100-SXM4-80GB", "ddp", None, None),
        (HalfPrecisionConfig(dtype="bfloat16"), "Tesla T4", "ddp", "precision-emulated", "16-mixed"),
    ],
)
def test_what_does_not_fit_the_device_is_said_before_the_run(
    plugins: PluginManager, config: Any, device: str, strategy: str, code: str | None, fix: str | None, resolution: Any
) -> None:
    """fp16 is recommended on a V100, bf16 on an A100."""
    chosen = resolution(config, strategy, "cuda", (device, device))
    calls = plugins.call(plugins.of(config), "fairlead_check", resolution=chosen, environ={})
    found = [finding for result in calls for finding in result]
    assert [finding.code for finding in found] == ([code] if code else [])
    assert all(str(fix) in str(finding.fix) for finding in found)


@pytest.mark.parametrize(("capability", "says"), [((8, 0), "bf16-mixed"), ((7, 0), "16-mixed")])
def test_transformer_engine_refuses_an_older_gpu_when_built(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], says: str, build: Build
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    with pytest.raises(ConfigError, match="Old GPU cannot compute in 8-bit") as caught:
        build(TransformerEnginePrecisionConfig())
    assert caught.value.fix == f"precision: {says}"


def test_transformer_engine_gets_its_recipe(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    """What reaches Lightning, which cannot be constructed here."""
    import torch
    from lightning.pytorch.plugins import precision

    seen: dict[str, Any] = {}
    monkeypatch.setattr(precision, "TransformerEnginePrecision", lambda **kwargs: seen.update(kwargs))
    build(TransformerEnginePrecisionConfig(weights_dtype="float16", recipe=FP8Recipe(margin=1), replace_layers=True))
    assert seen["weights_dtype"] is torch.float16
    assert (seen["replace_layers"], seen["fallback_compute_dtype"]) == (True, None)
    assert seen["recipe"] == {"margin": 1, "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "max"}


@pytest.mark.parametrize(
    ("cuda", "hip", "major", "native"),
    [
        (False, None, 0, False),
        (False, "6.2", 0, False),
        (True, None, 7, False),
        (True, None, 8, True),
        (True, "6.2", 9, True),
    ],
)
def test_bfloat16_probe(monkeypatch: pytest.MonkeyPatch, cuda: bool, hip: str | None, major: int, native: bool) -> None:
    """True on Ampere and later and on ROCm, False on older GPUs and on a CPU alone."""
    import torch

    from fairlead_precision import is_bf16_supported_no_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert is_bf16_supported_no_emulation() is native
    assert is_bf16_supported_no_emulation(0) is native
