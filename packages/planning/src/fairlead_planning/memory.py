"""How much memory a rank takes under a layout: the tensors of a traced step, divided as the layout divides them.

The step is gone through kernel by kernel. What a rank holds all the time (its parts of parameters, optimizer states
and buffers) is a constant below; above it activations are born and die as in the trace, units of a sharded model are
gathered and freed, gradients grow. The fullest moment counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fairlead_planning.layouts import Checkpointing, Layout
from fairlead_planning.profile import CAST, Profile
from fairlead_planning.variants import checkpointed

Floats = npt.NDArray[np.float64]
_FORWARD, _BACKWARD, _OPTIMIZER = 0, 1, 2
_PHASES: Final = {"forward": _FORWARD, "backward": _BACKWARD, "optimizer": _OPTIMIZER}
FRAGMENTS: Final = 0.04
"""Of what is allocated on a GPU, the part by which the allocator's reserve is larger."""
CONTEXT_BYTES: Final = 0.6 * 2**30
"""The driver's context, cuBLAS' workspaces: outside of the allocator."""
_LIVE: Final = 1e9
"""Parameters that DeepSpeed's stage 3 keeps gathered (`stage3_max_live_parameters`)."""
CHANNEL_BYTES: Final = 0.25 * 2**30
"""NCCL's buffers of one group of ranks."""


@dataclass(frozen=True)
class MemoryUse:
    """What a rank of one stage holds at its fullest moment, in bytes.

    Example:
        >>> use = MemoryUse(4.0, gradients=4.0, optimizer=8.0, activations=3.0, buffers=0.0, communication=1.0)
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


def fullest(uses: Sequence[MemoryUse]) -> MemoryUse:
    """The stage that needs most."""
    return max(uses, key=lambda one: one.total)


class Moments:
    """A profile as timelines, made once for all layouts.

    What a layout divides alike becomes one timeline: then a layout costs a weighted sum.

    Args:
        profile: Of one micro-batch.
        ahead: Whether units are gathered while the one before computes, as on a GPU.
    """

    def __init__(self, profile: Profile, ahead: bool = True) -> None:
        self.profile, self.ahead = profile, ahead
        kernels, storages = profile.kernels, profile.storages
        self.end = len(kernels)
        self.phase = np.array([_PHASES[k.phase] for k in kernels], dtype=np.int8)
        self.kernel_unit = np.array([k.unit for k in kernels], dtype=np.int32)
        self.bytes = np.array([s.bytes for s in storages])
        self.born = np.array([s.born for s in storages], dtype=np.int64)
        self.died = np.array([s.died for s in storages], dtype=np.int64)
        self.unit = np.array([s.unit for s in storages], dtype=np.int32)
        self.kind = np.array([s.kind for s in storages])
        self.forward = np.array([s.forward for s in storages], dtype=np.int64)
        self.cast = np.array([s.maker == CAST for s in storages])
        split = np.array([s.split for s in storages])
        self.owner = np.where(np.array([s.expert for s in storages]), 2 + split, split).astype(np.int8)
        """Which dimension divides what belongs to a parameter: none, tensor, expert, either."""
        sequence = np.array([s.sequence for s in storages])
        work = np.where(self.cast, 4 + self.owner, np.where(split, 1, np.where(sequence, 2, 0)))
        self.work: npt.NDArray[np.int8] = work.astype(np.int8)
        """Which dimension divides an activation: none, tensor, sequence; a parameter's copy as the parameter."""
        self.first_backward = int(np.argmax(self.phase != _FORWARD)) if (self.phase != _FORWARD).any() else self.end
        found = self.phase == _OPTIMIZER
        self.first_optimizer = int(np.argmax(found)) if found.any() else self.end
        self._of: dict[tuple[int, ...], Timelines] = {}

    def timelines(self, units: Sequence[int] | None = None) -> Timelines:
        """Those of the full model, or of what a rank of a pipeline has of it."""
        key = () if units is None else tuple(units)
        if key not in self._of:
            self._of[key] = Timelines(self, units)
        return self._of[key]

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

    def stages(self, ranks: int, each: int) -> list[list[int]]:
        """For each rank of a pipeline its units; the first has what comes before all units (number 0), the last what
        comes behind them (number -1)."""
        units, count = self.profile.units, ranks * each
        sizes = np.array([u.parameters + u.expert_parameters for u in units[1:]], dtype=float)
        middles = np.cumsum(sizes) - sizes / 2
        stage = np.minimum((middles / max(1.0, sizes.sum()) * count).astype(int), count - 1)
        cut = [[int(n) + 1 for n in np.flatnonzero(stage == number)] for number in range(count)]
        cut[0].insert(0, 0)
        cut[-1].append(-1)
        return [[unit for number in range(each) for unit in cut[rank + number * ranks]] for rank in range(ranks)]

    def position(self, index: npt.NDArray[np.int64], unit: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The unit of kernels, with -1 for what comes behind all units."""
        begin, finish = self.early
        before = np.where(index < self.first_backward, index < begin, index > finish)
        return np.where((unit == 0) & ~before, -1, unit).astype(np.int32)

    @cached_property
    def kernel_position(self) -> npt.NDArray[np.int32]:
        """The unit of each kernel, with -1 for what comes behind all units."""
        return self.position(np.arange(self.end), self.kernel_unit)

    @cached_property
    def storage_position(self) -> npt.NDArray[np.int32]:
        """The unit of each storage likewise: a parameter's is that where the forward pass reads it last."""
        at = np.where(np.isin(self.kind, ("parameter", "buffer", "input")), np.maximum(self.forward, 0), self.born)
        return self.position(at, self.unit)


class Timelines:
    """What a rank has of a profile, by who divides it: (who, kernels) where it changes, (who,) where it does not.

    Attributes:
        activations: By `Moments.work`.
        late: Of the optimizer's step, by `Moments.owner`, as all that follow.
        grown: Gradients, as they become.
        passing: Gradients, each while it is made.
        within: Gradients of a unit, until its backward pass is over.
        reduced: The buffer in which a unit's gradients are reduced.
        gathered: Parameters of units that are gathered, and freed behind their forward pass.
        held: Likewise, but freed behind their backward pass.
        saved: What the forward pass leaves for the backward pass, by `Moments.work`.
    """

    def __init__(self, m: Moments, units: Sequence[int] | None) -> None:
        here = np.ones(len(m.bytes), dtype=bool) if units is None else np.isin(m.storage_position, units)
        mine = None if units is None else np.isin(m.kernel_position, units) | (m.phase == _OPTIMIZER)
        activation = (m.kind == "activation") & here
        late = m.born >= m.first_optimizer
        self.activations = self._over_time(m, activation & ~late, m.work, 8)
        self.late = self._over_time(m, activation & late, m.owner, 4)
        gradient, parameter = (m.kind == "gradient") & here, (m.kind == "parameter") & here
        self.grown = self._over_time(m, gradient, m.owner, 4)
        self.passing = np.zeros((4, m.end))
        np.add.at(self.passing, (m.owner[gradient], np.clip(m.born[gradient], 0, m.end - 1)), m.bytes[gradient])
        self.gradients = np.bincount(m.owner[gradient], m.bytes[gradient], 4)
        self.parameters = np.bincount(m.owner[parameter], m.bytes[parameter], 4)
        states = (m.kind == "optimizer") & here
        self.optimizer = np.bincount(m.owner[states], m.bytes[states], 4)
        self.buffers = float(m.bytes[(m.kind == "buffer") & here].sum())
        self.inputs = float(m.bytes[m.kind == "input"].sum())
        saved = activation & (m.born < m.first_backward) & (m.died >= m.first_backward) & ~m.cast
        self.saved = np.bincount(m.work[saved], m.bytes[saved], 8)
        numbers = list(range(len(m.profile.units))) if units is None else sorted({max(0, unit) for unit in units})
        self._gather(m, numbers, parameter)
        self._reduce(m, numbers, gradient)
        if mine is not None:
            for one in (self.activations, self.gathered, self.held, self.within, self.reduced):
                one[:, ~mine] = 0.0

    @staticmethod
    def _over_time(m: Moments, chosen: npt.NDArray[np.bool_], group: npt.NDArray[np.int8], groups: int) -> Floats:
        """How many bytes of some storages are there at each kernel, by group."""
        change = np.zeros((groups, m.end + 2))
        np.add.at(change, (group[chosen], np.maximum(m.born[chosen], 0)), m.bytes[chosen])
        np.add.at(change, (group[chosen], np.minimum(m.died[chosen], m.end) + 1), -m.bytes[chosen])
        result: Floats = np.cumsum(change, axis=1)[:, : m.end]
        return result

    def _gather(self, m: Moments, numbers: list[int], parameter: npt.NDArray[np.bool_]) -> None:
        """Parameters that are gathered for their units: what is computed with, and the collective's buffer."""
        full: dict[int, Floats] = {}
        for unit in numbers:
            own = parameter & (m.unit == unit)
            full[unit] = np.bincount(m.owner[own], m.bytes[own], 4).astype(np.float64)[:, None]
        self.gathered, self.held = np.zeros((4, m.end)), np.zeros((4, m.end))
        for position, unit in enumerate(numbers):
            forward, backward = m.spans.get((unit, _FORWARD)), m.spans.get((unit, _BACKWARD))
            if forward is None or backward is None:
                continue
            self.held[:, forward[0] : backward[1] + 1] += full[unit]
            if unit == 0:
                self.gathered[:, forward[0] : backward[1] + 1] += full[unit]
            else:
                self.gathered[:, forward[0] : forward[1] + 1] += full[unit]
                self.gathered[:, backward[0] : max(backward)] += full[unit]  # freed before its gradients are reduced
            # The next one's buffer is filled while this one computes; on a CPU in the backward pass alone.
            after = numbers[position + 1] if position + 1 < len(numbers) else None
            for timeline in (self.gathered, self.held):
                if not m.ahead:
                    timeline[:, forward[0]] += full[unit][:, 0]
                elif after is not None:
                    timeline[:, forward[0] : forward[1] + 1] += full[after]
            if position > 1:
                self.gathered[:, backward[0] : backward[1] + 1] += full[numbers[position - 1]]
        last = numbers[-1] if numbers else 0
        if last and (last, _BACKWARD) in m.spans:
            self.gathered[:, m.first_backward : m.spans[last, _BACKWARD][0]] += full[last]  # while the loss is derived

    def _reduce(self, m: Moments, numbers: list[int], gradient: npt.NDArray[np.bool_]) -> None:
        self.within, self.reduced = np.zeros((4, m.end)), np.zeros((4, m.end))
        for unit in numbers:
            own, span = gradient & (m.unit == unit), m.spans.get((unit, _BACKWARD))
            if span is None or not own.any():
                continue
            at = (m.owner[own], np.clip(m.born[own], span[0], span[1]))
            change = np.zeros((4, m.end))
            np.add.at(change, at, m.bytes[own])
            self.within[:, span[0] : span[1] + 1] += np.cumsum(change[:, span[0] : span[1] + 1], axis=1)
            # Copied into one buffer, which stays until the next unit's gradients are reduced.
            after = m.spans.get((unit - 1, _BACKWARD), span) if unit else span
            total = np.bincount(m.owner[own], m.bytes[own], 4)[:, None]
            self.reduced[:, span[1] : max(span[1], after[1]) + 1] += total


class MemoryModel:
    """The memory of layouts of one job, for any micro-batch.

    Args:
        one: A profile.
        two: Of other rows, between which and beyond which sizes lie on a line; None: they grow with the rows.
        device: `cpu` has no margin, and gathers no unit ahead.
        reduce_bytes: Of one gradient while it is reduced, where shards reduce them.
    """

    def __init__(self, one: Profile, two: Profile | None = None, device: str = "cuda", reduce_bytes: int = 4) -> None:
        self._profiles, self.device, self.reduce_bytes = (one, two), device, reduce_bytes
        self._moments: dict[str, tuple[Moments, Moments | None]] = {}
        units = one.units
        count = sum(u.parameters + u.expert_parameters for u in units) or 1
        self.computed = sum(s.bytes for s in one.storages if s.kind == "parameter") / count
        """Bytes of a parameter as the step computes with it."""
        self.master = sum(u.parameter_bytes for u in units) / count
        """And as the run keeps it."""

    def moments(self, mode: Checkpointing) -> tuple[Moments, Moments | None]:
        """The two profiles as timelines, with what is recomputed."""
        if mode not in self._moments:
            one, two = (None if p is None else checkpointed(p, mode) for p in self._profiles)
            assert one is not None
            if two is not None and (len(one.kernels), len(one.storages)) != (len(two.kernels), len(two.storages)):
                two = None
            ahead = self.device != "cpu"
            self._moments[mode] = Moments(one, ahead), None if two is None else Moments(two, ahead)
        return self._moments[mode]

    def use(self, layout: Layout, ends: bool = False) -> list[MemoryUse]:
        """The memory of a rank of each stage of a pipeline, first to last; of one, where there is none.

        Args:
            layout: How the job is laid out.
            ends: Of a pipeline the first and the last stage are enough: those between need no more.
        """
        one = self.moments(layout.checkpointing)[0]
        ranks = layout.mesh.pipeline
        if ranks == 1:
            return [self._rank(layout, 0, None)]
        stages = one.stages(ranks, layout.stages_per_rank)
        chosen = sorted({0, 1, ranks - 1}) if ends else range(ranks)
        return [self._rank(layout, rank, stages[rank]) for rank in chosen]

    def _rank(self, layout: Layout, rank: int, units: list[int] | None) -> MemoryUse:
        one, two = self.moments(layout.checkpointing)
        now, mesh = one.timelines(units), layout.mesh
        rows, first = layout.micro_batch, one.profile.rows

        def at(name: str) -> Any:
            """Of what grows with the rows, its size for those of the layout."""
            a = getattr(now, name)
            if rows == first or two is None:
                grown = a * (rows / first)
                if isinstance(a, np.ndarray):
                    grown[4:] = a[4:]
                return grown
            return a + (getattr(two.timelines(units), name) - a) * ((rows - first) / (two.profile.rows - first))

        deepspeed = layout.strategy.startswith("deepspeed")
        gathers = layout.sharding == "full" or (layout.sharding == "gradients" and not deepspeed)
        # Ranks that share a sequence hold the same parameters, and share them out as well.
        shards = mesh.shard * mesh.context if layout.sharding != "none" else 1
        expert = float(mesh.expert)
        own = 1 / np.array([1.0, mesh.tensor, *((expert, expert) if expert > 1 else (1.0, mesh.tensor))])
        share = own / np.array([shards, shards, max(1.0, shards / expert), max(1.0, shards / expert)])
        work = np.array([1.0, mesh.tensor, mesh.tensor if layout.sequence else 1.0, 1.0])
        low = min(self.computed, 2.0) / self.computed if layout.cast else 1.0  # of what is computed with
        weights = np.concatenate((1 / work / mesh.context, np.zeros(4) if layout.cast else own))
        computed = self.computed * low
        shard_bytes = float(now.parameters @ share) / self.computed * self.master
        parameters = shard_bytes if gathers else float(now.parameters @ own) * low
        optimizer = float(now.optimizer @ (share if layout.sharding != "none" else own))
        if deepspeed or (not gathers and self.master > computed):
            optimizer += shard_bytes  # what is updated
        activations = weights @ at("activations") + at("inputs") / mesh.context
        activations = activations + (share if layout.sharding != "none" else own) @ now.late
        gradients = self._gradients(layout, one, now, own, share, gathers, low)
        communication = np.zeros(one.end)
        if deepspeed:
            communication += (1 if layout.sharding == "full" else 2) * layout.bucket * computed
            if layout.sharding == "full":
                live = min(float(now.parameters @ own) * low, _LIVE * computed)
                communication[: one.first_optimizer] += live
        elif gathers and shards > 1:
            if layout.one_unit:
                communication[: one.first_optimizer] += float(now.parameters @ own) * low
            else:
                keep = layout.sharding == "gradients" or mesh.pipeline > 1
                communication += own @ (now.held if keep else now.gathered) * low
        if layout.offload:
            for timeline in (activations, gradients, communication):
                timeline[one.first_optimizer :] = 0.0  # the step is the host's
        peak = int(np.argmax(activations + gradients + communication))
        flying = 0.0
        if mesh.pipeline > 1:
            held = float(at("saved") @ weights) / layout.stages_per_rank
            flying = (in_flight(layout, rank) - 1) * held
        tensors = {
            "parameters": 0.0 if layout.offload and gathers else parameters,
            "gradients": float(gradients[peak]),
            "optimizer": 0.0 if layout.offload else optimizer,
            "activations": float(activations[peak]) + flying,
            "buffers": now.buffers,
            "communication": float(communication[peak]) + self._received(layout, rank),
        }
        margin = 0.0
        if self.device != "cpu":
            groups = (mesh.pipeline, mesh.replicate, mesh.shard, mesh.context, mesh.tensor, mesh.expert)
            margin = FRAGMENTS * sum(tensors.values()) + CONTEXT_BYTES + CHANNEL_BYTES * sum(n > 1 for n in groups)
        return MemoryUse(**tensors, margin=margin)

    def _gradients(
        self, layout: Layout, m: Moments, now: Timelines, own: Floats, share: Floats, gathers: bool, low: float
    ) -> Floats:
        total = float(now.gradients @ own) * low
        if layout.strategy.startswith("deepspeed"):
            # Each is copied into the bucket that is reduced; the shards of their means share memory with the buckets.
            passing: Floats = own @ now.passing
            return passing
        if not gathers:
            if layout.data_parallel > 1 or layout.accumulation > 1:
                # In buckets, which stay; each is copied there when it is known.
                return total + own @ now.passing
            grown: Floats = own @ now.grown
            grown[: m.first_backward] = total  # those of the step before, until the backward pass begins
            return grown
        if layout.mesh.pipeline > 1:
            # Added up in full over the micro-batches, and reduced behind the last.
            return np.full(m.end, total)
        wide = self.master / self.computed
        shards: Floats = share @ now.grown * wide
        every = float(now.gradients @ share) * wide
        shards[: m.first_backward] = every
        if layout.accumulation > 1:
            shards[:] = every
        if layout.offload:
            shards = np.zeros(m.end)
        if layout.mesh.shard * layout.mesh.context == 1:
            return shards
        return shards + own @ now.within * low + own @ now.reduced * (self.reduce_bytes / self.computed)

    def _received(self, layout: Layout, rank: int) -> float:
        """Buffers for what all micro-batches of a step get from the stages before and behind."""
        mesh = layout.mesh
        if mesh.pipeline == 1:
            return 0.0
        one = self._profiles[0]
        sequence = mesh.context * (mesh.tensor if layout.sequence else 1)
        each = one.width_bytes * layout.micro_batch / one.rows * layout.accumulation / sequence
        ends = (rank == 0) + (rank == mesh.pipeline - 1)  # nothing comes before the first stage, nor behind the last
        return each * (2 * layout.stages_per_rank - ends)


def memory(profile: Profile, layout: Layout, device: str = "cuda", reduce_bytes: int = 4) -> list[MemoryUse]:
    """The memory of a rank of each stage of a pipeline; for many layouts of one job make one `MemoryModel`.

    The profile is of the layout's micro-batch, without what is recomputed: the layout says that.
    """
    return MemoryModel(profile, None, device, reduce_bytes).use(replace(layout, micro_batch=profile.rows))


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
