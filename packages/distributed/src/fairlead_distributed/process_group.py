"""Joining and leaving the group of all processes of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from fairlead.detect import choose_environment
from fairlead.errors import ConfigError, MissingDependencyError
from fairlead.plugins import default_plugins
from fairlead_distributed import _environ, rendezvous
from fairlead_distributed.errors import AlreadyInitializedError, RendezvousError
from fairlead_distributed.info import DistributedInfo, get_distributed_info, get_rank, get_world_size, is_initialized
from fairlead_distributed.store import DEFAULT_PORT

__all__ = [
    "DEFAULT_TIMEOUT",
    "destroy_process_group",
    "init_process_group",
    "process_group",
    "rank_device",
    "setup_distributed",
]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other, at the start and in each collective."""


def setup_distributed(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """`(rank, world_size)` of this process as its launcher says: SLURM, else torchrun's variables, else one process.

    In a SLURM step, SLURM_PROCID and SLURM_NPROCS (or SLURM_NTASKS). A batch script or `salloc` shell is not a step,
    and where torchrun runs inside the step, or the step has one task, RANK and WORLD_SIZE are the workers' numbers.

    Raises:
        ConfigError: A variable is not a number, one of a pair is missing, or the rank is outside the world.

    Example:
        >>> setup_distributed({"SLURM_PROCID": "3", "SLURM_NPROCS": "8"})
        (3, 8)
        >>> setup_distributed({})
        (0, 1)
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
) -> None:
    """Makes this process one of a group, after it has taken its own device.

    Unlike `torch.distributed.init_process_group` it gives each start its own keys in the store, so that workers
    restarted by torchrun find each other, and it says which ranks are missing when the timeout expires.

    Args:
        backend: `auto` is nccl (RCCL on AMD) for a CUDA device, xla for an XLA device, else gloo. Or any backend of
            torch, by name.
        init_method: `env://` reads MASTER_ADDR and MASTER_PORT (29500 when unset), and where there is no MASTER_ADDR
            the variables of the scheduler, such as SLURM's list of nodes; `tcp://host:port`; or `file:///path` for a
            new file on a file system that all ranks see.
        world_size: The number of processes; None reads it as `setup_distributed` does.
        rank: This process's number, from 0; None as above.
        timeout: For the group to form, and for each of its collectives.
        store: A store that all ranks share, instead of `init_method`.
        environ: The environment to read; None is this process's own.
        device: This rank's device; None is `rank_device(environ)`.

    Raises:
        AlreadyInitializedError: There is a group already.
        ConfigError: Rank, world size, address or backend are wrong or missing.
        PortError: Rank 0 cannot listen on the port.
        RendezvousError: Not all ranks came in time; its `missing` names them where it can be known.

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
    if timeout <= timedelta(0):
        raise ConfigError(f"the timeout must be positive, not {timeout}", where="timeout")
    own = _own_device(backend, device, environ)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    backend = _backend(backend, own)
    where, shared = _open_store(init_method, store, rank, world_size, environ, timeout)
    keys = rendezvous.meet(shared, rank=rank, world_size=world_size, environ=environ, timeout=timeout, where=where)
    try:
        dist.init_process_group(
            backend,
            store=keys,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # With its device NCCL connects now, not in the first collective, and a wrong set-up fails here.
            device_id=own if own.type == "cuda" and "nccl" in backend else None,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"all {world_size} processes came to {where}, but {backend} could not connect them",
            where=f"rank {rank} of {world_size}",
            why=str(error).splitlines()[0],
            fix="name the network interface between the machines (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME=eth0); "
            "NCCL_DEBUG=INFO says more",
        ) from error


def destroy_process_group() -> None:
    """Leaves the group and frees it. Does nothing when there is none."""
    if is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group(
    backend: str = "auto",
    init_method: str = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    store: dist.Store | None = None,
    environ: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[DistributedInfo]:
    """`init_process_group` for the length of a block, with the same arguments.

    Example:
        >>> with process_group(environ={}) as info:
        ...     print(info["rank"], "of", info["world_size"])
        0 of 1
    """
    init_process_group(
        backend, init_method, world_size, rank, timeout=timeout, store=store, environ=environ, device=device
    )
    try:
        yield get_distributed_info()
    finally:
        destroy_process_group()


def _rank_and_world_size(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither", where="init_process_group")
    if rank is None or world_size is None:
        return _environ.rank_and_world_size(environ)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} does not fit into a world of {world_size} processes",
            where="init_process_group(rank=, world_size=)",
            why="ranks go from 0 to the world size minus 1",
        )
    return rank, world_size


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
                "the backend 'xla' needs torch-xla", fix="pip install 'fairlead[xla]', and import torch_xla first"
            )
        if name not in dist.Backend.backend_list or name == dist.Backend.UNDEFINED:
            known = sorted(set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED})
            raise ConfigError(
                f"unknown backend {name!r}", where="backend", fix=f"use auto or one of {', '.join(known)}"
            )
        if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            why = "no CUDA or ROCm device is visible" if dist.is_nccl_available() else "this torch was built without it"
            raise ConfigError("the backend 'nccl' cannot be used here", where="backend", why=why, fix="use 'gloo'")
    return backend


def _open_store(
    init_method: str,
    store: dist.Store | None,
    rank: int,
    world_size: int,
    environ: Mapping[str, str],
    timeout: timedelta,
) -> tuple[str, dist.Store]:
    """The address, for messages, and the store that all ranks share."""
    if store is not None:
        return "the given store", store
    scheme, netloc, path = urlsplit(init_method)[:3]
    if scheme == "file" and path:
        return path, dist.FileStore(path, world_size)
    if scheme == "env":
        if world_size == 1:
            return "this process", dist.HashStore()
        endpoint = _endpoint(environ)
    elif scheme == "tcp" and ":" in netloc:
        parts = urlsplit(init_method)
        if parts.hostname is None or parts.port is None:
            raise ConfigError(f"no host and port in {init_method!r}", where="init_method", fix="write tcp://host:port")
        endpoint = rendezvous.Endpoint(parts.hostname, parts.port)
    else:
        raise ConfigError(
            f"init_method {init_method!r} is not understood",
            where="init_method",
            fix="use env://, tcp://host:port or file:///path",
        )
    return str(endpoint), rendezvous.connect(endpoint, rank=rank, environ=environ, timeout=timeout)


def _endpoint(environ: Mapping[str, str]) -> rendezvous.Endpoint:
    """MASTER_ADDR and MASTER_PORT; without them what the scheduler says, where a plugin knows it (the first node)."""
    address, port = environ.get("MASTER_ADDR", "").strip(), _environ.integer(environ, "MASTER_PORT")
    if address:
        return rendezvous.Endpoint(address, port or DEFAULT_PORT)
    topology = choose_environment("auto", environ, default_plugins(), starting=True).topology
    if topology is not None and topology.main_address is not None and topology.main_port is not None:
        return rendezvous.Endpoint(topology.main_address.value, port or topology.main_port.value)
    raise ConfigError(
        "MASTER_ADDR is not set: the processes do not know where to meet",
        where="environment, MASTER_ADDR",
        fix="set MASTER_ADDR to the name of the machine of rank 0 (127.0.0.1 when all are on one), or start with "
        "torchrun, which sets it; in a job of SLURM or LSF: pip install fairlead-environments, which finds it",
    )
