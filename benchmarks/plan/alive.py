"""The most bytes of tensors that are alive at once, counted by what torch dispatches: on a CPU no allocator tells."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_now() -> int:
    """Of all tensors that there are."""
    gc.collect()
    counted = AliveBytes()
    with counted:
        return counted.now


class AliveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; what is there before is counted too.

    Attributes:
        now: Bytes of all storages.
        peak: The most that it was.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.at = ""
        self._known: dict[int, int] = {}

    def __enter__(self) -> AliveBytes:
        for one in gc.get_objects():
            if isinstance(one, Tensor):
                self._add(one)
        self.peak = self.now
        # FSDP frees what it has gathered by making its storage empty, which is no operator.
        self._resize = torch.UntypedStorage.resize_
        resize, count = self._resize, self._resized

        def resized(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            count(storage)
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self._add(one)
        if self.now > self.peak:
            self.peak, self.at = self.now, str(func)
        return out

    def _add(self, tensor: Tensor) -> None:
        if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta:
            return
        if hasattr(tensor, "_local_tensor"):
            tensor = tensor._local_tensor
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return
        if storage._cdata in self._known:
            self._resized(storage)
            return
        key, size = storage._cdata, storage.nbytes()
        self._known[key] = size
        self.now += size
        weakref.finalize(storage, self._end, key)

    def _resized(self, storage: Any) -> None:
        if storage._cdata in self._known:
            size = storage.nbytes()
            self.now += size - self._known[storage._cdata]
            self._known[storage._cdata] = size
            self.peak = max(self.peak, self.now)

    def _end(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
