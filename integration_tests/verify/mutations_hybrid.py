"""Silent faults of meshes of several dimensions: what clipping adds up, and along which of them.

As in `mutations.py`, each is a context manager for one training of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from fairlead_distributed.gradients import _Shards


@contextmanager
def _added_up_over(change: Callable[[dict[str, int], set[str]], set[str]]) -> Iterator[None]:
    """The squares of shards are added up over other dimensions than those they are cut along."""
    real = _Shards.reduce

    def reduce(self: Any, p: float, *, find_bad: bool) -> None:
        if self.mesh is not None:
            every = {name: number for number, name in enumerate(self.mesh.mesh_dim_names)}
            self.dims = tuple(every[name] for name in change(every, {n for n, at in every.items() if at in self.dims}))
        real(self, p, find_bad=find_bad)

    with patch.object(_Shards, "reduce", reduce):
        yield


def clipped_over_shard() -> AbstractContextManager[None]:
    """The norm leaves out what the other ranks of `tensor` hold (torchtune #2420)."""
    return _added_up_over(lambda every, cut: cut & {"shard"})


def clipped_over_tensor() -> AbstractContextManager[None]:
    """The norm leaves out what the other ranks of `shard` hold."""
    return _added_up_over(lambda every, cut: cut & {"tensor"})


def replicated_counted_twice() -> AbstractContextManager[None]:
    """What each rank of `tensor` holds whole counts once for each of them (Megatron-LM #5916)."""
    return _added_up_over(lambda every, cut: cut | {"tensor"})
