"""What DeepSpeed is configured with, and what is said before a run; nothing is trained."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError, create_model

from fairlead import Finding, PluginManager, PrecisionConfigBase, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.open_union import parse_backend
from fairlead_strategies import DeepSpeedStrategyConfig
from fairlead_strategies.deepspeed.settings import settings_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of DeepSpeed's own imports


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager()


def found(plugins: PluginManager, resolution: Any) -> list[Finding]:
    plugin = plugins.of(resolution.strategy)
    calls = plugins.call(plugin, "fairlead_check", resolution=resolution, environ={})
    return [one for result in calls for one in result]


def sixteen(dtype: str) -> PrecisionConfigBase:
    kind = create_model("Half", __base__=PrecisionConfigBase, dtype=(str, "float32"))
    return kind.model_validate({"name": "half", "dtype": dtype})


LIGHTNINGS = {
    "overlap_comm": (True, None), "allgather_bucket_size": (200_000_000, 500_000_000),
    "reduce_bucket_size": (200_000_000, 500_000_000), "sub_group_size": (1_000_000_000_000, 1_000_000_000),
    "stage": (1, 0),
}  # fmt: skip
"""Ours and DeepSpeed's defaults, where Lightning has others; the stage is document A's."""


def test_the_fields_have_deepspeeds_names_and_defaults() -> None:
    """DeepSpeed's own model is compared: another name or default fails here."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs = {(f.alias or n): f.default for n, f in DeepSpeedZeroConfig.model_fields.items()}
    ours = settings_of(DeepSpeedStrategyConfig(), "cpu")["zero_optimization"]
    different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert different == LIGHTNINGS


def test_offloading_reaches_deepspeed(plugins: PluginManager) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config: Any = parse_backend("strategy", "deepspeed_stage_3_offload_nvme", plugins)
    taken = DeepSpeedZeroConfig(**settings_of(config, "cuda")["zero_optimization"])
    for part in (taken.offload_optimizer, taken.offload_param):
        assert (part.device, str(part.nvme_path), part.pin_memory) == ("nvme", "/local_nvme", False)


@pytest.mark.parametrize(("device", "forced"), [("cpu", False), ("cuda", True)])
def test_deepspeeds_own_optimizer_is_insisted_on_where_it_is_faster(device: str, forced: bool) -> None:
    config = DeepSpeedStrategyConfig(stage=2, offload_optimizer=True)
    assert settings_of(config, device)["zero_force_ds_cpu_optimizer"] is forced
    config = DeepSpeedStrategyConfig(stage=2, offload_optimizer=True, zero_force_ds_cpu_optimizer=not forced)
    assert settings_of(config, device)["zero_force_ds_cpu_optimizer"] is not forced


@pytest.mark.parametrize(
    ("own", "trainer", "precision", "says"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}, None,
         ["gradient_accumulation_steps: 4", "accumulate_grad_batches: 2"]),
        ({"gradient_accumulation_steps": 4}, {}, None, ["gradient_accumulation_steps: 4", "batches: 1"]),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, None, ["gradient_clipping: 1.0", "clip_val: 0.5"]),
        ({"bf16": {"enabled": True}}, {}, None, ["bf16.enabled: true", "precision"]),
        ({"bf16": {"enabled": False}}, {}, "bfloat16", ["bf16.enabled: false", "bf16"]),
        ({"fp16": {"enabled": True}}, {}, "bfloat16", ["fp16.enabled: true", "bf16"]),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, {}, None,
         ["train_batch_size is 10", "2 ranks = 8"]),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, {"gradient_clip_val": 0.5}, None,
         ["compute_grad_norm: false", "gradient_clip_val: 0.5"]),
    ],
)  # fmt: skip
def test_what_a_file_says_otherwise_is_an_error_that_names_both(
    plugins: PluginManager, ranks: ModuleType, tmp_path: Path, own: Any, trainer: Any, precision: Any, says: list[str]
) -> None:
    """At check, and again where the strategy is built."""
    from fairlead_strategies.deepspeed.runtime import build

    path = tmp_path / "ds.json"
    path.write_text(json.dumps(own))
    config = DeepSpeedStrategyConfig(config=str(path))
    changes: dict[str, Any] = {"trainer": TrainerConfig(**trainer)}
    changes |= {"precision": sixteen(precision)} if precision else {}
    (one,) = found(plugins, ranks.resolution(config, **changes))
    assert (one.severity, one.code) == ("error", "deepspeed-conflict")
    assert all(text in one.what for text in says), one.what
    with pytest.raises(ConfigError, match=r"says|train_batch_size"):
        build(config, ranks.context(config, **changes))


@pytest.mark.parametrize(
    ("own", "trainer", "precision"),
    [
        ({"gradient_accumulation_steps": 2}, {"accumulate_grad_batches": 2}, None),
        ({"gradient_accumulation_steps": "auto", "train_batch_size": "auto", "gradient_clipping": "auto"}, {}, None),
        ({"gradient_clipping": 1.0}, {}, None),
        ({"bf16": {"enabled": True}}, {}, "bfloat16"),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, {"accumulate_grad_batches": 2}, None),
    ],
)
def test_what_agrees_is_no_finding(
    plugins: PluginManager, ranks: ModuleType, own: Any, trainer: Any, precision: Any
) -> None:
    changes: dict[str, Any] = {"trainer": TrainerConfig(**trainer)}
    changes |= {"precision": sixteen(precision)} if precision else {}
    before = json.dumps(own)
    config = DeepSpeedStrategyConfig(config=own)
    assert found(plugins, ranks.resolution(config, **changes)) == []
    settings = settings_of(config, "cpu")
    settings["zero_optimization"] = {}
    assert json.dumps(config.config) == before  # a copy: the user's own is never changed


def test_what_cannot_be_used_is_said_before_the_run(plugins: PluginManager, ranks: ModuleType, tmp_path: Path) -> None:
    """A file that is not there, `auto` where nobody replaces it, and whose optimizer counts."""
    (one,) = found(plugins, ranks.resolution(DeepSpeedStrategyConfig(config=str(tmp_path / "no.json"))))
    assert (one.code, "cannot read" in one.what) == ("deepspeed-config", True)
    own = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    auto, optimizer = found(plugins, ranks.resolution(DeepSpeedStrategyConfig(config=own)))
    assert (auto.severity, auto.code) == ("error", "deepspeed-config")
    assert "optimizer.params.lr is `auto`" in auto.what
    assert (optimizer.severity, optimizer.code) == ("info", "deepspeed-optimizer")


@pytest.mark.parametrize(("inside", "severity"), [(True, "error"), (False, "warning")])
def test_nvme_needs_a_folder(
    plugins: PluginManager, ranks: ModuleType, tmp_path: Path, inside: bool, severity: str
) -> None:
    """On the machine that runs the job it is an error; a login node may be another."""
    config = parse_backend("strategy", "deepspeed_stage_3_offload_nvme", plugins)
    (one,) = found(plugins, ranks.resolution(config, inside_job=inside))
    assert (one.severity, one.code) == (severity, "deepspeed-nvme")
    assert "/local_nvme" in one.what
    given = parse_backend("strategy", {"name": "deepspeed_stage_3_offload_nvme", "nvme_path": str(tmp_path)}, plugins)
    assert found(plugins, ranks.resolution(given, inside_job=inside)) == []


def test_nvme_without_its_library_is_refused_with_the_apt_line(
    ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, by DeepSpeed's own test program."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    from fairlead_strategies.deepspeed.runtime import build

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_, **__: False)
    fields = {"offload_optimizer": True, "offload_optimizer_device": "nvme", "nvme_path": str(tmp_path)}
    config = DeepSpeedStrategyConfig.model_validate({"stage": 3, **fields})
    with pytest.raises(ConfigError, match="cannot be compiled") as caught:
        build(config, ranks.context(config))
    assert "apt install libaio-dev" in str(caught.value)


def test_a_lock_that_a_killed_build_has_left_is_named(
    ranks: ModuleType, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Not one of a build that may be running."""
    from fairlead_strategies.deepspeed.runtime import build

    old, new = tmp_path / "async_io" / "lock", tmp_path / "cpu_adam" / "lock"
    for lock in (old, new):
        lock.parent.mkdir()
        lock.touch()
    os.utime(old, (0, time.time() - 3600))
    config = DeepSpeedStrategyConfig.model_validate({"stage": 2})
    build(config, replace(ranks.context(config), environ={"TORCH_EXTENSIONS_DIR": str(tmp_path)}))
    [warned] = [str(one.message) for one in recwarn if "lock" in str(one.message)]
    assert warned.startswith(f"{old} is 60 minutes old")
    assert warned.endswith(f"rm {old}")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stage": 2, "offload_optimizer": True, "offload_optimizer_device": "nvme"}, "needs `stage: 3`"),
        ({"stage": 2, "offload_parameters": True}, "needs `stage: 3`"),
        ({"stage3_max_live_parameters": -1}, "greater than or equal to 0"),
        ({"config": {}, "stage3_param_persistence_threshold": 0}, "no effect beside `config`"),
    ],
)
def test_wrong_fields_are_refused_with_the_reason(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        DeepSpeedStrategyConfig.model_validate(fields)
