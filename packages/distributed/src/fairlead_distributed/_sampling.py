"""What the samplers and the seeding helpers share: seeds from numbers, orders from seeds, this rank's shard."""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from fairlead.errors import ConfigError
from fairlead_distributed.info import get_rank, get_world_size, is_initialized, require_initialized


def derive_seed(purpose: str, *numbers: int) -> int:
    """A seed of 63 bits from a purpose and integers: neighbours get unrelated seeds, `seed + epoch` does not.

    The same on every machine and in every process.

    Example:
        >>> derive_seed("order", 1, 2) == derive_seed("order", 1, 2) != derive_seed("order", 2, 1)
        True
    """
    text = ":".join([purpose, *(str(index(number)) for number in numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def permutation(length: int, seed: int) -> Tensor:
    """The numbers 0 to length - 1 in the order of a seed, int64; drawn on the CPU, so the same on every machine."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


def size_of(dataset_or_length: Sized | Dataset[Any] | int, where: str) -> int:
    """The number of samples; a ConfigError where there is none (an IterableDataset), or it is negative."""
    if isinstance(dataset_or_length, Sized):
        return len(dataset_or_length)
    if isinstance(dataset_or_length, Dataset):
        raise ConfigError(
            f"{type(dataset_or_length).__name__} has no length",
            where=where,
            why="only a dataset that can be indexed has an order that can be shuffled, split and resumed",
            fix="give it __len__ and __getitem__; a stream shards and resumes by itself",
        )
    if index(dataset_or_length) < 0:
        raise ConfigError(f"a dataset of {dataset_or_length} samples", where=where, fix="give 0 or more")
    return index(dataset_or_length)


def as_dataset(dataset_or_length: Sized | Dataset[Any] | int) -> Any:
    """What torch's own sampler takes: something with a length."""
    return range(dataset_or_length) if isinstance(dataset_or_length, int) else dataset_or_length


def shard_and_rank(num_replicas: int | None, rank: int | None, where: str) -> tuple[int, int]:
    """The number of shards and the number of ours, from the process group where they are not given."""
    if num_replicas is None or rank is None:
        require_initialized(where)
    num_replicas = get_world_size() if num_replicas is None else index(num_replicas)
    rank = get_rank() if rank is None else index(rank)
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"there is no rank {rank} of {num_replicas}", where=where, fix=f"give a rank from 0 to {num_replicas - 1}"
        )
    return num_replicas, rank


def reducible(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor in float64, on a device where that exists and the group can reduce."""
    tensor = tensor.detach()
    if tensor.device.type == "mps":  # has no float64
        tensor = tensor.cpu()
    if is_initialized() and dist.get_backend(group) == "nccl" and not tensor.is_cuda:
        tensor = tensor.to(torch.device("cuda", torch.cuda.current_device()))
    return tensor.to(torch.float64)
