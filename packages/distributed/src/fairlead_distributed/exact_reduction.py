"""Average DDP's gradients in an order that does not depend on what the run has done before.

An all-reduce over more than two ranks takes its order from an element's position in the bucket, and DDP builds other
buckets after the first step, so that a resumed run, which repeats such a first step, ends with other last bits.
"""

# No `from __future__ import annotations`: torch compares the annotations of a hook with its classes, not with text.

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError


def register_exact_reduction(ddp_model: DistributedDataParallel, *, auto: bool = False) -> bool:
    """Lets a DDP model average its gradients in the order of the ranks, whatever its buckets look like.

    Call it on all ranks, after wrapping the model and before the first backward pass. A gradient is then the same, bit
    for bit, in the first step after a resume and in the same step of an undisturbed run, with any `bucket_cap_mb`.
    16-bit gradients are added in float32 and rounded once. It divides by the number of all ranks, also in
    `ddp_model.join()`. It sends as many bytes as an all-reduce does, in two collectives for each bucket, and needs the
    buckets' memory once more meanwhile. It needs `all_to_all_single`; it was run on gloo only.

    Args:
        ddp_model: The wrapped model.
        auto: Only where the order would change otherwise and the cost is small: gradients that are sent through gloo,
            in buckets that DDP rebuilds (with `find_unused_parameters` it does not, unless the graph is static).

    Returns:
        Whether a hook was registered: not with one or two ranks, which need none, nor where the model has one already
        or torch.compile replaces DDP's buckets (`optimize_ddp = "python_reducer"`).

    Raises:
        ConfigError: The model is not wrapped in DistributedDataParallel.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ConfigError(
            f"{type(ddp_model).__name__} is no DistributedDataParallel",
            where="register_exact_reduction",
            why="only DDP has buckets and communication hooks",
            fix="wrap the model first: DistributedDataParallel(model)",
        )
    if not dist.is_initialized():  # one process, as ours takes it
        return False
    group = ddp_model.process_group
    # The list of hooks that the model keeps does not have those built into torch; its log has all.
    log = ddp_model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if dist.get_world_size(group) <= 2 or log.get("comm_hook") or ddp_model._use_python_reducer:
        return False
    rebuilds = ddp_model.static_graph or not ddp_model.find_unused_parameters
    if auto and not (rebuilds and _sent_through(ddp_model) == "gloo"):
        return False
    # A bucket is added up while the next one is on its way, which needs the last one to arrive: not where it may be
    # left out.
    lag = 0 if ddp_model.skip_all_reduce_unused_params else 1
    ddp_model.register_comm_hook(_Reduction(group, lag), exact_reduction_hook)
    return True


def _sent_through(ddp_model: DistributedDataParallel) -> str:
    """The backend of the model's device: a group can have one for each kind of device."""
    device = next(p.device.type for p in ddp_model.parameters() if p.requires_grad)
    pairs = (pair.partition(":") for pair in dist.get_backend_config(ddp_model.process_group).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device, "")


@dataclass
class _InFlight:
    """A bucket of (n,) gradients; of its own share of them this rank gets every rank's parts, (world size, share).

    `numbers` is the memory of the bucket as real numbers, as it is added up.
    """

    buffer: Tensor
    numbers: Tensor
    parts: Tensor
    sent: dist.Work
    result: Future[Tensor]


@dataclass
class _Reduction:
    """The state of one model's hook; `lag` buckets may be in flight while backward continues."""

    group: dist.ProcessGroup
    lag: int
    in_flight: deque[_InFlight] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.world_size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)

    def shares(self, n: int) -> list[int]:
        """How many of n elements each rank adds up; none where there are fewer elements than ranks."""
        return [n // self.world_size + (rank < n % self.world_size) for rank in range(self.world_size)]

    def scatter(self, buffer: Tensor) -> Future[Tensor]:
        # Before torch 2.12 a bucket may be of complex numbers.
        numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        shares = self.shares(numbers.numel())
        own = shares[self.rank]
        parts = numbers.new_empty((self.world_size, own))
        sent = dist.all_to_all_single(
            parts.view(-1), numbers, [own] * self.world_size, shares, group=self.group, async_op=True
        )
        # A device's results are ready only for streams that wait for them: such a Future knows its device.
        result = Future[Tensor](devices=[] if buffer.device.type == "cpu" else [buffer.device])
        self.in_flight.append(_InFlight(buffer, numbers, parts, sent, result))
        # Python keeps an exception as a value; only what a callback raises is an error to DDP, which is C++.
        return result.then(lambda future: future.value())

    def finish(self, keep: int) -> None:
        """Adds up the oldest buckets and sends the averages to all ranks, until `keep` are left.

        Always in the thread of the backward pass, since gloo's threads complete collectives in any order.
        """
        while len(self.in_flight) > keep:
            bucket = self.in_flight.popleft()
            bucket.sent.wait()
            _average(bucket.parts)
            shares = self.shares(bucket.numbers.numel())
            own = [shares[self.rank]] * self.world_size
            gathered = dist.all_to_all_single(
                bucket.numbers, bucket.parts.view(-1), shares, own, group=self.group, async_op=True
            )
            _complete(bucket.result, gathered, bucket.buffer)


def exact_reduction_hook(state: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: see `register_exact_reduction`."""
    buffer = bucket.buffer()
    # A sparse gradient has a bucket to itself, in which nothing can move.
    result = _all_reduce(state, buffer) if buffer.is_sparse else state.scatter(buffer)
    state.finish(0 if bucket.is_last() else state.lag)
    return result


def _average(parts: Tensor) -> None:
    """Replaces each row by the mean of all, added in the order of the rows; `parts.sum(0)` chooses one by the shape."""
    half = parts.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if half else parts[0]
    for part in parts[1:]:
        total += part
    total /= parts.shape[0]
    parts[0 if half else 1 :].copy_(total)


def _complete(result: Future[Tensor], gathered: dist.Work, value: Tensor) -> None:
    """Sets `result` when the collective is done, also when it failed: DDP would wait for ever."""

    def done(future: Future[object]) -> None:
        try:
            future.wait()
        except Exception as error:  # a peer is gone, or the timeout is over
            result.set_exception(error)  # type: ignore[arg-type]  # annotated wrongly in torch
        else:
            result.set_result(value)

    gathered.get_future().then(done)


def _all_reduce(state: _Reduction, buffer: Tensor) -> Future[Tensor]:
    buffer /= state.world_size
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    reduced: Future[list[Tensor]] = work.get_future()
    return reduced.then(lambda future: future.value()[0])
