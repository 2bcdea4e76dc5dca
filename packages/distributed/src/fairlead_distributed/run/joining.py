"""Joins the ranks that a launcher started, before Lightning does anything."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

from fairlead.network import library_variables
from fairlead.resolve import Resolution
from fairlead_distributed import destroy_process_group, init_process_group, tcp_store
from fairlead_launch.ports import inherited_listener

DEFAULT_TIMEOUT = timedelta(minutes=30)


def join_process_group(resolution: Resolution, environ: Mapping[str, str], *, config_hash: str | None = None) -> None:
    """Makes this rank one of its group, if a launcher started several; Lightning then uses that group.

    The ranks need each other before the run directory is opened: one of them decides for all. They meet with the
    deadline `environment.preflight_timeout`; who is missing or different is named on every rank.

    Args:
        resolution: The resolved settings of this rank.
        environ: The environment variables of the process.
        config_hash: A digest of what decides what is computed; it has to be the same on all ranks.

    Raises:
        PortError: Rank 0 cannot listen on the port that was given.
        RendezvousError: The ranks did not find each other, or do not fit together.
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
    leave_at_exit()


def apply_network_settings(resolution: Resolution, environ: Mapping[str, str]) -> None:
    """Exports the config's settings of NCCL and gloo, where the environment does not have them already.

    Args:
        resolution: The resolved settings.
        environ: The environment of this process, which the libraries read; a mapping that is not it shows what would
            be set, and a read-only one nothing.
    """
    if isinstance(environ, MutableMapping):
        for name, value in library_variables(resolution.environment).items():
            environ.setdefault(name, value)


def leave_at_exit() -> None:
    """Has this process leave its group before the interpreter goes down.

    With gloo's threads still running it is sometimes aborted then ("terminate called without an
    active exception"), after everything went well.
    """
    atexit.unregister(destroy_process_group)
    atexit.register(destroy_process_group)


def _device(resolution: Resolution) -> torch.device:
    """This rank's own device, by its local rank."""
    if resolution.device_type != "cuda":
        return torch.device("cpu")
    local = int(resolution.value("local_rank"))
    # With one visible GPU a task (srun --gpus-per-task=1) every rank's own device is cuda:0.
    visible = torch.cuda.device_count()
    indices = resolution.device_indices
    return torch.device("cuda", indices[local] if indices else 0 if visible == 1 else local)
