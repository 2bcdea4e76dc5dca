"""Which layouts there are for a job on a cluster, and which of them fit: all are tried, none is guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import log
from typing import Final

from fairlead_planning.calibration import Calibration
from fairlead_planning.devices import Cluster
from fairlead_planning.job import Planned
from fairlead_planning.layouts import STRATEGIES, Checkpointing, Layout, Sharding
from fairlead_planning.memory import MemoryModel, MemoryUse, fullest
from fairlead_planning.profile import Profile
from fairlead_planning.step_time import StepTime, StepTimer
from fairlead_planning.variants import cast_when_gathered, checkpointed, with_rows
from fairlead_runs.describe import counted
from fairlead_strategies.layout import Layout as Mesh

GIB: Final = 2.0**30
ALIKE: Final = 0.03
"""By less than this share two predicted times count as equal: it is the median error on published runs."""
_SIMPLE: Final = ("single", "ddp", "fsdp2", "hybrid", "deepspeed")


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with what is predicted of it."""

    layout: Layout
    memory: tuple[MemoryUse, ...]
    """Of a rank of each stage; of one, where there is no pipeline."""
    time: StepTime

    @property
    def fullest(self) -> MemoryUse:
        """Of the rank that needs most."""
        return fullest(self.memory)


@dataclass
class Search:
    """What was tried.

    Attributes:
        candidates: What fits, the fastest first; of each mesh and strategy the best.
        limit: Bytes of memory that a device has.
        tried: How many layouts.
        unfit: How many need more memory than there is.
        nearest: Of those the one that lacks least, and how many bytes.
        lacking: For each kind of layout (`kind`) how many bytes the one lacks that is nearest to fit.
        refused: Why meshes and batches cannot be laid out at all, and how often that ended a try.
    """

    limit: float
    candidates: list[Candidate] = field(default_factory=list)
    tried: int = 0
    unfit: int = 0
    nearest: tuple[Layout, float] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    lacking: dict[str, float] = field(default_factory=dict)


def search(
    job: Planned,
    cluster: Cluster,
    devices: int,
    global_batch: int,
    *,
    calibration: Calibration | None = None,
    memory_gib: float | None = None,
    strategies: tuple[str, ...] = STRATEGIES,
) -> Search:
    """Tries all layouts of a job on so many devices.

    Args:
        job: Traced.
        cluster: Of which devices, and how they are connected.
        devices: How many.
        global_batch: Samples of one optimizer step of all.
        calibration: How fast devices are; None: the shipped one.
        memory_gib: Of one device; None: all that it has.
        strategies: Those that may be chosen.
    """
    limit = (memory_gib or cluster.device.memory_gib) * GIB
    found = Search(limit)
    model = MemoryModel(job.profile, job.wider, "cpu" if cluster.device.model == "" else "cuda")
    timers = _Timers(job, cluster, calibration)
    best: dict[tuple[object, ...], Candidate] = {}
    for family in layouts(job, cluster, devices, global_batch, strategies, found.refused):
        largest = 0
        for mode in _modes(job, family[0].strategy):
            fitting: list[tuple[Layout, list[MemoryUse]]] = []
            for number, plain in enumerate(family):
                layout = replace(plain, checkpointing=mode)
                found.tried += 1
                use = model.use(layout, ends=True)
                lacking = max(one.total for one in use) - limit
                if lacking > 0:  # so do those of larger micro-batches
                    found.tried += len(family) - number - 1
                    found.unfit += len(family) - number
                    name = kind(layout)
                    found.lacking[name] = min(lacking, found.lacking.get(name, lacking))
                    if found.nearest is None or lacking < found.nearest[1]:
                        found.nearest = layout, lacking
                    break
                fitting.append((layout, use))
            if not fitting or fitting[-1][0].micro_batch <= largest:
                continue  # recomputation makes room for nothing
            largest = fitting[-1][0].micro_batch
            # Larger micro-batches are faster, but where a pipeline has fewer of them to fill its stages with.
            for fits, use in fitting[-4 if fitting[0][0].mesh.pipeline > 1 else -2 :]:
                candidate = Candidate(fits, tuple(use), timers.time(fits))
                key = (fits.strategy, fits.mesh, fits.sharding, fits.sequence, fits.offload)
                if key not in best or candidate.time.seconds < best[key].time.seconds:
                    best[key] = candidate
    fastest = min((one.time.seconds for one in best.values()), default=1.0)

    def rank(one: Candidate) -> tuple[int, int, float]:
        """Where two are as fast, within what a prediction can tell, the one with fewer parts comes first."""
        simple = _SIMPLE.index(one.layout.strategy.partition("_")[0])
        return int(log(one.time.seconds / fastest) / ALIKE), simple, one.time.seconds

    ranked = sorted(best.values(), key=rank)
    found.candidates = [replace(one, memory=tuple(model.use(one.layout))) for one in ranked]
    return found


def kind(layout: Layout) -> str:
    """What a layout does with the model, in a word: `ddp`, `fsdp2`, `tensor`, `pipeline`, `hybrid`, ...

    Example:
        >>> kind(Layout("hybrid", Mesh(shard=4, tensor=2))), kind(Layout("hybrid", Mesh(pipeline=2, tensor=2)))
        ('tensor', 'hybrid')
    """
    if layout.strategy != "hybrid":
        return layout.strategy + (" offload" if layout.offload and layout.strategy == "fsdp2" else "")
    split = [name for name in ("pipeline", "tensor", "context", "expert") if getattr(layout.mesh, name) > 1]
    if not split:
        return "hsdp"
    return split[0] if len(split) == 1 else "hybrid"


class _Timers:
    """Step times; a profile with other rows or recomputation is made when it is first needed."""

    def __init__(self, job: Planned, cluster: Cluster, calibration: Calibration | None) -> None:
        self._job, self._cluster, self._calibration = job, cluster, calibration
        self._of: dict[tuple[int, Checkpointing, bool], StepTimer] = {}
        self._base: dict[tuple[Checkpointing, bool], tuple[Profile, Profile | None]] = {}

    def time(self, layout: Layout) -> StepTime:
        key = (layout.micro_batch, layout.checkpointing, layout.cast)
        if key not in self._of:
            one, two = self._profiles(layout.checkpointing, layout.cast)
            profile = with_rows(one, two or one, layout.micro_batch)
            stack = "compile" if self._job.compiled else "eager"
            self._of[key] = StepTimer(
                profile, self._cluster, stack=stack, products=self._job.products, calibration=self._calibration
            )
        return self._of[key].time(layout)

    def _profiles(self, mode: Checkpointing, cast: bool) -> tuple[Profile, Profile | None]:
        if (mode, cast) not in self._base:
            both = [self._job.profile, self._job.wider]
            if cast:
                both = [None if one is None else cast_when_gathered(one) for one in both]
            # A time is one of kernels alone.
            one, two = (None if p is None else replace(checkpointed(p, mode), storages=()) for p in both)
            assert one is not None
            self._base[mode, cast] = one, two
        return self._base[mode, cast]


def _modes(job: Planned, strategy: str) -> tuple[Checkpointing, ...]:
    if strategy not in ("fsdp2", "hybrid") or len(job.profile.units) < 2:
        return ("none",)
    return "none", "full"


def layouts(
    job: Planned,
    cluster: Cluster,
    devices: int,
    global_batch: int,
    strategies: tuple[str, ...],
    refused: Counter[str],
) -> Iterator[list[Layout]]:
    """For each mesh its layouts by micro-batch, the smallest first; what cannot be is counted in `refused`."""
    for strategy, mesh, sharding, sequence in _meshes(job, cluster, devices, strategies, refused):
        ranks = mesh.replicate * mesh.shard
        if global_batch % ranks:
            refused[f"the batch of {global_batch:,} samples cannot be divided among {ranks:,} ranks"] += 1
            continue
        share = global_batch // ranks
        gathers = sharding != "none" and strategy in ("fsdp2", "fsdp2_offload", "hybrid")
        cast = gathers and job.precision == "bf16-mixed" and job.products is None
        family = []
        for micro in _micro_batches(share, job.wider is not None, job.profile.rows):
            if mesh.pipeline > 1 and share // micro < mesh.pipeline:
                refused["fewer micro-batches than stages of a pipeline"] += 1
                continue
            family.append(
                Layout(
                    "fsdp2" if strategy == "fsdp2_offload" else strategy,
                    mesh,
                    micro,
                    share // micro,
                    sharding=sharding,
                    sequence=sequence,
                    cast=cast,
                    offload=strategy.endswith("_offload"),
                )
            )
        if family:
            yield family
        elif job.wider is None:
            refused[f"a rank's {share:,} samples are no multiple of the {job.profile.rows:,} of the batch"] += 1


def _micro_batches(share: int, divisible: bool, rows: int) -> list[int]:
    if not divisible:
        return [rows] if share % rows == 0 else []
    return [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= share and share % size == 0]


def _meshes(
    job: Planned, cluster: Cluster, devices: int, strategies: tuple[str, ...], refused: Counter[str]
) -> Iterator[tuple[str, Mesh, Sharding, bool]]:
    """Strategy, mesh, what is sharded, whether the sequence is split with the layers."""
    if devices == 1:
        if "single_device" in strategies:
            yield "single_device", Mesh(), "none", False
        return
    if "ddp" in strategies:
        yield "ddp", Mesh(replicate=devices), "none", False
    if "fsdp2" in strategies:
        yield "fsdp2", Mesh(shard=devices), "full", False
        yield "fsdp2", Mesh(shard=devices), "gradients", False
        yield "fsdp2_offload", Mesh(shard=devices), "full", False
    if "deepspeed" in strategies:
        stages: tuple[Sharding, ...] = ("optimizer", "gradients", "full")
        for stage, sharded in enumerate(stages, 1):
            yield f"deepspeed_stage_{stage}", Mesh(shard=devices), sharded, False
        yield "deepspeed_stage_3_offload", Mesh(shard=devices), "full", False
    if "hybrid" not in strategies:
        return
    parts = job.divisible
    for tensor in _powers(min(devices, cluster.domain)):
        if tensor > 1 and not parts.tensor:
            refused[f"tensor parallelism: {parts.tensor_refusal}"] += 1
            break
        wrong = next((size for size in parts.tensor if size % tensor), None)
        if wrong is not None:
            refused[f"{wrong} heads or features cannot be divided among {tensor} ranks of tensor"] += 1
            continue
        for context in _powers(min(16, devices // tensor)):
            if context > 1 and (parts.length < 4096 or parts.length % (2 * context)):
                break  # short sequences gain nothing by it
            for pipeline in _powers(devices // tensor // context):
                if pipeline > 1 and parts.pipeline_refusal:
                    refused[f"pipeline: {parts.pipeline_refusal}"] += 1
                    break
                if pipeline > len(job.profile.units) - 1:
                    refused[f"{counted(len(job.profile.units) - 1, 'layer')} cannot be cut into {pipeline} stages"] += 1
                    break
                if devices % (tensor * context * pipeline):
                    continue
                rest = devices // tensor // context // pipeline
                groups = [cluster.node // tensor, cluster.node]
                if tensor == context == pipeline == 1:
                    groups += [cluster.node * times for times in _powers(rest // cluster.node)]
                for shard in sorted({rest, *(n for n in groups if 1 < n < rest)}):
                    if rest % shard:
                        continue
                    for expert in _experts(parts.experts, shard):
                        if tensor == context == pipeline == expert == 1 and shard == devices:
                            continue  # that is fsdp2
                        mesh = Mesh(pipeline, rest // shard, shard, context, tensor, expert)
                        sharding: Sharding = "full" if shard * context > 1 else "none"
                        yield "hybrid", mesh, sharding, False
                        # A pipeline's first stage has no end of the sequence's split, its last no beginning: `auto`
                        # refuses that.
                        unsplit = pipeline == 1 and expert == 1 and not parts.experts
                        if tensor > 1 and unsplit and parts.length % tensor == 0:
                            yield "hybrid", mesh, sharding, True


def _experts(experts: int, shard: int) -> Iterator[int]:
    yield 1
    if experts > 1:
        yield from (n for n in _powers(min(experts, shard)) if n > 1 and experts % n == 0 and shard % n == 0)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
