"""Who am I in this run: rank, world size, backend. Sane answers (0 of 1) in a run of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch.distributed as dist

from fairlead_distributed import _environ
from fairlead_distributed.errors import NotInitializedError


class DistributedInfo(TypedDict):
    """The state of torch.distributed in this process.

    `available`: torch was built with it. `initialized`: there is a process group. `backend`: its real name
    (`nccl`, `gloo`, ...), None without a group. `world_size` and `rank` are 1 and 0 without a group.
    """

    available: bool
    initialized: bool
    world_size: int
    rank: int
    backend: str | None


def is_initialized() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """The number of processes in the group; 1 without a group."""
    return dist.get_world_size() if is_initialized() else 1


def get_rank() -> int:
    """This process's rank in the group, from 0; 0 without a group."""
    return dist.get_rank() if is_initialized() else 0


def get_local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number on its own machine: SLURM_LOCALID in a SLURM step, LOCAL_RANK, a plugin's answer, or 0.

    It selects the device. The global rank does not: on the second machine of 8 GPUs, rank 8 drives GPU 0.
    """
    return _environ.local_rank(_environ.or_process(environ)) or 0


def get_distributed_info() -> DistributedInfo:
    """What torch.distributed is in this process, for logs and reports."""
    initialized = is_initialized()
    return {
        "available": dist.is_available(),
        "initialized": initialized,
        "world_size": get_world_size(),
        "rank": get_rank(),
        "backend": str(dist.get_backend()) if initialized else None,
    }


def require_initialized(operation: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether there is a group; a NotInitializedError where there should be one, of several processes, and is not."""
    if is_initialized():
        return True
    rank, world_size = _environ.rank_and_world_size(_environ.or_process(environ))
    if world_size > 1:
        raise NotInitializedError(
            f"{operation} was called before the process group exists, or after it was destroyed",
            where=f"rank {rank} of {world_size}",
            why="the launcher started several processes, but this one has not joined them, or has left them",
            fix="call fairlead_distributed.init_process_group() first",
        )
    return False


def startup_lines(environ: Mapping[str, str] | None = None) -> list[str]:
    """What a run says at its start: the group and the master on rank 0, one line on every rank.

    Example:
        >>> startup_lines({})
        ['Distributed training initialized: no backend, 1 processes', '[Rank 0] local rank 0, world size 1']
    """
    environ = _environ.or_process(environ)
    info = get_distributed_info()
    lines = []
    if info["rank"] == 0:
        backend = f"{info['backend']} backend" if info["backend"] else "no backend"
        lines.append(f"Distributed training initialized: {backend}, {info['world_size']} processes")
        if environ.get("MASTER_ADDR"):
            lines.append(f"Master: {environ['MASTER_ADDR']}:{environ.get('MASTER_PORT') or 29500}")
    lines.append(f"[Rank {info['rank']}] local rank {get_local_rank(environ)}, world size {info['world_size']}")
    return lines
