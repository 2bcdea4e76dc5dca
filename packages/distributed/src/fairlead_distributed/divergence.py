"""Do replicas still hold the same weights? Compares them bit for bit and names the first parameter that differs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairlead_distributed._sharded import is_dtensor
from fairlead_distributed.info import require_initialized
from fairlead_distributed.objects import gather_objects
from fairlead_runs.waiting import ranks_text

# name, what it is (dtype, shape), which shard it is, hash of its bytes
_Entry = tuple[str, str, str, bytes]


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
    """The first parameter whose bits differ over the ranks, None when all are equal. A collective.

    Only hashes (SHA-256) travel, one a rank where nothing is sharded and nothing differs. Sharded tensors (DTensors)
    are compared among the ranks that hold the same shard.

    Args:
        module_or_named_tensors: A module (its parameters), or `(name, tensor)` pairs, such as gradients:
            `((n, p.grad) for n, p in model.named_parameters())`. None counts as a value of its own.

    Example:
        >>> first_divergence(nn.Linear(2, 2)) is None  # one process
        True
    """
    if not require_initialized("first_divergence"):
        return None
    named = module_or_named_tensors
    pairs = named.named_parameters() if isinstance(named, nn.Module) else named
    own = [_entry(name, tensor) for name, tensor in pairs]
    # Every rank must take the same way from here: the answer is computed from what all of them see.
    if len(set(gather_objects(hashlib.sha256(repr(own).encode()).digest(), group))) == 1:
        return None
    return _compare(dict(zip(dist.get_process_group_ranks(group), gather_objects(own, group), strict=True)))


def _entry(name: str, tensor: Tensor | None) -> _Entry:
    if tensor is None:
        return name, "None", "", b""
    shard, local = "", tensor.detach()
    if is_dtensor(tensor):
        at, local = list(tensor.device_mesh.get_coordinate() or ()), tensor.to_local().detach()
        there = tensor.placements if at else ()  # a rank that is no part of the mesh holds nothing of it
        cuts = [(d, c) for d, (c, p) in enumerate(zip(at, there, strict=True)) if not p.is_replicate()]
        shard = str(cuts) if cuts else "" if at else "elsewhere"
    flat = local.contiguous().cpu().view(-1).view(torch.uint8)
    return name, f"{tensor.dtype} {tuple(tensor.shape)}", shard, hashlib.sha256(flat.numpy().data).digest()[:16]


def _compare(entries: dict[int, list[_Entry]]) -> Divergence | None:
    first: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    count = 0
    longest = max(len(one) for one in entries.values())
    for index in range(longest):
        values = {rank: one[index] if index < len(one) else None for rank, one in entries.items()}
        held = {rank: value for rank, value in values.items() if value is not None}
        kinds = {(v[0], v[1]) if v else None for v in values.values()}
        shards = {v[2] for v in held.values()}
        # Other names or shapes at this place: the lists do not match, whatever the shards hold.
        parts = [values] if len(kinds) > 1 else [{r: v for r, v in held.items() if v[2] == s} for s in sorted(shards)]
        apart = next((groups for part in parts if len(groups := _by_value(part)) > 1), None)
        if apart:
            count += 1
            names = Counter(v[0] for v in held.values())
            first = first or (names.most_common(1)[0][0], apart)
    if first is None:
        return None
    name, groups = first
    return Divergence(name, tuple(sorted(r for one in groups[1:] for r in one)), groups, count)


def _by_value(values: Mapping[int, _Entry | None]) -> tuple[tuple[int, ...], ...]:
    groups: dict[_Entry | None, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in groups.values()), key=lambda ranks: (-len(ranks), ranks)))
