"""Opens the run of a custom training loop: what identifies it, its ranks, and how it ends for a stop."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist

from fairlead.config import RunConfig, TrainerConfig
from fairlead.interfaces import BuildContext
from fairlead.plugins import PluginManager
from fairlead.resolution import Resolution
from fairlead.resolve import resolve
from fairlead_distributed._sharded import is_dtensor, is_fsdp1, is_fully_sharded
from fairlead_distributed.info import get_local_rank, get_rank, get_world_size
from fairlead_distributed.process_group import leave_at_exit
from fairlead_distributed.run.data import Replicas
from fairlead_distributed.run.ending import Ending
from fairlead_distributed.run.opening import open_session
from fairlead_distributed.run.registry import Layout, Registry
from fairlead_distributed.run.scripts import advice_for_scripts, as_seen, described_job
from fairlead_distributed.run.session import RunSession
from fairlead_runs.batch_policy import batch_plan
from fairlead_runs.describe import described
from fairlead_runs.guard import StopGuard, build_guard


def opened(
    run: RunConfig,
    settings: Mapping[str, Any],
    registry: Registry,
    config: TrainerConfig,
    *,
    environ: Mapping[str, str],
    plugins: PluginManager,
    guard: StopGuard | None,
) -> tuple[StopGuard, RunSession, Resolution, int]:
    """Opens the run on all ranks: its guard, session, the machine as it is, and batches to an optimizer step.

    Raises:
        ConfigError: There are more ranks than are connected, or the run cannot be opened.
    """
    if dist.is_initialized():
        leave_at_exit()
    resolution = resolve(config, environ=environ, plugins=plugins)
    topology = resolution.topology
    seen = {
        "world_size": get_world_size(),
        "num_nodes": topology.num_nodes.value if topology.num_nodes is not None and get_world_size() > 1 else 1,
        "global_rank": get_rank(),
        "local_rank": get_local_rank(environ),
        "node_rank": topology.node_rank.value if topology.node_rank is not None else 0,
    }
    connect = "call fairlead_distributed.init_process_group() before Run"
    with advice_for_scripts():
        resolution = as_seen(resolution, seen, config, by="Run", connect=connect)
        given = guard is not None
        guard = guard or build_guard(BuildContext(resolution, environ, plugins))
        if not given and threading.current_thread() is threading.main_thread():
            guard.flags.install()
        if get_rank() == 0:
            guard.watch_opening("opening the run")
        plain = {name: getattr(one, "_orig_mod", one) for name, one in registry.modules().items()}  # not compiled
        modules = {name: described(module) for name, module in plain.items()}
        session = open_session(described_job(run, modules, None, settings), resolution, run, environ=environ)
        if session.finished is not None:
            return guard, session, resolution, 1
        try:
            session.join(seen["global_rank"], seen["local_rank"], seen["node_rank"])
            session.beat("setup", 0)
            return guard, session, resolution, batch_plan(resolution, session.previous)
        except BaseException:
            session.close()
            raise


def replicas_here(layout: Layout, registry: Registry) -> Replicas | None:
    """Which ranks take different batches; None where the model is split in more ways than over data-parallel ranks."""
    every = Replicas(get_world_size(), get_rank())
    if layout == "replicated":
        return every
    if layout == "stages":
        return None
    parts = [part for module in registry.modules().values() for part in module.modules()]
    if any(map(is_fsdp1, parts)):
        return every
    tensors = [one for module in registry.modules().values() for one in module.parameters() if is_dtensor(one)]
    cuts = [sum(not placement.is_replicate() for placement in one.placements) for one in tensors]
    return every if any(map(is_fully_sharded, parts)) and all(cut == 1 for cut in cuts) else None


class Loop(Protocol):
    """What the end of a stop asks of a custom training loop's run."""

    steps: int

    def progress(self) -> object:
        """Changes with each batch and step."""

    def close_metrics(self) -> None:
        """Writes out what was logged."""

    def say(self, text: str) -> None:
        """Tells the user, on rank 0."""


class LoopEnding(Ending):
    """How a custom training loop ends for a stop."""

    def __init__(self, session: RunSession, guard: StopGuard, context: BuildContext, *, loop: Loop) -> None:
        super().__init__(session, guard, context, rank=get_rank(), step=lambda: loop.steps, saves=True, say=loop.say)
        self._loop = loop

    def batches_done(self) -> object:
        """Batches and steps."""
        return self._loop.progress()

    def close_loggers(self, status: str) -> None:
        """Writes out what was logged."""
        self._loop.close_metrics()
