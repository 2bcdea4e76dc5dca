"""Which GPUs a variable such as CUDA_VISIBLE_DEVICES leaves, by the driver's own rules. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU by its index in the order of the PCI bus, with model (`NVIDIA H100 80GB HBM3`) and UUID where known."""

    index: int
    name: str | None = None
    uuid: str | None = None


def visible(value: str | None, gpus: Sequence[GPU]) -> list[GPU]:
    """The GPUs that a variable's value leaves (None: it is not set), in its order, given as indices or beginnings of
    UUIDs.

    The list ends at its first wrong entry, as the driver reads it ("CUDA Environment Variables" in NVIDIA's CUDA
    programming guide); a repeated entry leaves none.  Of MIG instances a process can use one.

    Example:
        >>> [gpu.index for gpu in visible("2,0,-1,1", [GPU(0), GPU(1), GPU(2)])]
        [2, 0]
    """
    if value is None:
        return list(gpus)
    chosen: list[GPU] = []
    for item in (part.strip() for part in value.split(",")):
        if item.startswith("MIG-"):
            return [*chosen, GPU(-1, _common_name(gpus))][:1]
        found = _one(item, gpus)
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return chosen


def _one(item: str, gpus: Sequence[GPU]) -> GPU | None:
    if item.isdecimal():
        return gpus[int(item)] if int(item) < len(gpus) else None
    if not item.startswith("GPU-"):
        return None
    if gpus and all(gpu.uuid is None for gpu in gpus):
        return GPU(-1, _common_name(gpus), item)  # a UUID that only the driver knows
    named = [gpu for gpu in gpus if gpu.uuid is not None and gpu.uuid.startswith(item)]
    return named[0] if len(named) == 1 else None


def _common_name(gpus: Sequence[GPU]) -> str | None:
    names = {gpu.name for gpu in gpus}
    return names.pop() if len(names) == 1 else None
