"""Joins the ranks that a launcher started, before Lightning does anything."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

from fairlead.network import library_variables
from fairlead.resolve import Resolution
from fairlead_distributed import init_process_group, tcp_store
from fairlead_distributed.process_group import DEFAULT_TIMEOUT
from fairlead_launch.ports import inherited_listener


def join_process_group(resolution: Resolution, environ: Mapping[str, str], *, config_hash: str | None = None) -> None:
    """Makes this rank one of its group, if a launcher started several; Lightning then uses that group.

    It has to be before the run directory is opened, since one of them decides for all. Who is missing after
    `environment.preflight_timeout`, or has another `config_hash`, is named on every rank.
    """
    apply_network_settings(resolution, environ)  # ranks that Lightning starts from this process inherit them
    if not resolution.topology.launched or resolution.world_size == 1 or dist.is_initialized():
        return
    if resolution.backend == "xla":
        return  # torch_xla brings its own processes and its own group
    strategy = resolution.strategy
    timeout = getattr(strategy, "timeout", None)
    timeout = timeout if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT
    listener = inherited_listener(environ)
    init_process_group(
        backend=resolution.backend,
        init_method=f"tcp://{resolution.value('main_address')}:{resolution.value('main_port')}",
        world_size=resolution.world_size,
        rank=int(resolution.value("global_rank")),
        timeout=timeout,
        store=tcp_store(listener) if listener is not None else None,
        environ=environ,
        device=_device(resolution),
        preflight_timeout=resolution.environment.preflight_timeout,
        start=resolution.topology.start,
        config_hash=config_hash,
    )


def apply_network_settings(resolution: Resolution, environ: Mapping[str, str]) -> None:
    """Exports the config's settings of NCCL and gloo, where the environment does not have them and is not read-only."""
    if isinstance(environ, MutableMapping):
        for name, value in library_variables(resolution.environment).items():
            environ.setdefault(name, value)


def _device(resolution: Resolution) -> torch.device:
    if resolution.device_type != "cuda":
        return torch.device("cpu")
    local = int(resolution.value("local_rank"))
    # With one visible GPU a task (srun --gpus-per-task=1) every rank's own device is cuda:0.
    visible = torch.cuda.device_count()
    indices = resolution.device_indices
    return torch.device("cuda", indices[local] if indices else 0 if visible == 1 else local)
