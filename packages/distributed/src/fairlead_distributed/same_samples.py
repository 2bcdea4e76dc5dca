"""Do ranks, or a loader's workers, read the same samples? Known by fingerprints of the first batches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_ELEMENTS = 256


def batch_fingerprint(batch: Any) -> bytes | None:
    """A hash of a batch's shapes and of some elements of each of its tensors; None where it has no data known here.

    Args:
        batch: Tensors, arrays, numbers and text in lists, tuples and dicts. Of a tensor about 256 elements are read,
            spread evenly.

    Example:
        >>> batch_fingerprint([torch.ones(2), "a"]) == batch_fingerprint([torch.ones(2), "a"])
        True
    """
    found = hashlib.sha256()
    known = False
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _ELEMENTS)].cpu().contiguous().view(torch.uint8)
            found.update(repr((tuple(leaf.shape), leaf.dtype)).encode() + some.numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float):
            found.update(repr(leaf).encode())
        elif type(leaf).__module__ == "numpy":
            found.update(repr(leaf).encode())  # numpy shortens what is long
        else:
            continue
        known = True
    return found.digest() if known else None


def ranks_with_the_same(batches: Mapping[int, Sequence[bytes | None]]) -> tuple[int, ...]:
    """The ranks of whose first batches half or more are those of another rank too, () if there are none.

    Args:
        batches: The fingerprints of each rank's first batches, of ranks that should read different ones. Fewer than
            two different ones say nothing: such data are constant.
    """
    owner: dict[bytes, int] = {}
    found: set[int] = set()
    for rank, own in batches.items():
        distinct = {one for one in own if one is not None}
        shared = Counter(owner[one] for one in distinct if one in owner)
        for other, count in shared.items():
            if count >= max(2, len(distinct) / 2):
                found |= {rank, other}
        for one in distinct:
            owner.setdefault(one, rank)
    return tuple(sorted(found))


def workers_read_the_same(batches: Sequence[bytes | None], workers: int) -> bool:
    """Whether a loader's workers, whose batches come in turn, give the same ones.

    Args:
        batches: The fingerprints of the first batches of an epoch, two rounds of the workers at least.
        workers: The loader's `num_workers`.
    """
    if workers < 2 or len(batches) < 2 * workers or len(set(batches)) < 2 or None in batches:
        return False
    rounds = [batches[i : i + workers] for i in range(0, len(batches) - workers + 1, workers)]
    return all(len(set(one)) == 1 for one in rounds)
