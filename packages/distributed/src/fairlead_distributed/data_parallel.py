"""Data parallel training in one line around a model, and ranks with different numbers of batches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import parallel

from fairlead.errors import ConfigError
from fairlead_distributed.call_check import check_call
from fairlead_distributed.info import require_initialized
from fairlead_distributed.process_group import rank_device

_BUCKET_MB = 25.0  # torch's default; it makes the first one smaller, so that sending starts early


class DistributedDataParallel(parallel.DistributedDataParallel):
    """The model on each rank: every backward pass leaves the mean of all ranks' gradients in `.grad`.

    Torch's own, with this rank's device found. In a run of one process without a group it is the model alone, with the
    same names in its `state_dict()`, so that a script and its checkpoints are the same there.

    Args:
        module: The model, the same on all ranks; it is moved to `device` in place, so that an optimizer stays valid.
        bucket_size_mb: Size in MiB of the buckets in which gradients are sent. Larger ones mean fewer all-reduce calls
            that start later; torch's own name `bucket_cap_mb` will do, too.
        device: This rank's device. None: its GPU, `rank_device()`, where the group sends through NCCL; else where the
            model is.
        device_ids: Torch's name for it, `[local_rank]`. Where there is no GPU it says nothing, so that the same script
            runs on a CPU.
        options: As in torch: `process_group`, `find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`, ...

    Raises:
        ConfigError: The model is on another rank's GPU, there is no such GPU, or the model has nothing to train.
        NotInitializedError: The launcher started several processes, and this one has not joined them yet.
        TensorMismatchError: Where calls are checked, the models differ in the number of their parameters.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_size_mb: float | None = None,
        device: torch.device | str | int | None = None,
        device_ids: Sequence[int | torch.device] | None = None,
        **options: Any,
    ) -> None:
        if device_ids:
            if device is not None:
                raise ConfigError("the device is given twice", where="DistributedDataParallel", fix="keep device_ids")
            device = _own_of(device_ids)
        cap = options.pop("bucket_cap_mb", None)
        if cap is not None and bucket_size_mb is not None:
            raise ConfigError(
                "the bucket size is given twice", where="DistributedDataParallel", fix="keep bucket_size_mb"
            )
        size = bucket_size_mb if bucket_size_mb is not None else cap if cap is not None else _BUCKET_MB
        if not size > 0:
            raise ConfigError(f"a bucket of {size} MiB", where="DistributedDataParallel", fix="give a positive size")
        trained = [one for one in module.parameters() if one.requires_grad]
        if not trained:
            raise ConfigError(
                "the model has no parameter that requires a gradient",
                where=f"DistributedDataParallel({type(module).__name__})",
                why="there would be nothing to average over the ranks",
                fix="use the model as it is, or set requires_grad",
            )
        alone = not require_initialized("DistributedDataParallel")
        group = options.get("process_group")
        own = _device(device, group, alone=alone)
        if own is not None:
            _move(module, own, chosen=device is not None)
        if alone:
            nn.Module.__init__(self)
            self.module, self._alone = module, True
            return
        check_call("DistributedDataParallel", f"with {len(trained)} parameters", group)
        options.setdefault("device_ids", [own.index] if own is not None and own.type == "cuda" else None)
        super().__init__(module, bucket_cap_mb=None if size == _BUCKET_MB else size, **options)
        self._alone = False
        _wrapped.add(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """That of the model."""
        of: Any = self.module if self._alone else super().forward
        return of(*inputs, **kwargs)

    def no_sync(self) -> Any:
        """As in torch; `fairlead_distributed.no_sync` does the same."""
        return nullcontext() if self._alone else super().no_sync()

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; `fairlead_distributed.join` divides by the ranks that still have data."""
        return nullcontext() if self._alone else super().join(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        take: Any = super().__getstate__
        return dict(self.__dict__) if self._alone else take()

    def __setstate__(self, state: dict[str, Any]) -> None:
        put: Any = nn.Module.__setstate__ if state["_alone"] else parallel.DistributedDataParallel.__setstate__
        put(self, state)


_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Those of several ranks that are in use: the ones that `no_sync()` means."""


def wrapped_models() -> list[DistributedDataParallel]:
    """The models of this process that are wrapped, and in use."""
    return list(_wrapped)


@contextmanager
def join(*models: Joinable | nn.Module, divide_by_initial_world_size: bool = False) -> Iterator[None]:
    """Ranks may run out of batches inside the block: until the last has none, they take part with zeros.

    So no rank waits for ever in a backward pass. All weights are equal at the end, to those of the rank that had the
    most batches. Torch's `Join`, whose limits hold: no collective of your own inside the block (those ranks do not
    come to it), and the model is called once a step.

    Args:
        models: What was wrapped in DistributedDataParallel, or holds such a model, as what `fabric.setup` returns; and
            other `Joinable`s (`ZeroRedundancyOptimizer`).
        divide_by_initial_world_size: False: a gradient is the mean over the ranks that had a batch, as in one process
            that had these batches. True, torch's default: over all ranks, so that a step of few of them is smaller.
            A communication hook, that of `register_exact_reduction` too, always divides by all.

    Raises:
        ConfigError: A model is not wrapped, so that nothing would be joined.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(2, 1))
        >>> with join(model):
        ...     for batch in torch.ones(4, 3, 2):  # as many as this rank has
        ...         model(batch).sum().backward()
    """
    if not require_initialized("join"):
        yield
        return
    parts = [[one] if isinstance(one, Joinable) else list(_joinable(one)) for one in models]
    wrong = next((one for one, found in zip(models, parts, strict=True) if not found), None)
    if wrong is not None or not models:
        raise ConfigError(
            f"join got {'no model' if wrong is None else f'a {type(wrong).__name__}'}, which cannot be joined",
            where="join(model)",
            why="the ranks wait for each other in the backward pass of a wrapped model only",
            fix="model = DistributedDataParallel(model)",
        )
    with Join([part for found in parts for part in found], divide_by_initial_world_size=divide_by_initial_world_size):
        yield


def _joinable(model: nn.Module) -> Iterator[Joinable]:
    return (part for part in model.modules() if isinstance(part, Joinable))


def _device(
    device: torch.device | str | int | None, group: dist.ProcessGroup | None, *, alone: bool
) -> torch.device | None:
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if alone or "nccl" in str(dist.get_backend_config(group)):
        return rank_device()
    return None


def _own_of(device_ids: Sequence[int | torch.device]) -> torch.device | None:
    """The GPU that torch's argument means; None where there is none."""
    if not torch.cuda.is_available():
        return None
    first, count = device_ids[0], torch.cuda.device_count()
    device = torch.device("cuda", first) if isinstance(first, int) else first
    if len(device_ids) > 1 or (device.index or 0) >= count:
        raise ConfigError(
            f"device_ids={list(device_ids)} is not this rank's GPU",
            where="DistributedDataParallel",
            why=f"each rank has one, and they are counted on each node: this one shows {count}",
            fix="device_ids=[get_local_rank()], or leave it out: the rank's own GPU is found",
        )
    return device


def _move(module: nn.Module, device: torch.device, *, chosen: bool) -> None:
    for name, one in module.named_parameters():
        if not chosen and one.device.type == "cuda" and one.device != device:
            raise ConfigError(
                f"the model is on {one.device}, and this rank's own device is {device}",
                where=f"DistributedDataParallel, {name}",
                why="every rank drives the GPU of its local rank; another one would be driven by two",
                fix="leave the model on the CPU, or move it with model.to(rank_device())",
            )
    module.to(device)
