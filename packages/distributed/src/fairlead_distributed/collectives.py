"""Operations over all ranks. Each returns a new tensor, leaves its argument as it is, and carries no gradient.

In a run of one process without a group they return what a group of one would; in one of several processes they raise
`NotInitializedError` before `init_process_group`, since a sum over all ranks must never be silently the sum over one.

The ranks must call the same operations in the same order with tensors of one shape and dtype: gloo does not notice
when they do not, and aborts the process or leaves garbage. `check=True` compares first and names the rank. It doubles
the time of a small all-reduce, and on a GPU waits for the device, so it is off for the operations of a training step.
"""

from __future__ import annotations

from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from fairlead_distributed.errors import CollectiveError, TensorMismatchError
from fairlead_distributed.info import require_initialized


class ReduceOp(Enum):
    """How the ranks' values become one, element by element."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"


# Every dtype of torch in an order that is the same on all ranks: the number of a dtype in a header.
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
_HEADER_DIMS = 14


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    group: dist.ProcessGroup | None = None,
    check: bool = False,
) -> Tensor:
    """The element-wise sum (product, ...) of all ranks' tensors, the same on every rank.

    Args:
        tensor: Of any shape, the same on all ranks.
        op: How to combine; AVERAGE needs a floating-point or complex dtype.
        check: Compare shapes and dtypes first, at the cost of one more small collective.

    Raises:
        TensorMismatchError: `op` does not fit the dtype, or with `check` the ranks' tensors differ.

    Example:
        >>> all_reduce(torch.tensor([1.0, 2.0]), ReduceOp.AVERAGE)
        tensor([1., 2.])
    """
    _check_op(tensor, op)
    result = _copy(tensor)
    if require_initialized("all_reduce"):
        if check:
            _check_same(tensor, "all_reduce", group)
        dist.all_reduce(result, op=_torch_op(op), group=group)
        if op is ReduceOp.AVERAGE:
            result /= dist.get_world_size(group)
    return result


def all_gather(tensor: Tensor, *, group: dist.ProcessGroup | None = None, check: bool = True) -> list[Tensor]:
    """Every rank's tensor, bit for bit, as a list in the order of the ranks.

    Args:
        tensor: Of any dtype and shape, the same on all ranks.
        check: Compare shapes and dtypes first, at the cost of one more small collective.

    Raises:
        TensorMismatchError: The ranks' tensors differ in shape or dtype; names each rank's.

    Example:
        >>> all_gather(torch.tensor([1, 2]))
        [tensor([1, 2])]
    """
    own = _copy(tensor)
    if not require_initialized("all_gather"):
        return [own]
    if check:
        _check_same(tensor, "all_gather", group)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    if own.numel():
        dist.all_gather([_bytes(one) for one in gathered], _bytes(own), group=group)
    return gathered


def broadcast(tensor: Tensor, src: int = 0, *, group: dist.ProcessGroup | None = None, check: bool = False) -> Tensor:
    """The tensor of rank `src`, bit for bit, on every rank.

    Args:
        tensor: On `src` the values, on the others any tensor of that shape and dtype.
        src: The sender's rank among all ranks (also when `group` is a part of them).
        check: Compare shapes and dtypes first, at the cost of one more small collective.

    Raises:
        CollectiveError: There is no rank `src`.
        TensorMismatchError: With `check`, the ranks' tensors differ in shape or dtype.
    """
    result = _copy(tensor)
    initialized = require_initialized("broadcast")
    ranks = dist.get_process_group_ranks(group) if initialized else [0]
    if src not in ranks:
        raise CollectiveError(
            f"there is no rank {src} to broadcast from", where="broadcast(src=)", why=f"the group's ranks are {ranks}"
        )
    if initialized:
        if check:
            _check_same(tensor, "broadcast", group)
        if result.numel():
            dist.broadcast(_bytes(result), src=src, group=group)
    return result


def reduce_scatter(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    group: dist.ProcessGroup | None = None,
    check: bool = False,
) -> Tensor:
    """This rank's chunk of what `all_reduce` would give: chunk `rank` of `world_size` along dimension 0.

    Args:
        tensor: Shape `(n, ...)`, the same on all ranks; n must be divisible by the number of ranks.
        op: How to combine; AVERAGE needs a floating-point or complex dtype.
        check: Compare shapes and dtypes first, at the cost of one more small collective.

    Returns:
        A tensor of shape `(n / world_size, ...)`.

    Raises:
        TensorMismatchError: n is not divisible, `op` does not fit the dtype, or with `check` the tensors differ.
    """
    _check_op(tensor, op)
    initialized = require_initialized("reduce_scatter")
    if initialized and check:  # first, so that all ranks get the same error
        _check_same(tensor, "reduce_scatter", group)
    parts = dist.get_world_size(group) if initialized else 1
    if tensor.dim() == 0 or tensor.shape[0] % parts:
        length = "no dimension" if tensor.dim() == 0 else f"length {tensor.shape[0]} in dimension 0"
        raise TensorMismatchError(
            f"reduce_scatter cannot cut a tensor with {length} into {parts} equal parts",
            where=f"shape {tuple(tensor.shape)}",
            fix=f"pad dimension 0 to a multiple of {parts}, or use all_reduce",
        )
    own = _copy(tensor)
    if not initialized:
        return own
    result = own.new_empty((own.shape[0] // parts, *own.shape[1:]))
    dist.reduce_scatter_single(result, own, op=_torch_op(op), group=group)
    if op is ReduceOp.AVERAGE:
        result /= parts
    return result


def barrier(timeout: timedelta | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """Waits until every rank has called it; on CUDA also until the work queued before it is done.

    Args:
        timeout: How long to wait; None is the group's own timeout. After an expiry the group cannot be used further.

    Raises:
        CollectiveError: A rank did not come in time; on gloo, rank 0 of the group names it.
    """
    if not require_initialized("barrier"):
        return
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


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory: no backend knows every dtype (float8, bool), each can move bytes."""
    return tensor.view(-1).view(torch.uint8)


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


def _check_same(tensor: Tensor, operation: str, group: dist.ProcessGroup | None) -> None:
    dims = list(tensor.shape)[:_HEADER_DIMS]
    numbers = [_DTYPES.index(str(tensor.dtype)), tensor.dim(), *dims, *[0] * (_HEADER_DIMS - len(dims))]
    header = torch.tensor(numbers, dtype=torch.int64, device=tensor.device)
    headers = header.new_empty(dist.get_world_size(group) * len(numbers))
    dist.all_gather_single(headers, header, group=group)
    rows = headers.view(-1, len(numbers)).tolist()
    if all(row == rows[0] for row in rows):
        return
    seen = [
        f"rank {r}: {_DTYPES[row[0]]} {tuple(row[2 : 2 + row[1]])}"
        for r, row in zip(dist.get_process_group_ranks(group), rows, strict=True)
    ]
    odd = next(r for r, row in enumerate(rows) if row != rows[0])
    raise TensorMismatchError(
        f"{operation} got tensors that differ over the ranks: {seen[odd]}, but {seen[0]}",
        where=f"rank {dist.get_rank()}: {tensor.dtype} {tuple(tensor.shape)}",
        why="\n".join(seen[:16]),
        fix="bring them to one shape and dtype first, for example by padding the last batch",
    )
