"""Joining and leaving the group of all processes of a run."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fairlead.errors import ConfigError, MissingDependencyError
from fairlead.install import install_line
from fairlead.starts import Start
from fairlead_distributed import _environ
from fairlead_distributed.errors import AlreadyInitializedError, RendezvousError
from fairlead_distributed.info import DistributedInfo, get_distributed_info, get_rank, get_world_size, is_initialized
from fairlead_distributed.opening import open_store
from fairlead_distributed.preflight import own_facts
from fairlead_distributed.rendezvous import DECLINE_S, meet
from fairlead_launch.environment import BACKEND
from fairlead_launch.reports import say_joining

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other in each collective."""
PREFLIGHT_TIMEOUT = timedelta(minutes=5)
"""How long ranks may take to come, at the start."""


def setup_distributed(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """`(rank, world_size)` of this process as its launcher says: SLURM, else torchrun's variables, else one process.

    A batch script or `salloc` shell is no step of SLURM, and where torchrun runs inside the step, or the step has one
    task, RANK and WORLD_SIZE are the workers' numbers.

    Raises:
        ConfigError: A variable is not a number, one of a pair is missing, or the rank is outside the world.

    Example:
        >>> setup_distributed({"SLURM_PROCID": "3", "SLURM_NPROCS": "8"})
        (3, 8)
    """
    return _environ.rank_and_world_size(_environ.or_process(environ))


def rank_device(environ: Mapping[str, str] | None = None) -> torch.device:
    """This rank's own device: the CUDA (or ROCm) device of its *local* rank, or the CPU where there is none.

    Raises:
        ConfigError: There are GPUs, but none for this local rank, or the launcher did not say the local rank.
    """
    environ = _environ.or_process(environ)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), _environ.local_rank(environ)
    if local_rank is None:
        if _environ.rank_and_world_size(environ)[1] > 1 and count > 1:
            raise ConfigError(
                "this rank does not know which GPU is its own",
                where="environment, LOCAL_RANK",
                why=f"there are {count} GPUs and several processes, and LOCAL_RANK is not set",
                fix="set LOCAL_RANK to the process's number on its machine, or pass device=",
            )
        local_rank = 0
    # A scheduler that binds one GPU to each task (--gpus-per-task=1) shows every task a machine with one GPU.
    hidden = any(environ.get(f"{vendor}_VISIBLE_DEVICES") for vendor in ("CUDA", "HIP", "ROCR"))
    if count == 1 and hidden:
        local_rank = 0
    if local_rank >= count:
        raise ConfigError(
            f"there is no GPU for local rank {local_rank}",
            where="environment, LOCAL_RANK",
            why=f"this process sees {count} GPU{'s'[: count != 1]}",
            fix=f"start at most {count} processes on a machine, or use backend='gloo' and device='cpu'",
        )
    return torch.device("cuda", local_rank)


def init_process_group(
    backend: str = "auto",
    init_method: str = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    store: dist.Store | None = None,
    environ: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    preflight_timeout: timedelta | None = None,
    start: Start | None = None,
    config_hash: str | None = None,
) -> None:
    """Makes this process one of a group, after it has taken its own device.

    Unlike `torch.distributed.init_process_group` it gives each start its own keys in the store, so that workers
    restarted by torchrun find each other. Before the backend starts, all ranks meet: those that do not come in time
    are named, with their hosts where the launcher tells them, and so is a rank of another job, config, device or
    version of torch. Without a port from the launcher or the user, rank 0 takes a free one and the others find it.

    Args:
        backend: `auto` is that of `fairlead launch --backend`, or nccl (RCCL on AMD) for a CUDA device, xla for an XLA
            device, else gloo. Or any backend of torch, by name.
        init_method: `env://` reads MASTER_ADDR and MASTER_PORT (29500 when unset), and where there is no MASTER_ADDR
            the variables of the scheduler, such as SLURM's list of nodes; `tcp://host:port`; or `file:///path` for a
            new file on a file system that all ranks see.
        world_size: The number of processes; None reads it as `setup_distributed` does, else from mpirun's variables or
            those of another launcher that an installed plugin knows.
        rank: This process's number, from 0; None as above.
        timeout: For each collective of the group.
        store: A store that all ranks share, instead of `init_method`.
        environ: The environment to read; None is this process's own.
        device: This rank's device; None is `rank_device(environ)`.
        preflight_timeout: How long ranks may take to come; None is 5 minutes, or `timeout` where that is shorter.
        start: What the launcher says of this start; None asks the environment's plugins. Its `ports` replace
            the port in `init_method`.
        config_hash: A digest of what decides what is computed; it has to be the same on all ranks.

    Raises:
        AlreadyInitializedError: There is a group already.
        ConfigError: Rank, world size, address or backend are wrong or missing.
        PortError: Rank 0 cannot listen on the port.
        RendezvousError: The ranks did not find each other: an AddressNotFoundError, AddressUnreachableError or
            PreflightError (`missing` names the ranks), or the store went away, or the backend could not connect them.

    Example:
        >>> init_process_group(environ={})
        >>> get_world_size()
        1
        >>> destroy_process_group()
    """
    if is_initialized():
        raise AlreadyInitializedError(
            "the process group is initialised already",
            where=f"rank {get_rank()} of {get_world_size()}, backend {dist.get_backend()}",
            why="a second group of all processes cannot be made beside the first",
            fix="use the group that is there, or call destroy_process_group() on all ranks first",
        )
    environ = _environ.or_process(environ)
    rank, world_size = _rank_and_world_size(rank, world_size, environ)
    preflight_timeout = preflight_timeout if preflight_timeout is not None else min(PREFLIGHT_TIMEOUT, timeout)
    if min(timeout, preflight_timeout) <= timedelta(0):
        raise ConfigError(f"the timeout must be positive, not {min(timeout, preflight_timeout)}", where="timeout")
    backend = environ.get(BACKEND, backend) if backend == "auto" else backend
    own = _own_device(backend, device, environ)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    backend = _backend(backend, own)
    nccl = "nccl" in backend
    say_joining(environ)
    opened, start = open_store(
        init_method, store, rank, world_size, start=start, environ=environ, timeout=preflight_timeout
    )
    with closing(opened):
        facts = own_facts(own, start=start, config_hash=config_hash, exclusive=nccl and world_size > 1)
        keys = meet(opened, rank, world_size, facts, start, environ=environ, timeout=preflight_timeout)
    keys.set_timeout(timeout)
    try:
        dist.init_process_group(
            backend,
            store=keys,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # With its device NCCL connects now, not in the first collective, and a wrong set-up fails here.
            device_id=own if own.type == "cuda" and nccl else None,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"all {world_size} processes came to {opened.where}, but {backend} could not connect them",
            where=f"rank {rank} of {world_size}",
            why=str(error).splitlines()[0],
            fix="name the network interface between the machines (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME=eth0); "
            "NCCL_DEBUG=INFO says more",
        ) from error
    leave_at_exit()


def decline_process_group(
    why: str,
    *,
    init_method: str,
    rank: int,
    world_size: int,
    environ: Mapping[str, str],
    device: torch.device,
    start: Start | None = None,
) -> None:
    """Tells the ranks that wait in `init_process_group` that this one does not come; takes seconds.

    Raises:
        RendezvousError: Always: a PreflightError where the others were there.
    """
    timeout = timedelta(seconds=DECLINE_S)
    opened, start = open_store(init_method, None, rank, world_size, start=start, environ=environ, timeout=timeout)
    with closing(opened):
        facts = own_facts(device, start=start)
        meet(opened, rank, world_size, facts, start, environ=environ, timeout=timeout, declines=why)


def destroy_process_group() -> None:
    """Leaves the group and frees it. Does nothing when there is none."""
    if is_initialized():
        dist.destroy_process_group()


def leave_at_exit() -> None:
    """Has this process leave its group before the interpreter ends: gloo's threads sometimes abort it then."""
    atexit.unregister(destroy_process_group)
    atexit.register(destroy_process_group)


def group_store() -> dist.Store | None:
    """The store of the group of all processes, for messages beside its collectives; None without a group.

    It serves one thread at a time: another one needs `clone()`. Put keys under a `PrefixStore` of your own.

    Example:
        >>> with process_group(environ={}):
        ...     group_store().set("mine/step", "7")
    """
    return dist.distributed_c10d._get_default_store() if is_initialized() else None


def _with_arguments_of(_: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """For editors and type checkers; nothing is wrapped."""
    return lambda function: function


@_with_arguments_of(init_process_group)
@contextmanager
def process_group(*args: Any, **kwargs: Any) -> Iterator[DistributedInfo]:
    """`init_process_group` for the length of a block, with the same arguments.

    Example:
        >>> with process_group(environ={}) as info:
        ...     print(info["rank"], "of", info["world_size"])
        0 of 1
    """
    init_process_group(*args, **kwargs)
    try:
        yield get_distributed_info()
    finally:
        destroy_process_group()


def _rank_and_world_size(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither", where="init_process_group")
    if rank is None or world_size is None:
        launched = _environ.by_plugins(environ)
        return launched[:2] if launched is not None else _environ.rank_and_world_size(environ)
    return _environ.checked(rank, world_size, "init_process_group(rank=, world_size=)")


def _own_device(backend: str, device: torch.device | str | None, environ: Mapping[str, str]) -> torch.device:
    if device is not None:
        return torch.device(device)
    try:
        return rank_device(environ)
    except ConfigError:
        if backend == "gloo":  # on purpose more processes than GPUs, or none of them on a GPU
            return torch.device("cpu")
        raise


def _backend(backend: str, device: torch.device) -> str:
    if backend == "auto":
        backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    for name in (part.rpartition(":")[2] for part in backend.lower().split(",")):
        if name == "xla" and name not in dist.Backend.backend_list:
            raise MissingDependencyError(
                "the backend 'xla' needs torch-xla", fix=f"{install_line('xla')}, and import torch_xla first"
            )
        if name not in dist.Backend.backend_list or name == dist.Backend.UNDEFINED:
            known = sorted(set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED})
            raise ConfigError(
                f"unknown backend {name!r}", where="backend", fix=f"use auto or one of {', '.join(known)}"
            )
        if name == "mpi" and not dist.is_mpi_available():
            raise ConfigError(
                "the backend 'mpi' cannot be used here",
                where="backend",
                why="this torch was built without MPI, as those of PyPI are",
                fix="use gloo or nccl, which mpirun can start as well; or build torch from source beside your MPI",
            )
        if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            why = "no CUDA or ROCm device is visible" if dist.is_nccl_available() else "this torch was built without it"
            raise ConfigError("the backend 'nccl' cannot be used here", where="backend", why=why, fix="use 'gloo'")
    return backend
