"""What would help a job that does not fit into its devices' memory, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from fairlead_planning.layouts import Checkpointing, Layout
from fairlead_planning.memory import MemoryUse, as_dict, fullest, memory
from fairlead_planning.profile import Profile
from fairlead_planning.variants import checkpointed, with_rows

_WORTH: Final = 0.02
"""What saves less than this share is not named."""


@dataclass(frozen=True)
class Remedy:
    """A change of a job, and the memory of its fullest rank with it."""

    what: str
    layout: Layout
    bytes: float
    saves: float


def needed(one: Profile, two: Profile, layout: Layout, device: str = "cuda") -> MemoryUse:
    """The memory of the fullest rank under a layout.

    Args:
        one: A step of the job, traced without recomputation.
        two: The same with another number of rows in its batch.
        layout: How the job is laid out.
        device: `cuda` or `cpu`.
    """
    profile = checkpointed(with_rows(one, two, layout.micro_batch), layout.checkpointing)
    return fullest(memory(profile, layout, device))


def remedies(one: Profile, two: Profile, layout: Layout, device: str = "cuda") -> list[Remedy]:
    """What saves memory, the most first; each alone, and the last of all together.

    All keep the global batch, and so the training, but for those that need more ranks.
    """
    now = needed(one, two, layout, device).total
    found: list[Remedy] = []

    def tried(what: str, changed: Layout) -> None:
        total = needed(one, two, changed, device).total
        if now - total > _WORTH * now:
            found.append(Remedy(what, changed, total, now - total))

    together, words = layout, []
    if layout.micro_batch > 1:
        rows = next(n for n in range(layout.micro_batch // 2, 0, -1) if layout.micro_batch % n == 0)
        times = layout.accumulation * (layout.micro_batch // rows)
        half = replace(layout, micro_batch=rows, accumulation=times)
        tried(f"a batch of {rows} on each rank, with accumulate_grad_batches: {times}", half)
        together, words = half, ["a smaller batch"]
    if layout.checkpointing == "none":
        tried("recomputing all but products and attention (selective checkpointing)", _checkpoints(layout, "selective"))
    if layout.checkpointing != "full":
        tried("recomputing all activations of a layer (activation checkpointing)", _checkpoints(layout, "full"))
        together, words = _checkpoints(together, "full"), [*words, "activation checkpointing"]
    if layout.sharding != "full" and layout.data_parallel > 1:
        tried(f"fsdp2: states sharded over the {layout.data_parallel} ranks", _sharded(layout, layout.data_parallel))
        together, words = _sharded(together, layout.data_parallel), [*words, "fsdp2"]
    elif layout.data_parallel == 1:
        tried("fsdp2 on two ranks", _sharded(replace(layout, accumulation=max(1, layout.accumulation // 2)), 2))
    elif layout.mesh.shard > 1:
        tried("twice as many ranks to shard over", _sharded(layout, 2 * layout.mesh.shard))
    if not layout.offload:
        tried("the optimizer and its states on the host (offload)", replace(layout, offload=True))
    found.sort(key=lambda each: -each.saves)
    if len(words) > 1:
        tried(f"together: {', '.join(words)}", together)
    return found


def _checkpoints(layout: Layout, mode: Checkpointing) -> Layout:
    return replace(layout, checkpointing=mode)


def _sharded(layout: Layout, ranks: int) -> Layout:
    mesh = replace(layout.mesh, shard=ranks, replicate=1)
    return replace(layout, strategy="fsdp2", mesh=mesh, sharding="full")


def advice(
    one: Profile, two: Profile, layout: Layout, capacity: float | None = None, device: str = "cuda"
) -> Iterator[str]:
    """The lines for a person whose job has run out of memory.

    Args:
        one: A step of the job, traced without recomputation.
        two: The same with another number of rows.
        layout: How the job is laid out.
        capacity: Bytes of a device; None: not known.
        device: `cuda` or `cpu`.
    """
    use = needed(one, two, layout, device)
    parts = {name: size for name, size in as_dict(use).items() if name != "total" and size >= 0.005 * use.total}
    largest = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(parts.items(), key=lambda pair: -pair[1]))
    has = f", of {_gib(capacity)}" if capacity is not None else ""
    yield f"the plan of this job: a rank needs {_gib(use.total)}{has} ({largest})"
    found = remedies(one, two, layout, device)
    for remedy in found:
        fits = ""
        if capacity is not None:
            fits = ", which fits" if remedy.bytes <= capacity else ", which does not fit yet"
        yield f"- {remedy.what}: {_gib(remedy.saves)} less, {_gib(remedy.bytes)}{fits}"
    if not found:
        yield "- nothing that keeps the batch saves much: a smaller model, or tensor or pipeline parallelism"


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"
