"""Python objects over all ranks, under torch's names; like tensors they are checked in the first calls of a group.

They travel as pickles, which run code where they are read. The ranks of one job trust each other: they run the same
program for the same user, and whoever can put something into their connections has the job anyway. Nothing that comes
from elsewhere is read in this way; what goes to a file is plain data, which runs nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from fairlead_distributed import objects
from fairlead_distributed.call_check import check_call
from fairlead_distributed.collectives import check_rank
from fairlead_distributed.info import require_initialized

T = TypeVar("T")


def all_gather_object(value: T, *, group: dist.ProcessGroup | None = None, check: bool | None = None) -> list[T]:
    """Every rank's object, as a list in the order of the ranks.

    Args:
        value: Anything that can be pickled.
        group: The ranks; None: all.
        check: Whether the ranks compare first what they are about to call; None: as `FAIRLEAD_CHECK_COLLECTIVES` says.

    Raises:
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.

    Example:
        >>> all_gather_object({"loss": 0.5})
        [{'loss': 0.5}]
    """
    if require_initialized("all_gather_object"):
        check_call("all_gather_object", "", group, check=check)
    return objects.gather_objects(value, group)


def broadcast_object(value: T, src: int = 0, *, group: dist.ProcessGroup | None = None, check: bool | None = None) -> T:
    """The object of rank `src`, on every rank.

    Args:
        value: On `src` anything that can be pickled; what the others give is not looked at.
        src: The sender's rank among all ranks (also when `group` is a part of them).
        group: The ranks; None: all.
        check: As in `all_gather_object`.

    Raises:
        CollectiveError: There is no rank `src`.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.
    """
    if not check_rank("broadcast_object", src, group):
        return value
    check_call("broadcast_object", f"from rank {src}", group, check=check)
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]  # type: ignore[no-any-return]


def gather_object(
    value: T, dst: int = 0, *, group: dist.ProcessGroup | None = None, check: bool | None = None
) -> list[T] | None:
    """Every rank's object on rank `dst`, as a list in the order of the ranks; None on the others.

    Args:
        value: Anything that can be pickled.
        dst: The receiver's rank among all ranks.
        group: The ranks; None: all.
        check: As in `all_gather_object`.

    Raises:
        CollectiveError: There is no rank `dst`.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.
    """
    if not check_rank("gather_object", dst, group):
        return [value]
    check_call("gather_object", f"to rank {dst}", group, check=check)
    box: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == dst else None
    dist.gather_object(value, box, dst=dst, group=group)
    return box
