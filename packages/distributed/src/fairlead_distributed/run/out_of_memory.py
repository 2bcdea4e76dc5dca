"""Memory that ran out in a training: how that is recognized, and what its traceback says besides."""

from __future__ import annotations

from typing import Final

import torch

NOTE: Final = (
    "memory ran out; a smaller batch on each rank, activation checkpointing or sharding (fsdp2) helps: "
    "`fairlead plan`, or `fairlead_planning.plan` for a loop of your own, says by how much"
)
_TEXTS: Final = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
"""What torch's own errors of another class say: its allocator for CPUs, cuBLAS and cuDNN."""


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a device's or the host's memory is used up."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def note_out_of_memory(error: BaseException) -> bool:
    """Adds what helps to the traceback of an error, once; whether memory ran out."""
    ran_out = ran_out_of_memory(error)
    if ran_out and NOTE not in getattr(error, "__notes__", ()):
        error.add_note(NOTE)
    return ran_out
