"""Host memory that is copied into, kept for the next save."""

from __future__ import annotations

import torch

from fairlead_checkpoint_io.files.memory import use_huge_pages

__all__ = ["Arena", "HostBuffers"]


class Arena:
    """The buffers of one save. A state has the same sizes each time, so exact sizes are kept.

    Args:
        pin: Page-lock what is copied from a GPU: faster, but slow to allocate, so only for what is reused.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._used: list[tuple[tuple[int, bool], torch.UntypedStorage]] = []
        self._devices: set[torch.device] = set()

    def copy(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """The bytes of a CPU or CUDA storage in a buffer; valid after `settle`."""
        on_gpu = source.device.type == "cuda"
        key = (source.nbytes(), on_gpu and self._pin)
        idle = self._free.get(key)
        target = idle.pop() if idle else _allocate(*key)
        self._used.append((key, target))
        if key[0]:
            _as_bytes(target).copy_(_as_bytes(source), non_blocking=on_gpu)
        if on_gpu:
            self._devices.add(source.device)
        return target

    def settle(self) -> None:
        """Waits for copies from GPUs, and lets go of buffers that the state has no more use for."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._devices.clear()
        self._free.clear()

    def release(self) -> None:
        """Makes the buffers free for the next save; what was copied into them is no longer valid."""
        for key, buffer in self._used:
            self._free.setdefault(key, []).append(buffer)
        self._used.clear()

    @property
    def nbytes(self) -> int:
        """Host memory held, in bytes."""
        return sum(key[0] for key, _ in self._used) + sum(key[0] * len(held) for key, held in self._free.items())


class HostBuffers:
    """One arena for each save in flight; `take` and `give` may be called from different threads."""

    def __init__(self) -> None:
        self._idle: list[Arena] = []

    def take(self) -> Arena:
        """An arena that no save uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return Arena(pin=True)

    def give(self, arena: Arena) -> None:
        """Takes an arena back, when its save has ended."""
        arena.release()
        self._idle.append(arena)

    @property
    def nbytes(self) -> int:
        """Host memory held by arenas that no save uses, in bytes."""
        return sum(arena.nbytes for arena in self._idle)


def _allocate(nbytes: int, pinned: bool) -> torch.UntypedStorage:
    storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    if not pinned:
        use_huge_pages(storage.data_ptr(), nbytes)
    return storage


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
