"""Which run a loop's is: its directory, what identifies it, and the machine as the Fabric sees it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import lightning.fabric as lf
from torch.nn import Module

from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.interfaces import Setting
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution, resolve
from fairlead_lightning.custom_loop.state import inner_module
from fairlead_runs.describe import described

__all__ = ["as_seen", "job_of", "only_what_is_kept", "run_config"]

_THE_LOOPS_OWN: Final = ("every_n_steps", "every_n_epochs", "every_n_minutes", "on_validation", "save_weights_only")


def job_of(fabric: lf.Fabric, run: RunConfig, config: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the run, in the shape of a job: the config's limits are found where a trainer's are."""
    modules = {name: value for name, value in state.items() if isinstance(value, Module)}
    return {
        "run": run.model_dump(mode="json"),
        "model": {name: described(inner_module(value)) for name, value in modules.items()},
        "data": None,
        "trainer": {**config, "precision": str(fabric.strategy.precision.precision)},
    }


def as_seen(
    fabric: lf.Fabric,
    config: Mapping[str, Any],
    batch_policy: Literal["keep_global", "keep_per_device"] | None,
    *,
    environ: Mapping[str, str],
    plugins: PluginManager,
) -> Resolution:
    """The resolution of this machine, corrected to what the Fabric has decided.

    Args:
        fabric: The Fabric, launched.
        config: What the loop's own config says of the batch: `accumulate_grad_batches`.
        batch_policy: What stays the same when another number of ranks goes on.
        environ: The environment variables.
        plugins: The plugin manager.

    Raises:
        ConfigError: `accumulate_grad_batches` is no number.
    """
    accumulate = config.get("accumulate_grad_batches", 1)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(
            f"accumulate_grad_batches cannot be {accumulate!r}",
            where="LoopRun(config=...)",
            fix="give the number of batches of a rank to one optimizer step",
        )
    resolution = resolve(TrainerConfig(), environ=environ, plugins=plugins)
    why = "the script's own Fabric"
    nodes = int(getattr(fabric.strategy, "num_nodes", 1))
    seen = {
        "world_size": fabric.world_size,
        "num_nodes": nodes,
        "devices": fabric.world_size // nodes,
        "global_rank": fabric.global_rank,
        "local_rank": fabric.local_rank,
        "node_rank": fabric.node_rank,
        "strategy": type(fabric.strategy).__name__,
        "precision": str(fabric.strategy.precision.precision),
        "accelerator": type(fabric.accelerator).__name__,
    }
    return dataclasses.replace(
        resolution,
        settings={**resolution.settings, **{name: Setting(value, why) for name, value in seen.items()}},
        world_size=fabric.world_size,
        num_nodes=nodes,
        devices=fabric.world_size // nodes,
        trainer=TrainerConfig(accumulate_grad_batches=accumulate, batch_policy=batch_policy),
    )


def run_config(run: str | os.PathLike[str] | RunConfig | None) -> RunConfig:
    """The run's name and place; a path says both, and that nothing is seeded here."""
    if isinstance(run, RunConfig):
        return run
    if run is None:
        return RunConfig(seed=None)
    path = Path(run)
    return RunConfig(name=path.name, dir=str(path.parent), seed=None)


def only_what_is_kept(config: CheckpointConfig) -> CheckpointConfig:
    """Refuses what the loop decides itself, rather than not doing it."""
    set_here = [name for name in _THE_LOOPS_OWN if name in config.model_fields_set]
    if set_here:
        raise ConfigError(
            f"{', '.join(set_here)}: when to save is the loop's to decide",
            where="LoopRun(checkpoint=...)",
            fix="leave it out, and call run.save() where a checkpoint is due",
        )
    return config
