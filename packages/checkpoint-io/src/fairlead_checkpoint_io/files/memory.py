"""Large memory that is written for the first time: most of its cost are page faults, one for each 4 KiB."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

__all__ = ["use_huge_pages"]

_HUGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_LIBC: Final = ctypes.CDLL(None)


def use_huge_pages(address: int, nbytes: int) -> None:
    """Asks Linux to back memory by pages of 2 MiB when it is first written; elsewhere nothing happens.

    It is advice: a kernel without transparent huge pages, or with none left, uses small ones.

    Args:
        address: Of the first byte.
        nbytes: The size in bytes; whole huge pages inside it are meant.
    """
    begin, end = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if begin < end and sys.platform == "linux":
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
