"""How much memory a block of code takes for tensors: on CUDA in a separate pool, on a CPU by counting."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class MemoryPool:
    """What the block has allocated so far; numbers are bytes.

    Attributes:
        allocated: Of the tensors made in the block that are alive.
        peak: The most that were alive at once.
        count: How many storages were made.
        reserved: CUDA: what the pool holds from the device; elsewhere the same as `allocated`.
    """

    allocated: int = 0
    peak: int = 0
    count: int = 0
    reserved: int = 0
    _alive: dict[int, int] = field(default_factory=dict, repr=False)

    def _made(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        self._alive[key] = size
        self.count += 1
        self._set(self.allocated + size)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self._set(self.allocated - self._alive.pop(key))

    def _set(self, allocated: int) -> None:
        self.allocated = self.reserved = allocated
        self.peak = max(self.peak, allocated)


@contextmanager
def memory_pool_scope(device: torch.device | str | None = None) -> Iterator[MemoryPool]:
    """Counts what is allocated for tensors inside the block; on CUDA it comes from its own memory pool.

    A pool's memory is the block's alone, so that what it leaves is not mixed with others', and goes back to the device
    when the block is over and its last tensor gone. On a CPU there is no pool: the results of torch's operators are
    counted, those of the backward pass too where it runs in this thread, without what operators use in between.
    Counting makes each operator slower by Python code; it is for measurements.

    Args:
        device: None: this process's current CUDA device where there is one, else the CPU.

    Example:
        >>> with memory_pool_scope("cpu") as pool:
        ...     kept = torch.ones(1000) * 2
        >>> pool.allocated, pool.peak
        (4000, 8000)
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    pool = MemoryPool()
    if device.type != "cuda":
        with _Counting(pool, device.type):
            yield pool
        return
    own = torch.cuda.MemPool()
    began = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.cuda.use_mem_pool(own, device):
            yield pool
    finally:
        pool.allocated = torch.cuda.memory_allocated(device) - began
        pool.peak = torch.cuda.max_memory_allocated(device) - began
        segments = own.snapshot()  # type: ignore[no-untyped-call]
        pool.reserved = sum(segment["total_size"] for segment in segments)
        pool.count = sum(block["state"] == "active_allocated" for one in segments for block in one["blocks"])
        del own
        torch.cuda.empty_cache()


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the pool of every storage that an operator returns."""

    def __init__(self, pool: MemoryPool, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool, self._device = pool, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device and storage._cdata not in given:
                self._pool._made(storage)
        return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    # Subclasses (DTensors) have no memory of their own; what they hold passes here as well.
    return (leaf for leaf in tree_leaves(value) if type(leaf) in (torch.Tensor, torch.nn.Parameter))
