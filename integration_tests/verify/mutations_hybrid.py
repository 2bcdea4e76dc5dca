"""Silent faults of meshes of several dimensions: what clipping adds up, and along which of them.

As in `mutations.py`, each is a context manager for one training of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import fairlead_distributed.parallel.context as context
import fairlead_distributed.parallel.expert as expert
from fairlead_distributed.gradients import _Shards
from fairlead_distributed.parallel._comm import gather_for_all, part
from fairlead_distributed.parallel.expert import _DividedMixture


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


@contextmanager
def experts_of_parts_averaged() -> Iterator[None]:
    """Each rank of `tensor` sends a part of the tokens, and what they teach an expert is averaged, not added up."""
    real = _DividedMixture._sent

    def sent(self: Any, tokens: Any, weights: Any, chosen: Any, senders: int) -> Any:
        return real(self, tokens, weights, chosen, 1)

    with patch.object(_DividedMixture, "_sent", sent):
        yield


@contextmanager
def router_of_a_part() -> Iterator[None]:
    """What a rank's part of the tokens teaches the router, and the layers before it, stays on that rank."""
    with patch.object(expert, "split_for_parts", lambda x, dim, group: part(x, dim, group)):
        yield


@contextmanager
def sequence_out_of_order() -> Iterator[None]:
    """The parts of a sequence are put together in the order of the ranks, which is not that of the tokens."""
    with patch.object(context, "gather_sequence", lambda x, dim, layout, group: gather_for_all(x, dim, group)):
        yield
