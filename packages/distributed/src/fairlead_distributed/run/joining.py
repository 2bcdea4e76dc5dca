"""Joins the ranks that a launcher started, before Lightning does anything."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fairlead.network import library_variables
from fairlead.resolve import Resolution
from fairlead_distributed import init_process_group, tcp_store
from fairlead_distributed.alarms import trouble_of
from fairlead_distributed.process_group import DEFAULT_TIMEOUT, decline_process_group
from fairlead_distributed.rendezvous import DECLINE_S
from fairlead_launch.ports import inherited_listener
from fairlead_launch.reports import REPORT_FD


def join_process_group(resolution: Resolution, environ: Mapping[str, str], *, config_hash: str | None = None) -> None:
    """Makes this rank one of its group, if a launcher started several; Lightning then uses that group.

    It has to be before the run directory is opened, since one of them decides for all. Ranks that are missing after
    `environment.preflight_timeout`, or have another `config_hash`, are named on every rank.
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
        init_method=_rendezvous_address(resolution),
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


def tell_of_failure(resolution: Resolution, environ: Mapping[str, str], why: str) -> None:
    """Tells the ranks that wait for this one in `join_process_group` that it has failed before; takes seconds.

    Where a supervisor has started them, or they have met by now, they learn of it by themselves.
    """
    alone = not resolution.topology.launched or resolution.world_size == 1
    if alone or dist.is_initialized() or REPORT_FD in environ or resolution.backend == "xla":
        return
    decline = partial(
        decline_process_group,
        why,
        init_method=_rendezvous_address(resolution),
        rank=int(resolution.value("global_rank")),
        world_size=resolution.world_size,
        environ=environ,
        device=torch.device(resolution.device_type if resolution.device_type == "cuda" else "cpu"),
        start=resolution.topology.start,
    )
    trouble_of(2 * DECLINE_S, decline)  # they may have failed as well; this rank has an error to show anyway


def _rendezvous_address(resolution: Resolution) -> str:
    return f"tcp://{resolution.value('main_address')}:{resolution.value('main_port')}"


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
