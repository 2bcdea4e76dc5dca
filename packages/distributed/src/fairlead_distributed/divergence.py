"""Do replicas still hold the same state? Compares it bit for bit and names the first tensor that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fairlead_distributed._sharded import is_dtensor
from fairlead_distributed.info import require_initialized
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.process_group import rank_device
from fairlead_runs.waiting import ranks_text

# name, what it is (dtype, shape), which shard it is, hash of its bytes
Entry = tuple[str, str, str, bytes]


@dataclass(frozen=True)
class Divergence:
    """The first tensor that is not the same on all ranks that hold it.

    Attributes:
        name: Its name, or where the ranks' lists of names part.
        ranks: The ranks that differ from most (from the lowest rank where there is no majority).
        groups: The ranks by equal value, largest group first.
        count: How many tensors differ.
    """

    name: str
    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    count: int

    def __str__(self) -> str:
        more = f" ({self.count} tensors differ)" if self.count > 1 else ""
        return f"{self.name} differs on {ranks_text(self.ranks)}{more}"


def first_divergence(
    module_or_named_tensors: nn.Module | Iterable[tuple[str, Tensor | None]],
    *,
    group: dist.ProcessGroup | None = None,
) -> Divergence | None:
    """The first tensor whose bits differ over the ranks that hold it, None when all are equal. A collective.

    Each tensor is read once, where it is. Two numbers travel, in one all-reduce (and one more for each dimension of a
    device mesh over which tensors are replicated); only where something differs, a hash of each tensor does. Sharded
    tensors (DTensors) are compared among the ranks that hold the same shard.

    Args:
        module_or_named_tensors: A module (its parameters), or `(name, tensor)` pairs, such as those of
            `replicated_tensors`, or gradients: `((n, p.grad) for n, p in model.named_parameters())`. None counts as a
            different value.
        group: The ranks; None: all.

    Example:
        >>> first_divergence(nn.Linear(2, 2)) is None  # one process
        True
    """
    if not require_initialized("first_divergence"):
        return None
    named = module_or_named_tensors
    pairs = list(named.named_parameters() if isinstance(named, nn.Module) else named)
    if _agree(pairs, group):
        return None
    own = [entry_of(name, tensor) for name, tensor in pairs]
    return _compare(dict(zip(dist.get_process_group_ranks(group), gather_objects(own, group), strict=True)))


def replicated_tensors(
    module: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    parameters: bool = True,
    buffers: bool = True,
    local_buffers: Sequence[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """What has to be the same on all data-parallel ranks: parameters, buffers, and what optimizers keep of them.

    Left out are buffers that are no part of `state_dict()`, and the running statistics of batch and instance norms,
    of which each rank has its own unless they are synchronized.

    Args:
        module: The model, without what a strategy wraps around it.
        optimizers: Their state is compared too, tensor by tensor.
        parameters: False: neither parameters nor optimizers, as where each rank holds other parts of them.
        buffers: False: no buffers, as where DDP copies those of rank 0 to all before each forward pass.
        local_buffers: Names or patterns (`encoder.*.queue`) of buffers that differ over the ranks on purpose.

    Example:
        >>> [name for name, _ in replicated_tensors(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))]
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    ignored: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        if parameters and name not in ignored:
            yield name, parameter
    for prefix, part in module.named_modules() if buffers else ():
        if isinstance(part, _LOCAL_STATISTICS) and not isinstance(part, nn.SyncBatchNorm):
            continue
        for short, buffer in part.named_buffers(recurse=False):
            name = f"{prefix}.{short}" if prefix else short
            own = short in part._non_persistent_buffers_set or name in ignored
            if not own and not any(fnmatch(name, pattern) for pattern in local_buffers):
                yield name, buffer
    for index, optimizer in enumerate(optimizers if parameters else ()):
        for of, state in optimizer.state.items():
            name = names.get(id(of), "a parameter that is not the model's")
            if name not in ignored:
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                if _divided(of):  # a rank that holds nothing of an expert has no state of it, and no count of steps
                    tensors = {key: value for key, value in tensors.items() if is_dtensor(value)}
                yield from ((f"optimizer {index}, {key} of {name}", value) for key, value in sorted(tensors.items()))


def _divided(tensor: Tensor) -> bool:
    return is_dtensor(tensor) and not all(one.is_replicate() for one in tensor.placements)


_LOCAL_STATISTICS: Final = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def _agree(pairs: Sequence[tuple[str, Tensor | None]], group: dist.ProcessGroup | None) -> bool:
    """Whether each tensor is the same on all ranks that hold it. Every rank gets the same answer."""
    replicated: list[tuple[str, Tensor | None]] = []
    shards: dict[Any, list[tuple[str, Tensor | None]]] = {}  # by the group that replicates them
    for name, tensor in pairs:
        if tensor is None or not is_dtensor(tensor):
            replicated.append((name, tensor))
        elif tensor.device_mesh.get_coordinate() is not None:
            for dimension, placement in enumerate(tensor.placements):
                if placement.is_replicate() and tensor.device_mesh.size(dimension) > 1:
                    copies = shards.setdefault(tensor.device_mesh.get_group(dimension), [])
                    copies.append((name, tensor.to_local()))
    differ = sum(len(set(_extremes(_digest(held), 0, among)[:2])) > 1 for among, held in shards.items())
    least, most, anywhere = _extremes(_digest(replicated), differ, group)
    return least == most and anywhere == 0


def _extremes(number: int, count: int, group: dist.ProcessGroup | None) -> tuple[int, int, int]:
    """The least and the greatest of the ranks' numbers (of 64 bits), and the greatest count."""
    device = rank_device() if "nccl" in str(dist.get_backend_config(group)) else "cpu"
    sent = torch.tensor([~number, number, count], device=device)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    least, most, found = sent.tolist()
    return ~least, most, found


def _digest(pairs: Sequence[tuple[str, Tensor | None]]) -> int:
    """A number of 64 bits, signed, that tells lists of named tensors apart."""
    kinds = [(name, None if one is None else (str(one.dtype), tuple(one.shape))) for name, one in pairs]
    named = int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:8], "little", signed=True)
    small: dict[torch.device, list[Tensor]] = {}
    sums: list[Tensor] = []
    for _, tensor in pairs:
        for one in _plain(tensor):
            flat = one.detach().contiguous().view(-1).view(torch.uint8)
            if len(flat) > _SMALL:
                sums.append(_sum(flat))
            else:
                small.setdefault(one.device, []).append(flat)
    sums += [_sum(torch.cat(flats)) for flats in small.values()]
    if not sums:
        return named
    on_host = torch.stack([one.cpu() for one in sums])
    return int((on_host * _weights(len(on_host), on_host.device)).sum().add(named))


_SMALL: Final = 1 << 16
"""Up to so many bytes tensors are read together: each operation has its price, above all on a GPU."""
_COLUMNS: Final = 1024


def _sum(data: Tensor) -> Tensor:
    """Of bytes: a weighted sum of the words of 64 bits, modulo 2^64, in one pass at the speed of the memory."""
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    end = len(data) - len(data) % (8 * _COLUMNS)
    rest = torch.nn.functional.pad(data[end:], (0, 8 * _COLUMNS - len(data) + end))
    columns = data[:end].view(torch.int64).view(-1, _COLUMNS).sum(0) + 3 * rest.view(torch.int64)
    return (columns * _weights(_COLUMNS, data.device)).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers, so that equal words at other positions make other sums."""
    return torch.arange(1, count + 1, device=device) * -7046029254386353131 | 1


def _plain(tensor: Tensor | None) -> Iterator[Tensor]:
    """The tensors that hold its data: several for a quantized one."""
    if tensor is None or is_lazy(tensor) or tensor.is_meta:
        return
    if is_dtensor(tensor):
        yield from _plain(tensor.to_local())
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def entry_of(name: str, tensor: Tensor | None) -> Entry:
    """What tells one tensor from another: name, dtype and shape, which shard it is, and a hash of its bytes."""
    if tensor is None:
        return name, "None", "", b""
    shard, local = "", tensor.detach()
    if is_dtensor(tensor):
        at, local = list(tensor.device_mesh.get_coordinate() or ()), tensor.to_local().detach()
        there = tensor.placements if at else ()  # a rank that is no part of the mesh holds nothing of it
        cuts = [(d, c) for d, (c, p) in enumerate(zip(at, there, strict=True)) if not p.is_replicate()]
        shard = str(cuts) if cuts else "" if at else "elsewhere"
    of_data = hashlib.sha256()
    for one in _plain(local):
        of_data.update(one.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return name, f"{tensor.dtype} {tuple(tensor.shape)}", shard, of_data.digest()[:16]


def _compare(entries: dict[int, list[Entry]]) -> Divergence | None:
    first: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    count = 0
    named = {rank: {entry[0]: entry for entry in one} for rank, one in entries.items()}
    for name in dict.fromkeys(entry[0] for one in entries.values() for entry in one):
        values = {rank: one.get(name) for rank, one in named.items()}
        held = {rank: value for rank, value in values.items() if value is not None}
        shards = {v[2] for v in held.values()}
        # Other shapes, or one that some ranks do not have: differ whatever the shards hold; but of a shard all may not.
        kinds = {v[1] for v in held.values()} | ({""} if len(held) < len(values) and "" in shards else set())
        parts = [values] if len(kinds) > 1 else [{r: v for r, v in held.items() if v[2] == s} for s in sorted(shards)]
        apart = next((groups for part in parts if len(groups := _by_value(part)) > 1), None)
        if apart:
            count += 1
            first = first or (name, apart)
    if first is None:
        return None
    name, groups = first
    return Divergence(name, tuple(sorted(r for one in groups[1:] for r in one)), groups, count)


def _by_value(values: Mapping[int, Entry | None]) -> tuple[tuple[int, ...], ...]:
    groups: dict[Entry | None, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in groups.values()), key=lambda ranks: (-len(ranks), ranks)))
