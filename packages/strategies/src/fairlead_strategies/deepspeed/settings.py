"""What DeepSpeed is configured with: from our fields, or a JSON file; where that contradicts the trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fairlead import Finding, Resolution
from fairlead.errors import ConfigError
from fairlead.findings import Severity
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig

_PARTS: Final = ("offload_optimizer", "offload_param")


def nvme_findings(settings: Mapping[str, Any], *, here: bool) -> Iterator[Finding]:
    """Whether the folders for the device `nvme` are there; `here`: the job runs on this machine, not on others.

    Whether libaio is there DeepSpeed asks by compiling, once a run starts.
    """
    severity: Severity = "error" if here else "warning"
    for path in sorted({str(part.get("nvme_path")) for part in _used(settings)}):
        if not (Path(path).is_dir() and os.access(path, os.W_OK)):
            yield Finding(
                severity,
                "deepspeed-nvme",
                f"there is no folder {path} to write to on this machine",
                where="trainer.strategy.nvme_path",
                why="offloaded state is stored there",
                fix="give the folder of a fast local disk as nvme_path",
            )


def uses_nvme(settings: Mapping[str, Any]) -> bool:
    """Whether anything is offloaded to NVMe."""
    return bool(_used(settings))


def _used(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    zero = settings.get("zero_optimization")
    parts = [zero.get(name) for name in _PARTS] if isinstance(zero, Mapping) else []
    return [part for part in parts if isinstance(part, Mapping) and part.get("device") == "nvme"]


WHERE: Final = "trainer.strategy.config"
AUTO: Final = "auto"
FROM_THE_TRAINER: Final = (
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_clipping",
)
"""Where a file says `auto`, the trainer says it; files for Transformers' Trainer do so."""
_ZERO: Final = (
    "stage",
    "contiguous_gradients",
    "overlap_comm",
    "allgather_partitions",
    "reduce_scatter",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""The fields that are settings of `zero_optimization`."""


def settings_of(config: DeepSpeedStrategyConfig, device_type: str) -> dict[str, Any]:
    """DeepSpeed's configuration, without what only the trainer says: a new dictionary, to be changed freely.

    Args:
        config: The fields, or `config`.
        device_type: `cpu`, `cuda`, ...: what `zero_force_ds_cpu_optimizer: auto` means.

    Raises:
        ConfigError: The file cannot be read or holds something else.

    Example:
        >>> settings_of(DeepSpeedStrategyConfig(stage=2, offload_optimizer=True), "cpu")["zero_force_ds_cpu_optimizer"]
        False
    """
    if config.config is not None:
        return _given(config.config)
    zero: dict[str, Any] = {name: getattr(config, name) for name in _ZERO}
    offloaded = {"nvme_path": config.nvme_path, "pin_memory": config.pin_memory}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": config.offload_optimizer_device, **offloaded}
    if config.offload_parameters:
        zero["offload_param"] = {"device": config.offload_params_device, **offloaded}
    force = config.zero_force_ds_cpu_optimizer
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": config.zero_allow_untested_optimizer,
        "zero_force_ds_cpu_optimizer": device_type != "cpu" if force == AUTO else force,
        "activation_checkpointing": {
            "partition_activations": config.partition_activations,
            "cpu_checkpointing": config.cpu_checkpointing,
        },
    }


def conflicts(settings: Mapping[str, Any], resolution: Resolution) -> Iterator[Finding]:
    """What a configuration of DeepSpeed's own says otherwise than the trainer; each finding names both.

    Only what both say: where one of them is silent, the other counts.
    """
    trainer = resolution.trainer
    steps = settings.get("gradient_accumulation_steps")
    if steps is not None and steps != trainer.accumulate_grad_batches:
        yield _conflict(
            "gradient_accumulation_steps", steps, "accumulate_grad_batches", trainer.accumulate_grad_batches
        )
    clip = settings.get("gradient_clipping")
    if clip is not None and trainer.gradient_clip_val is not None and clip != trainer.gradient_clip_val:
        yield _conflict("gradient_clipping", clip, "gradient_clip_val", trainer.gradient_clip_val)
    zero = settings.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("compute_grad_norm") is False and (clip or trainer.gradient_clip_val):
        yield _conflict("zero_optimization.compute_grad_norm", False, "gradient_clip_val", trainer.gradient_clip_val)
    computes, name = sixteen_bits(resolution.precision), resolution.precision.name
    for kind in ("fp16", "bf16"):
        part = settings.get(kind, settings.get("bfloat16") if kind == "bf16" else None)
        if not isinstance(part, Mapping):
            continue
        enabled = bool(part.get("enabled", False))
        if enabled != (computes == kind):
            yield _conflict(f"{kind}.enabled", enabled, "precision", computes or name)
    batch, micro = settings.get("train_batch_size"), settings.get("train_micro_batch_size_per_gpu")
    steps = trainer.accumulate_grad_batches
    if isinstance(batch, int) and isinstance(micro, int) and batch != micro * steps * resolution.world_size:
        yield Finding(
            "error",
            "deepspeed-conflict",
            f"train_batch_size is {batch}, which is not {micro} samples x {steps} batches x "
            f"{resolution.world_size} ranks = {micro * steps * resolution.world_size}",
            where=f"{WHERE}.train_batch_size",
            fix="leave train_batch_size out: DeepSpeed computes it",
        )


def auto_settings(settings: Any, path: str = "") -> Iterator[str]:
    """The paths of the settings that are `auto`, which only Transformers' Trainer replaces."""
    if settings == AUTO:
        yield path
    elif isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from auto_settings(value, f"{path}.{name}" if path else str(name))


def _given(config: dict[str, Any] | str) -> dict[str, Any]:
    found = _read(config) if isinstance(config, str) else config
    copied: dict[str, Any] = json.loads(json.dumps(found))
    return {name: value for name, value in copied.items() if not (name in FROM_THE_TRAINER and value == AUTO)}


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}", where=WHERE, why=error.strerror, fix="give the path of a JSON file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON", where=WHERE, why=str(error)) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not an object", where=WHERE)
    return found


def sixteen_bits(precision: Any) -> str | None:
    """`fp16` or `bf16`, where a precision computes in it; None: neither."""
    text = str(getattr(precision, "dtype", None) or getattr(precision, "precision", ""))
    return "bf16" if text.startswith(("bf16", "bfloat16")) else "fp16" if text.startswith(("16", "float16")) else None


def _conflict(name: str, value: object, field: str, requested: object) -> Finding:
    return Finding(
        "error",
        "deepspeed-conflict",
        f"DeepSpeed's configuration says {name}: {json.dumps(value)}, and the trainer says {field}: {requested}",
        where=f"{WHERE}.{name}",
        why="both are meant for the same, and only one of them can count",
        fix=f"leave {name} out of DeepSpeed's configuration: the trainer's setting is passed on to it",
    )
