"""How much memory a rank takes under a layout: the tensors of a traced step, divided as the layout divides them.

The step is gone through kernel by kernel. What a rank holds all the time (its parts of parameters, optimizer states
and buffers) is a constant below; above it activations are born and die as in the trace, units of a sharded model are
gathered and freed, gradients grow. The fullest moment counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fairlead_planning.layouts import Layout
from fairlead_planning.profile import CAST, Profile

Floats = npt.NDArray[np.float64]
_FORWARD, _BACKWARD, _OPTIMIZER = 0, 1, 2
_PHASES: Final = {"forward": _FORWARD, "backward": _BACKWARD, "optimizer": _OPTIMIZER}
FRAGMENTS: Final = 0.04
"""Of what is allocated on a GPU, the part by which the allocator's reserve is larger."""
CONTEXT_BYTES: Final = 0.6 * 2**30
"""The driver's context, cuBLAS' workspaces: outside of the allocator."""
CHANNEL_BYTES: Final = 0.25 * 2**30
"""NCCL's buffers of one group of ranks."""


@dataclass(frozen=True)
class MemoryUse:
    """What a rank of one stage holds at its fullest moment, in bytes.

    Example:
        >>> use = MemoryUse(parameters=4.0, gradients=4.0, optimizer=8.0, activations=3.0, buffers=0.0, communication=1.0)
        >>> use.allocated, use.total
        (20.0, 20.0)
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Also the batch, and what operators need for a moment."""
    buffers: float
    communication: float
    """Units that are gathered, and what collectives read from and write to."""
    margin: float = 0.0
    """Outside of tensors: the driver, NCCL, fragments between allocations."""

    @property
    def allocated(self) -> float:
        """Of tensors, as `torch.cuda.max_memory_allocated` counts."""
        return self.total - self.margin

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, one.name) for one in fields(self)))


def memory(profile: Profile | Moments, layout: Layout, device: str = "cuda", reduce_bytes: int = 4) -> list[MemoryUse]:
    """The memory of a rank of each stage of a pipeline, first to last; of one, where there is none.

    Args:
        profile: Of the layout's micro-batch and checkpointing.
        layout: How the job is laid out.
        device: `cpu` has no margin, and gathers no unit ahead.
        reduce_bytes: Of one gradient while it is reduced, where shards reduce them.
    """
    moments = profile if isinstance(profile, Moments) else Moments(profile)
    stages = moments.stages(layout.mesh.pipeline, layout.stages_per_rank)
    return [_Rank(moments, layout, device, reduce_bytes, number, units).use() for number, units in enumerate(stages)]


def fullest(uses: Sequence[MemoryUse]) -> MemoryUse:
    """The stage that needs most."""
    return max(uses, key=lambda one: one.total)


class Moments:
    """A profile as arrays, made once for all layouts.

    Args:
        profile: Of one micro-batch.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        kernels, storages = profile.kernels, profile.storages
        self.end = len(kernels)
        self.phase = np.array([_PHASES[k.phase] for k in kernels], dtype=np.int8)
        self.kernel_unit = np.array([k.unit for k in kernels], dtype=np.int32)
        self.bytes = np.array([s.bytes for s in storages])
        self.born = np.array([s.born for s in storages], dtype=np.int64)
        self.died = np.array([s.died for s in storages], dtype=np.int64)
        self.unit = np.array([s.unit for s in storages], dtype=np.int32)
        self.kind = np.array([s.kind for s in storages])
        self.split = np.array([s.split for s in storages])
        self.sequence = np.array([s.sequence for s in storages])
        self.expert = np.array([s.expert for s in storages])
        self.cast = np.array([s.maker == CAST for s in storages])
        self.forward = np.array([s.forward for s in storages], dtype=np.int64)
        self.first_backward = int(np.argmax(self.phase != _FORWARD)) if (self.phase != _FORWARD).any() else self.end
        found = self.phase == _OPTIMIZER
        self.first_optimizer = int(np.argmax(found)) if found.any() else self.end

    @cached_property
    def spans(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The first and last kernel of each unit in each phase."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for phase in (_FORWARD, _BACKWARD):
            for unit in range(len(self.profile.units)):
                at = np.flatnonzero((self.phase == phase) & (self.kernel_unit == unit))
                if len(at):
                    found[unit, phase] = int(at[0]), int(at[-1])
        return found

    @cached_property
    def early(self) -> tuple[int, int]:
        """Where the first unit begins in the forward pass, and where the last backward pass of a unit ends."""
        begins = [span[0] for (unit, phase), span in self.spans.items() if unit and phase == _FORWARD]
        ends = [span[1] for (unit, phase), span in self.spans.items() if unit and phase == _BACKWARD]
        return min(begins, default=0), max(ends, default=self.end)

    def stages(self, ranks: int, each: int) -> list[list[list[int]]]:
        """For each rank of a pipeline its stages, each with the numbers of its units; the first has what comes before
        the units (number 0), the last what comes behind (number -1)."""
        units = self.profile.units
        count = ranks * each
        if count == 1:
            return [[[0, *range(1, len(units)), -1]]]
        sizes = np.array([u.parameters + u.expert_parameters for u in units[1:]], dtype=float)
        middles = np.cumsum(sizes) - sizes / 2
        stage = np.minimum((middles / max(1.0, sizes.sum()) * count).astype(int), count - 1)
        cut = [[int(n) + 1 for n in np.flatnonzero(stage == number)] for number in range(count)]
        cut[0].insert(0, 0)
        cut[-1].append(-1)
        return [[cut[rank + number * ranks] for number in range(each)] for rank in range(ranks)]

    def place(self, index: npt.NDArray[np.int64], unit: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The unit of kernels, with -1 for what comes behind all units."""
        begin, finish = self.early
        before = np.where(index < self.first_backward, index < begin, index > finish)
        return np.where((unit == 0) & ~before, -1, unit).astype(np.int32)

    @cached_property
    def kernel_place(self) -> npt.NDArray[np.int32]:
        """The unit of each kernel, with -1 for what comes behind all units."""
        return self.place(np.arange(self.end), self.kernel_unit)

    @cached_property
    def storage_place(self) -> npt.NDArray[np.int32]:
        """The unit of each storage likewise: a parameter's is that where the forward pass reads it last."""
        at = np.where(np.isin(self.kind, ("parameter", "buffer", "input")), np.maximum(self.forward, 0), self.born)
        return self.place(at, self.unit)


class _Rank:
    """One rank's step under a layout."""

    def __init__(
        self, moments: Moments, layout: Layout, device: str, reduce_bytes: int, rank: int, stages: list[list[int]]
    ) -> None:
        self.m, self.layout, self.device, self.reduce_bytes = moments, layout, device, reduce_bytes
        self.rank, self.stages = rank, stages
        self.gathers = layout.sharding == "full" or (
            layout.sharding == "gradients" and layout.strategy in ("fsdp", "fsdp2", "hybrid")
        )
        """Whether parameters are kept in shards; those of FSDP are also where they stay gathered until the backward."""
        self.deepspeed = layout.strategy.startswith("deepspeed")
        self.all = [unit for stage in stages for unit in stage]
        mesh = layout.mesh
        # Ranks that share a sequence hold the same parameters, and share them out as well.
        self.shards = mesh.shard * mesh.context if layout.sharding != "none" else 1
        self.expert_shards = max(1, self.shards // mesh.expert)
        m = moments
        tensor = np.where(m.split, mesh.tensor, 1.0)
        self.own = np.where(m.expert, float(mesh.expert), tensor) if mesh.expert > 1 else tensor
        """By how much what belongs to parameters is divided before it is sharded."""
        sequence = np.where(m.sequence & layout.sequence, float(mesh.tensor), 1.0)
        spread = np.where(m.cast, 1.0, mesh.context)
        self.worked = tensor * sequence * spread
        if mesh.expert > 1:
            self.worked = np.where(m.expert & m.cast, mesh.expert, self.worked)
        self.here = np.isin(m.storage_place, self.all) if mesh.pipeline > 1 else np.ones(len(m.bytes), dtype=bool)

    def _held(self, kind: str, sharded: bool) -> float:
        m = self.m
        chosen = (m.kind == kind) & self.here
        share = np.where(m.expert, self.expert_shards, self.shards) if sharded else 1.0
        return float((m.bytes / self.own / share)[chosen].sum())

    def use(self) -> MemoryUse:
        """What it holds at its fullest moment."""
        layout, m = self.layout, self.m
        full = layout.sharding == "full" or self.gathers
        kept, computed = self._master()
        parameters = self._held("parameter", full) * (kept / computed if full else 1.0)
        optimizer = self._held("optimizer", layout.sharding != "none")
        if self.deepspeed or (not full and kept > computed):
            optimizer += self._held("parameter", layout.sharding != "none") * kept / computed  # what is updated
        buffers = self._held("buffer", False)
        steps = self._timelines()
        gradients = steps["gradients"]
        total = steps["activations"] + gradients + steps["communication"]
        peak = int(np.argmax(total))
        flying = self._in_flight()
        tensors = {
            "parameters": 0.0 if layout.offload and full else parameters,
            "gradients": float(gradients[peak]),
            "optimizer": 0.0 if layout.offload else optimizer,
            "activations": float(steps["activations"][peak]) + flying,
            "buffers": buffers,
            "communication": float(steps["communication"][peak]) + self._received(),
        }
        margin = 0.0
        if self.device == "cuda":
            one = layout.mesh
            groups = sum(n > 1 for n in (one.pipeline, one.replicate, one.shard, one.context, one.tensor, one.expert))
            margin = FRAGMENTS * sum(tensors.values()) + CONTEXT_BYTES + CHANNEL_BYTES * groups
        return MemoryUse(**tensors, margin=margin)

    def _master(self) -> tuple[float, float]:
        """Bytes of a parameter as the run keeps it, and as the step computes with it."""
        units = self.m.profile.units
        count = sum(u.parameters + u.expert_parameters for u in units) or 1
        computed = float(self.m.bytes[self.m.kind == "parameter"].sum())
        return sum(u.parameter_bytes for u in units) / count, computed / count

    def _timelines(self) -> dict[str, Floats]:
        m, layout = self.m, self.layout
        work = (m.kind == "activation") & self.here
        late = m.born >= m.first_optimizer
        share = np.where(m.expert, self.expert_shards, self.shards) if layout.sharding != "none" else 1.0
        size = np.where(late, m.bytes / self.own / share, m.bytes / self.worked)
        inputs = float((m.bytes / layout.mesh.context)[m.kind == "input"].sum())
        activations = self._over_time(work, size) + inputs
        out = {"activations": activations, "gradients": self._gradients(), "communication": self._communication()}
        if layout.offload:
            for one in out.values():
                one[m.first_optimizer :] = 0.0  # the step is the host's
        if layout.mesh.pipeline > 1:
            mine = np.isin(m.kernel_place, self.all) | (m.phase == _OPTIMIZER)
            for name in ("activations", "communication"):
                out[name] = np.where(mine, out[name], 0.0)
        return out

    def _over_time(self, chosen: npt.NDArray[np.bool_], size: Floats) -> Floats:
        """How many bytes of some storages are there at each kernel."""
        m = self.m
        change = np.zeros(m.end + 2)
        np.add.at(change, np.maximum(m.born[chosen], 0), size[chosen])
        np.add.at(change, np.minimum(m.died[chosen], m.end) + 1, -size[chosen])
        result: Floats = np.cumsum(change)[: m.end]
        return result

    def _gradients(self) -> Floats:
        m, layout = self.m, self.layout
        mine = (m.kind == "gradient") & self.here
        whole = m.bytes / self.own
        if self.deepspeed:
            # Each is copied into the bucket that is reduced; the shards of their means share memory with the buckets.
            passing: Floats = np.zeros(m.end)
            np.add.at(passing, np.clip(m.born[mine], 0, m.end - 1), whole[mine])
            return passing
        if layout.sharding in ("none", "optimizer"):
            total = float(whole[mine].sum())
            if layout.data_parallel > 1 or layout.accumulation > 1:
                # In buckets, which stay; each is copied there when it is known.
                new: Floats = np.full(m.end, total)
                np.add.at(new, np.clip(m.born[mine], 0, m.end - 1), whole[mine])
                return new
            grown = self._over_time(mine, whole)
            grown[: m.first_backward] = total  # those of the step before, until the backward pass begins
            return grown
        kept, computed = self._master()
        count = whole / np.where(m.expert, self.expert_shards, self.shards) * kept / computed
        shards = self._over_time(mine, count)
        shards[: m.first_backward] = float(count[mine].sum())
        if layout.accumulation > 1:
            shards[:] = float(count[mine].sum())
        full: Floats = np.zeros(m.end)
        if layout.mesh.pipeline > 1 and self.gathers:
            # Added up as a whole over the micro-batches, and reduced behind the last.
            return full + float(whole[mine].sum())
        for unit in self._numbers():
            own = mine & (m.unit == unit)
            span = m.spans.get((unit, _BACKWARD))
            if span is None or not own.any():
                continue
            grown = self._over_time(own, whole)
            full[span[0] : span[1] + 1] += grown[span[0] : span[1] + 1]
            # Copied into one buffer, which is kept until the next unit's gradients are reduced.
            after = m.spans.get((unit - 1, _BACKWARD), span) if unit else span
            full[span[1] : max(span[1], after[1]) + 1] += float(whole[own].sum()) * self.reduce_bytes / computed
        return shards + full

    def _communication(self) -> Floats:
        """Parameters that are gathered for their units: what is computed with, and the collective's buffer."""
        m, layout = self.m, self.layout
        out: Floats = np.zeros(m.end)
        if self.deepspeed:
            _, computed = self._master()
            out += (1 if layout.sharding == "full" else 2) * layout.bucket * computed
        if not self.gathers or self.shards == 1:
            return out
        size = m.bytes / self.own
        parameters = (m.kind == "parameter") & self.here
        if layout.whole:
            out[: m.first_optimizer] = float(size[parameters].sum())
            return out
        numbers = self._numbers()
        whole = {n: float(size[parameters & (m.unit == n)].sum()) for n in numbers}
        keep = layout.sharding == "gradients" or layout.mesh.pipeline > 1
        for place, unit in enumerate(numbers):
            forward, backward = m.spans.get((unit, _FORWARD)), m.spans.get((unit, _BACKWARD))
            if forward is None or backward is None:
                continue
            if unit == 0 or keep:
                out[forward[0] : backward[1] + 1] += whole[unit]
            else:
                out[forward[0] : forward[1] + 1] += whole[unit]
                out[backward[0] : max(backward)] += whole[unit]  # freed before its gradients are reduced
            # The next one's buffer is filled while this one computes; on a CPU in the backward pass alone.
            after = numbers[place + 1] if place + 1 < len(numbers) else None
            before = numbers[place - 1] if place > 1 else None
            if self.device == "cpu":
                out[forward[0]] += whole[unit]
            elif after is not None:
                out[forward[0] : forward[1] + 1] += whole[after]
            if before is not None and not keep:
                out[backward[0] : backward[1] + 1] += whole[before]
        last = numbers[-1]
        if last and not keep and (last, _BACKWARD) in m.spans:
            out[m.first_backward : m.spans[last, _BACKWARD][0]] += whole[last]  # while the loss is differentiated
        return out

    def _received(self) -> float:
        """Buffers for what all micro-batches of a step get from the stages before and behind."""
        layout, mesh = self.layout, self.layout.mesh
        if mesh.pipeline == 1:
            return 0.0
        sequence = mesh.context * (mesh.tensor if layout.sequence else 1)
        each = self.m.profile.width_bytes * layout.accumulation / sequence
        ends = (0 in self.all) + (-1 in self.all)  # nothing comes before the first stage, nor behind the last
        return each * (2 * layout.stages_per_rank - ends)

    def _numbers(self) -> list[int]:
        found = sorted({max(0, unit) for unit in self.all})
        return found

    def _in_flight(self) -> float:
        """What the micro-batches hold that have been through the forward pass, beside the one in work."""
        mesh = self.layout.mesh
        if mesh.pipeline == 1:
            return 0.0
        m = self.m
        saved = (m.kind == "activation") & (m.born < m.first_backward) & (m.died >= m.first_backward) & self.here & ~m.cast
        held = float((m.bytes / self.worked)[saved].sum()) / self.layout.stages_per_rank
        return (in_flight(self.layout, self.rank) - 1) * held


def in_flight(layout: Layout, rank: int) -> int:
    """How many micro-batches a rank of a pipeline holds at once, each for one of its stages.

    Example:
        >>> from fairlead_strategies.layout import Layout as Mesh
        >>> [in_flight(Layout("pipeline_parallel", Mesh(pipeline=4), accumulation=8), rank) for rank in range(4)]
        [4, 3, 2, 1]
    """
    ranks, count, each = layout.mesh.pipeline, layout.accumulation, layout.stages_per_rank
    if layout.schedule == "gpipe":
        return count
    if layout.schedule == "zbv_zero_bubble":
        return min(2 * count, 2 * ranks)
    if each == 1:
        return min(count, ranks - rank)
    # Warm-up of the interleaved schedule (arXiv:2104.04473), and the one in work.
    return min(count * each, 2 * (ranks - rank - 1) + (each - 1) * ranks + 1)


def as_dict(use: MemoryUse) -> dict[str, Any]:
    """Bytes by name, with their sum."""
    return {one.name: getattr(use, one.name) for one in fields(use)} | {"total": use.total}
