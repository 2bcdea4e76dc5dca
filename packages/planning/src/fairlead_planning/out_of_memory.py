"""What would help a job that does not fit into its devices' memory, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from fairlead import StrategyConfigBase
from fairlead.jobs import LoadedJob
from fairlead.resolve import Resolution
from fairlead_planning.job import planned_job
from fairlead_planning.layouts import Checkpointing, Layout, Sharding
from fairlead_planning.memory import MemoryModel, as_dict, fullest
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.layout import Layout as Mesh
from fairlead_strategies.mesh.config import MeshStrategyConfig, PipelineFields

_WORTH: Final = 0.02
"""What saves less than this share is not named."""


@dataclass(frozen=True)
class Remedy:
    """A change of a job, and the memory of its fullest rank with it."""

    what: str
    layout: Layout
    bytes: float
    saves: float


def remedies(model: MemoryModel, layout: Layout, *, divisible: bool = True) -> list[Remedy]:
    """What saves memory, the most first; each alone, and the last of all together.

    All keep the global batch, and so the training, but for those that need more ranks.

    Args:
        model: Of the job's memory.
        layout: How the job is laid out.
        divisible: Whether its batch can be made smaller.
    """
    now = fullest(model.use(layout)).total
    found: list[Remedy] = []

    def tried(what: str, changed: Layout) -> bool:
        total = fullest(model.use(changed)).total
        if now - total > _WORTH * now:
            found.append(Remedy(what, changed, total, now - total))
        return now - total > _WORTH * now

    together, words = layout, []
    if layout.micro_batch > 1 and divisible:
        rows = next(n for n in range(layout.micro_batch // 2, 0, -1) if layout.micro_batch % n == 0)
        times = layout.accumulation * (layout.micro_batch // rows)
        half = replace(layout, micro_batch=rows, accumulation=times)
        if tried(f"a batch of {rows} on each rank, with accumulate_grad_batches: {times}", half):
            together, words = half, ["a smaller batch"]
    if layout.checkpointing == "none":
        tried("recomputing all but products and attention (selective checkpointing)", _checkpoints(layout, "selective"))
    if layout.checkpointing != "full":
        full = _checkpoints(layout, "full")
        if tried("recomputing all activations of a layer (activation checkpointing)", full):
            together, words = _checkpoints(together, "full"), [*words, "activation checkpointing"]
    if layout.sharding != "full" and layout.data_parallel > 1:
        sharded = _sharded(layout, layout.data_parallel)
        if tried(f"fsdp2: states sharded over the {layout.data_parallel} ranks", sharded):
            together, words = _sharded(together, layout.data_parallel), [*words, "fsdp2"]
    elif layout.data_parallel == 1:
        tried("fsdp2 on two ranks", _sharded(replace(layout, accumulation=max(1, layout.accumulation // 2)), 2))
    elif layout.mesh.shard > 1:
        tried("twice as many ranks to shard over", _sharded(layout, 2 * layout.mesh.shard))
    if not layout.offload:
        tried("the optimizer and its states on the host (offload)", replace(layout, offload=True))
    found.sort(key=lambda each: -each.saves)
    if len(words) > 1 and fullest(model.use(together)).total < min(each.bytes for each in found):
        tried(f"together: {', '.join(words)}", together)
    return found


def _checkpoints(layout: Layout, mode: Checkpointing) -> Layout:
    return replace(layout, checkpointing=mode)


def _sharded(layout: Layout, ranks: int) -> Layout:
    mesh = replace(layout.mesh, shard=ranks, replicate=1)
    return replace(layout, strategy="fsdp2", mesh=mesh, sharding="full")


def advice(
    model: MemoryModel, layout: Layout, capacity: float | None = None, *, divisible: bool = True
) -> Iterator[str]:
    """The lines for a person whose job has run out of memory.

    Args:
        model: Of the job's memory.
        layout: How the job is laid out.
        capacity: Bytes of a device; None: not known.
        divisible: Whether its batch can be made smaller.
    """
    use = fullest(model.use(layout))
    parts = {name: size for name, size in as_dict(use).items() if name != "total" and size >= 0.005 * use.total}
    largest = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(parts.items(), key=lambda pair: -pair[1]))
    has = f", of {_gib(capacity)}" if capacity is not None else ""
    yield f"the plan of this job: a rank needs {_gib(use.total)}{has} ({largest})"
    found = remedies(model, layout, divisible=divisible)
    for remedy in found:
        fits = ""
        if capacity is not None:
            fits = ", which fits" if remedy.bytes <= capacity else ", which does not fit yet"
        yield f"- {remedy.what}: {_gib(remedy.saves)} less, {_gib(remedy.bytes)}{fits}"
    if not found:
        yield "- nothing that keeps the batch saves much: a smaller model, or tensor or pipeline parallelism"


def of_job(loaded: LoadedJob, resolution: Resolution) -> Iterator[str]:
    """The same lines for a job that `fairlead fit` runs, on the device of this process.

    Raises:
        ConfigError: The job cannot be traced without data; what its code raises.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = planned_job(loaded, device)
    accumulation = resolution.trainer.accumulate_grad_batches
    batch = max(1, job.samples // accumulation)
    layout = layout_of(resolution.strategy, resolution.world_size, batch, accumulation, resolution.num_nodes)
    capacity = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    model = MemoryModel(job.profile, job.wider, device)
    yield from advice(model, layout, capacity, divisible=job.wider is not None)


def layout_of(
    strategy: StrategyConfigBase | None, ranks: int, batch: int, accumulation: int = 1, nodes: int = 1
) -> Layout:
    """How a strategy of a job file lays the job out on so many ranks.

    Args:
        strategy: None: a replica for each device, as DDP.
        ranks: How many.
        batch: Samples of a rank's loader.
        accumulation: Batches of one optimizer step.
        nodes: On how many nodes they are.
    """
    one = Layout("single_device" if strategy is None else strategy.name, micro_batch=batch, accumulation=accumulation)
    if isinstance(strategy, MeshStrategyConfig):
        mesh = strategy.layout(ranks, nodes)
        shards = mesh.shard > 1
        keeps = shards and not strategy.frees_units
        one = replace(
            one,
            mesh=mesh,
            sharding="gradients" if keeps else "full" if shards else "none",
            checkpointing="full" if strategy.activation_checkpointing else "none",
            one_unit=strategy.auto_wrap_policy == (),
            cast=shards and bool(strategy.mixed_precision),
            offload=strategy.cpu_offload,
            sequence=bool(getattr(strategy, "sequence_parallel", False)),
        )
        if isinstance(strategy, PipelineFields) and mesh.pipeline > 1:
            most = 4 * mesh.pipeline if strategy.micro_batches == "auto" else strategy.micro_batches
            parts = next(n for n in range(min(batch, most), 0, -1) if batch % n == 0)
            several = strategy.schedule not in ("gpipe", "1f1b")
            each = 1 + several if strategy.stages_per_rank == "auto" else strategy.stages_per_rank
            one = replace(one, micro_batch=batch // parts, accumulation=parts * accumulation)
            one = replace(one, schedule=strategy.schedule, stages_per_rank=each)
        return one
    if isinstance(strategy, DeepSpeedStrategyConfig):
        return replace(
            one,
            mesh=Mesh(shard=ranks),
            sharding=_STAGES[strategy.stage or 0],
            bucket=strategy.reduce_bucket_size,
            offload=strategy.offload_optimizer,
        )
    return replace(one, mesh=Mesh(replicate=ranks))


_STAGES: Final[tuple[Sharding, ...]] = ("none", "optimizer", "gradients", "full")


def _gib(size: float) -> str:
    unit, name = next(pair for pair in _SIZES if size >= pair[0] / 4 or pair[0] == 1)
    return f"{size / unit:.3g} {name}"


_SIZES: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
