"""Operations over all ranks. Each returns a new tensor, leaves its argument as it is, and carries no gradient.

In a run of one process without a group they return what a group of one would; in one of several processes they raise
`NotInitializedError` before `init_process_group`, since a sum over all ranks must never be silently the sum over one.

The ranks must call the same operations in the same order with tensors of one shape and dtype: gloo does not notice
when they do not, and aborts the process, hangs or leaves garbage. So the first 20 calls of each group are **checked**:
the ranks compare over the store what they are about to call, and where it differs all of them get one error with every
rank's line of code. A rank that waits for 10 seconds says for whom, and where those were last. A checked call asks
the store five short questions a rank: less than a millisecond where the machine is free. The environment variable
`FAIRLEAD_CHECK_COLLECTIVES` is `all` to debug a hang, `off`, or a number; `check=` of a call goes before it. Both are
to be the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fairlead.errors import ConfigError, did_you_mean
from fairlead_distributed.call_check import check_call
from fairlead_distributed.errors import CollectiveError, TensorMismatchError
from fairlead_distributed.info import require_initialized

_HERE = vars(dist)

all_gather_single: Any = _HERE.get("all_gather_single") or dist.all_gather_into_tensor
"""`torch.distributed.all_gather_single`, which warns of its old name, `all_gather_into_tensor`."""
reduce_scatter_single: Any = _HERE.get("reduce_scatter_single") or dist.reduce_scatter_tensor
"""`torch.distributed.reduce_scatter_single`, formerly `reduce_scatter_tensor`."""


# Every dtype of torch in an order that is the same on all ranks: the number of a dtype in a header.
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
_HEADER_DIMS = 14


def text_of(tensor: Tensor) -> str:
    """Dtype and shape, for a person."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's memory: no backend knows every dtype (float8, bool), each can move bytes."""
    return tensor.view(-1).view(torch.uint8)


def tensor_of(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that has these bytes; there may be more of them."""
    return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def shapes_over_ranks(tensor: Tensor, operation: str, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """The shapes of all ranks' tensors, where they differ in nothing else."""
    dims = list(tensor.shape)[:_HEADER_DIMS]
    numbers = [_DTYPES.index(str(tensor.dtype)), tensor.dim(), *dims, *[0] * (_HEADER_DIMS - len(dims))]
    header = torch.tensor(numbers, device=tensor.device)
    headers = header.new_empty(dist.get_world_size(group) * len(header))
    all_gather_single(headers, header, group=group)
    rows = headers.view(-1, len(header)).tolist()
    if all(row[:2] == rows[0][:2] for row in rows):
        return [tuple(row[2 : 2 + row[1]]) for row in rows]
    seen = [
        f"rank {r}: {_DTYPES[row[0]]} {tuple(row[2 : 2 + row[1]])}"
        for r, row in zip(dist.get_process_group_ranks(group), rows, strict=True)
    ]
    odd = next(r for r, row in enumerate(rows) if row[:2] != rows[0][:2])
    raise TensorMismatchError(
        f"{operation} got tensors that differ over the ranks: {seen[odd]}, but {seen[0]}",
        where=f"rank {dist.get_rank()}: {text_of(tensor)}",
        why="\n".join(seen[:16]),
        fix="bring them to one dtype and number of dimensions first",
    )


class ReduceOp(Enum):
    """How the ranks' values become one, element by element. Where one is taken, its name will do: `"mean"`, `"sum"`."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"

    @classmethod
    def _missing_(cls, value: object) -> Self:
        name = str(value).rpartition(".")[2].lower()  # torch's own ones too
        name = {"mean": "average", "avg": "average", "prod": "product"}.get(name, name)
        for one in cls:
            if one.value == name:
                return one
        near = did_you_mean(name, [*(one.value for one in cls), "mean"])
        raise ConfigError(
            f"there is no reduction {value!r}",
            where="op",
            fix=f"did you mean {near!r}?" if near else f"use one of {', '.join(one.value for one in cls)}",
        )


def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    group: dist.ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """The element-wise sum (product, ...) of all ranks' tensors, the same on every rank.

    Args:
        tensor: Of any shape, the same on all ranks.
        op: How to combine; AVERAGE needs a floating-point or complex dtype.
        group: The ranks; None: all.
        check: Whether the ranks compare first what they are about to call; None: see above.

    Raises:
        TensorMismatchError: `op` does not fit the dtype, the group cannot send from this device, or, where it is
            checked, the ranks' tensors or ops differ.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.

    Example:
        >>> all_reduce(torch.tensor([1.0, 2.0]), "mean")
        tensor([1., 2.])
    """
    op = ReduceOp(op)
    result = _own("all_reduce", tensor, group)
    _check_op(tensor, op)
    if require_initialized("all_reduce"):
        check_call("all_reduce", f"{op.name} of {text_of(tensor)}", group, check=check)
        dist.all_reduce(result, op=_torch_op(op), group=group)
        if op is ReduceOp.AVERAGE:
            result /= dist.get_world_size(group)
    return result


def all_gather(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    check: bool | None = None,
    same_shape: bool = False,
) -> list[Tensor]:
    """Every rank's tensor, bit for bit, as a list in the order of the ranks.

    Args:
        tensor: Of any dtype and any number of dimensions, both the same on all ranks; the lengths may differ.
        group: The ranks; None: all.
        check: Whether the ranks compare first what they are about to call; None: see above.
        same_shape: A promise that the shapes are the same, which saves the small collective that asks for them.

    Raises:
        TensorMismatchError: The ranks' tensors differ in dtype or in the number of dimensions; names each rank's.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.

    Example:
        >>> all_gather(torch.tensor([1, 2]))
        [tensor([1, 2])]
    """
    own = _own("all_gather", tensor, group)
    if not require_initialized("all_gather"):
        return [own]
    what = text_of(tensor) if same_shape else f"{tensor.dtype} with {tensor.dim()} dimensions"
    check_call("all_gather", what, group, check=check)
    shapes = [own.shape] * dist.get_world_size(group) if same_shape else shapes_over_ranks(own, "all_gather", group)
    most = max(math.prod(shape) for shape in shapes) * own.element_size()
    if not most:
        return [own.new_empty(shape) for shape in shapes]
    sent = own.new_zeros(most, dtype=torch.uint8)
    sent[: own.numel() * own.element_size()] = bytes_of(own)
    gathered = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(gathered, sent, group=group)
    return [tensor_of(one, own.dtype, shape) for one, shape in zip(gathered, shapes, strict=True)]


def broadcast(
    tensor: Tensor, src: int = 0, *, group: dist.ProcessGroup | None = None, check: bool | None = None
) -> Tensor:
    """The tensor of rank `src`, bit for bit, on every rank.

    Args:
        tensor: On `src` the values, on the others any tensor of that shape and dtype.
        src: The sender's rank among all ranks (also when `group` is a part of them).
        group: The ranks; None: all.
        check: Whether the ranks compare first what they are about to call; None: see above.

    Raises:
        CollectiveError: There is no rank `src`.
        TensorMismatchError: Where it is checked, the ranks' tensors or their `src` differ.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.
    """
    result = _own("broadcast", tensor, group)
    initialized = require_initialized("broadcast")
    ranks = dist.get_process_group_ranks(group) if initialized else [0]
    if src not in ranks:
        raise CollectiveError(
            f"there is no rank {src} for broadcast", where="broadcast()", why=f"the group's ranks are {ranks}"
        )
    if initialized:
        check_call("broadcast", f"{text_of(tensor)} from rank {src}", group, check=check)
        if result.numel():
            dist.broadcast(bytes_of(result), src=src, group=group)
    return result


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    group: dist.ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """This rank's chunk of what `all_reduce` would give: chunk `rank` of `world_size` along dimension 0.

    Args:
        tensor: Shape `(n, ...)`, the same on all ranks; n must be divisible by the number of ranks.
        op: How to combine; AVERAGE needs a floating-point or complex dtype.
        group: The ranks; None: all.
        check: Whether the ranks compare first what they are about to call; None: see above.

    Returns:
        A tensor of shape `(n / world_size, ...)`.

    Raises:
        TensorMismatchError: n is not divisible, `op` does not fit the dtype, or, where it is checked, the ranks'
            tensors or ops differ.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.
    """
    op = ReduceOp(op)
    own = _own("reduce_scatter", tensor, group)
    _check_op(tensor, op)
    initialized = require_initialized("reduce_scatter")
    if initialized:  # first, so that all ranks get the same error
        check_call("reduce_scatter", f"{op.name} of {text_of(tensor)}", group, check=check)
    parts = dist.get_world_size(group) if initialized else 1
    if tensor.dim() == 0 or tensor.shape[0] % parts:
        length = "no dimension" if tensor.dim() == 0 else f"length {tensor.shape[0]} in dimension 0"
        raise TensorMismatchError(
            f"reduce_scatter cannot cut a tensor with {length} into {parts} equal parts",
            where=f"shape {tuple(tensor.shape)}",
            fix=f"pad dimension 0 to a multiple of {parts}, or use all_reduce",
        )
    if not initialized:
        return own
    result = own.new_empty((own.shape[0] // parts, *own.shape[1:]))
    reduce_scatter_single(result, own, op=_torch_op(op), group=group)
    if op is ReduceOp.AVERAGE:
        result /= parts
    return result


def barrier(
    timeout: timedelta | None = None, *, group: dist.ProcessGroup | None = None, check: bool | None = None
) -> None:
    """Waits until every rank has called it; on CUDA also until the work queued before it is done.

    Args:
        timeout: How long to wait; None is the group's own timeout. With one it is checked, unless `check` says no.
        group: The ranks; None: all.
        check: Whether the ranks compare first what they are about to call; None: see above.

    Raises:
        CollectiveError: A rank did not come in time. Where it is checked, `missing` names it on all ranks, with where
            it was last, and the group can be used further; else on gloo, rank 0 of the group names it.
        CollectiveMismatchError: Where it is checked, the ranks call different collectives.
    """
    if not require_initialized("barrier"):
        return
    check_call("barrier", "", group, check=check, timeout=timeout)
    try:
        if dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
        else:
            work = dist.barrier(group, async_op=True)
            if work is not None:
                work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise CollectiveError(
            "not all ranks came to the barrier",
            where=f"rank {dist.get_rank()}",
            why=str(error).splitlines()[0],
            fix="look at the output of the ranks named above: they ended, hang, or never call the barrier",
        ) from error
    if dist.get_backend(group) != "gloo" and torch.cuda.is_available():
        torch.cuda.synchronize()


def _own(operation: str, tensor: Any, group: dist.ProcessGroup | None) -> Tensor:
    """A contiguous copy, where it is a tensor that the group can send."""
    if not isinstance(tensor, Tensor):
        raise TensorMismatchError(
            f"{operation} takes a tensor, not a {type(tensor).__name__}",
            where=f"{operation}()",
            fix="torch.tensor(value) makes one of a number; torch's own functions for objects end in _object",
        )
    if dist.is_initialized():
        pairs = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
        if tensor.device.type not in pairs:
            raise TensorMismatchError(
                f"{operation} got a tensor on {tensor.device}, and the group sends from {', '.join(pairs)} only",
                where=f"rank {dist.get_rank()}: {text_of(tensor)}",
                why=f"its backend is {', '.join(sorted(set(pairs.values())))}",
                fix="move it to this rank's device: tensor.to(rank_device())",
            )
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _torch_op(op: ReduceOp) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.SUM if op is ReduceOp.AVERAGE else getattr(dist.ReduceOp, op.name)  # gloo has no AVG


def _check_op(tensor: Tensor, op: ReduceOp) -> None:
    if op is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TensorMismatchError(
            f"the average of {tensor.dtype} tensors is not a {tensor.dtype} tensor",
            where="ReduceOp.AVERAGE",
            fix="convert first (tensor.float()), or use ReduceOp.SUM and divide as you need",
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and tensor.is_complex():
        raise TensorMismatchError("complex numbers have no order", where=str(op), fix="reduce tensor.abs()")
