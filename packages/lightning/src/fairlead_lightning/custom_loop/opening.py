"""Opens the run of a loop: what identifies it, and the machine as the Fabric sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import lightning.fabric as lf
import torch.distributed as dist
from torch.nn import Module

from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.errors import ConfigError
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import resolve
from fairlead_distributed.process_group import leave_at_exit
from fairlead_distributed.run.opening import open_session
from fairlead_distributed.run.session import RunSession
from fairlead_lightning.checkpoint.commits import copies_of
from fairlead_lightning.custom_loop.saving import LoopCheckpoints, own_checkpoint_io
from fairlead_lightning.custom_loop.state import inner_module
from fairlead_lightning.fit import as_seen, described_job
from fairlead_runs.batch_policy import batch_plan
from fairlead_runs.describe import described


def open_loop(
    fabric: lf.Fabric,
    run: RunConfig,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    checkpoint: CheckpointConfig,
    finite: bool,
    batch_policy: Literal["keep_global", "keep_per_device"] | None,
    environ: Mapping[str, str] | None,
    plugins: PluginManager | None,
) -> tuple[RunSession, LoopCheckpoints | None, int]:
    """Opens the run on all ranks: session, checkpoints (None: it is finished), and batches to an optimizer step."""
    environ = os.environ if environ is None else environ
    plugins = plugins if plugins is not None else default_plugins()
    if fabric.world_size > 1 and not dist.is_initialized():
        raise ConfigError("the ranks are not connected", where="LoopRun", fix="call fabric.launch() before")
    if dist.is_initialized():
        leave_at_exit()
    accumulate = config.get("accumulate_grad_batches", 1)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(
            f"accumulate_grad_batches cannot be {accumulate!r}",
            where="LoopRun(config=...)",
            fix="give the number of batches of a rank to one optimizer step",
        )
    precision = str(fabric.strategy.precision.precision)
    modules = {name: described(inner_module(value)) for name, value in state.items() if isinstance(value, Module)}
    job = described_job(run, modules, None, {**config, "precision": precision})
    batch = TrainerConfig(accumulate_grad_batches=accumulate, batch_policy=batch_policy)
    resolution = as_seen(fabric, resolve(TrainerConfig(), environ=environ, plugins=plugins), batch, precision)
    copies = copies_of(own_checkpoint_io(fabric))
    session = open_session(job, resolution, run, environ=environ, copies=copies)
    if session.finished is not None:
        return session, None, 1
    try:
        session.join(fabric.global_rank, fabric.local_rank, fabric.node_rank)
        session.beat("setup", 0)
        accumulate = batch_plan(resolution, session.previous)
        return session, LoopCheckpoints(fabric, session, checkpoint, finite=finite), accumulate
    except BaseException:
        session.close()
        raise
