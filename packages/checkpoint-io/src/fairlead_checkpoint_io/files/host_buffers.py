"""Host memory that is copied into, kept for the next save."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

import torch

from fairlead_checkpoint_io.files.overlap import OverlappedCopies

_HUGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_LIBC: Final = ctypes.CDLL(None)


class Arena:
    """The buffers of one save, kept by exact size; page-locked ones (`pin`) are faster, but slow to allocate."""

    def __init__(self, *, pin: bool, overlap: OverlappedCopies | None = None) -> None:
        self._pin = pin
        self._overlap = overlap
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._used: list[tuple[tuple[int, bool], torch.UntypedStorage]] = []
        self._streams: set[torch.cuda.Stream] = set()
        self._copies: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """A save begins."""
        if self._overlap is not None:
            self._overlap.begin()

    def copy(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """The bytes of a CPU or CUDA storage in a buffer; valid after `synchronize`."""
        on_gpu = source.device.type == "cuda"
        key = (source.nbytes(), on_gpu and self._pin)
        idle = self._free.get(key)
        target = idle.pop() if idle else _allocate(*key)
        self._used.append((key, target))
        if on_gpu:
            self._from_gpu(_as_bytes(target), source)
        elif key[0]:
            _as_bytes(target).copy_(_as_bytes(source))
        return target

    def seal(self) -> None:
        """All copies have been begun; lets go of buffers that the state has no more use for."""
        for stream in self._streams:
            event = stream.record_event()
            self._copies.append(event)
            if self._overlap is not None:
                self._overlap.hold(event)
        self._streams.clear()
        self._free.clear()

    def synchronize(self) -> None:
        """Waits for copies from GPUs, in whichever thread needs the bytes."""
        for event in self._copies:
            event.synchronize()
        self._copies.clear()

    def release(self) -> None:
        """Makes the buffers free for the next save; what was copied into them is no longer valid."""
        self.seal()
        self.synchronize()
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used.clear()

    def _from_gpu(self, target: torch.Tensor, source: torch.UntypedStorage) -> None:
        side = self._overlap.stream(source) if self._overlap is not None else None
        stream = side or torch.cuda.current_stream(source.device)
        memory = _as_bytes(source)
        with torch.cuda.stream(stream):
            target.copy_(memory, non_blocking=True)
        if side is not None:
            memory.record_stream(side)  # the state may be freed before it is copied
        self._streams.add(stream)


def _allocate(nbytes: int, pinned: bool) -> torch.UntypedStorage:
    storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    if not pinned:
        use_huge_pages(storage.data_ptr(), nbytes)
    return storage


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def use_huge_pages(address: int, nbytes: int) -> None:
    """Asks Linux to back memory by pages of 2 MiB, as most of the cost of its first use are page faults."""
    begin, end = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if begin < end and sys.platform == "linux":
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
