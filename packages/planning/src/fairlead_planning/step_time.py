"""How long a step takes: a pure function of a traced step, a layout, a cluster and what is known of its speed.

A kernel takes the longer of what its arithmetic and its memory traffic take. Units of a model run one behind the
other; what is gathered for the next one is hidden behind the one before, as far as that lasts. `StepTimer` reduces a
profile to its different kernels and counts once, so that a search over layouts costs tens of microseconds each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import log, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from fairlead_planning.calibration import Calibration, filled, shipped
from fairlead_planning.collectives import Collectives, Group, Operation
from fairlead_planning.devices import Cluster
from fairlead_planning.layouts import Layout
from fairlead_planning.profile import CAST, Kernel, Profile
from fairlead_runs.pipeline_schedule import bubble_fraction

Array = npt.NDArray[np.float64]

FORWARD, BACKWARD = 0, 1
_FRONT, _BACK = 0, 1
"""What is outside of all units: what comes before them, and what comes behind them."""
_KINDS: Final = ("matmul", "attention", "other")
_BYTES: Final = {"float64": 8, "float32": 4, "tfloat32": 4, "float8": 1, "float4": 0.5}


@dataclass(frozen=True)
class StepTime:
    """Where the time of one optimizer step goes on the slowest rank, in seconds, and what follows from it."""

    seconds: float
    compute: float
    """Forward and backward passes of all micro-batches."""
    recomputation: float
    """Of it, what activation checkpointing recomputes."""
    communication: dict[str, float]
    """What is not hidden behind compute, by what is sent: `data`, `tensor`, `context`, `expert`, `pipeline`."""
    bubble: float
    """Waiting for other stages of a pipeline."""
    optimizer: float
    host: float
    """Waiting for the host, which cannot launch kernels as fast as the device runs them."""
    waiting: float
    """For the slowest of many nodes: what varies from rank to rank."""
    tokens_per_second: float
    """A device."""
    samples_per_second: float
    """Of all devices."""
    tflops: float
    """A device, without recomputation."""
    mfu: float
    """Of the device's peak in the number format of most products."""
    joules: float
    """Of all devices, for the step, at their rated power."""

    @property
    def exposed(self) -> float:
        """All communication that is not hidden."""
        return sum(self.communication.values())


@dataclass(frozen=True)
class _Kernels:
    """The different kernels of a profile as columns, and how often each unit of each sort has them."""

    kind: npt.NDArray[np.int64]
    dtype: tuple[str, ...]
    flops: Array
    bytes: Array
    shape: npt.NDArray[np.int64]
    """batch, m, n, k; 0: not a product."""
    along: npt.NDArray[np.int64]
    """Which column of `shape` are the tokens; -1: none."""
    split: npt.NDArray[np.bool_]
    sequence: npt.NDArray[np.bool_]
    expert: npt.NDArray[np.bool_]
    backward: npt.NDArray[np.bool_]
    recomputed: npt.NDArray[np.bool_]
    cast: npt.NDArray[np.bool_]
    """Of a parameter: no row of the batch makes it larger."""
    counts: Array
    """Sorts of units x 2 phases x kernels."""
    sorts: npt.NDArray[np.int64]
    """The sort of each part: what is in front of all units, what is behind, and the units."""


def _reduce(profile: Profile) -> _Kernels:
    """The different kernels, counted by unit; units that do the same become one sort."""
    index: dict[tuple[object, ...], int] = {}
    kernels: list[Kernel] = []
    parts: list[tuple[Counter[int], Counter[int]]] = [(Counter(), Counter()) for _ in range(len(profile.units) + 1)]
    inside = {FORWARD: False, BACKWARD: False}
    for kernel in profile.kernels:
        if kernel.phase == "optimizer":
            continue
        phase = FORWARD if kernel.phase == "forward" else BACKWARD
        key = (kernel.kind, phase, _computes_in(kernel), kernel.shape, kernel.flops, kernel.bytes, kernel.split,
               _sequence(kernel), kernel.expert, kernel.recomputed, kernel.name == CAST)  # fmt: skip
        index_of_kernel = index.setdefault(key, len(index))
        if index_of_kernel == len(kernels):
            kernels.append(kernel)
        if kernel.unit:
            inside[phase] = True
            part = kernel.unit + 1
        else:
            part = _BACK if inside[phase] == (phase == FORWARD) else _FRONT
        parts[part][phase][index_of_kernel] += 1
    shapes = np.array([k.shape or (0, 0, 0, 0) for k in kernels], dtype=np.int64).reshape(-1, 4)
    sorts: dict[object, int] = {}
    of = [sorts.setdefault(tuple(frozenset(c.items()) for c in both), len(sorts)) for both in parts]
    counts = np.zeros((len(sorts), 2, len(kernels)))
    for sort, both in zip(of, parts, strict=True):
        for phase in (FORWARD, BACKWARD):
            for index_of_kernel, count in both[phase].items():
                counts[sort, phase, index_of_kernel] = count
    return _Kernels(
        np.array([_KINDS.index(k.kind) for k in kernels]),
        tuple(_computes_in(k) for k in kernels),
        np.array([k.flops if k.kind != "other" else 0.0 for k in kernels]),
        np.array([k.bytes for k in kernels]),
        shapes,
        _token_column(kernels),
        np.array([k.split for k in kernels], dtype=bool),
        np.array([_sequence(k) for k in kernels], dtype=bool),
        np.array([k.expert for k in kernels], dtype=bool),
        np.array([k.phase == "backward" for k in kernels], dtype=bool),
        np.array([k.recomputed for k in kernels], dtype=bool),
        np.array([k.name == CAST for k in kernels], dtype=bool),
        counts,
        np.array(of),
    )


def _computes_in(kernel: Kernel) -> str:
    """Convolutions of float32 are in TF32 on devices that have it, unless a job forbids it; products are not."""
    return "tfloat32" if "convolution" in kernel.name and kernel.dtype == "float32" else kernel.dtype


def _sequence(kernel: Kernel) -> bool:
    """Whether sequence parallelism divides it: what lies between the split parts of a layer."""
    return kernel.sequence or (kernel.unit > 0 and kernel.kind == "other" and not kernel.split and not kernel.expert)


def _token_column(kernels: Sequence[Kernel]) -> npt.NDArray[np.int64]:
    """Which of a product's dimensions counts tokens: m of the forward products says how many there are."""
    rows: dict[bool, set[int]] = {False: set(), True: set()}
    for kernel in kernels:
        if kernel.shape is not None and kernel.kind == "matmul" and kernel.phase == "forward":
            rows[kernel.expert].add(kernel.shape[1])

    def column(kernel: Kernel) -> int:
        if kernel.shape is None or kernel.kind != "matmul":
            return -1
        if kernel.phase == "forward":
            return 1
        _, m, n, k = kernel.shape
        mine = rows[kernel.expert]
        return 3 if k in mine and m not in mine else 1 if m in mine else 2 if n in mine else 3 if k in mine else 1

    return np.array([column(kernel) for kernel in kernels], dtype=np.int64)


class StepTimer:
    """Step times of one profile on one cluster, for any number of layouts.

    Args:
        profile: A traced step.
        cluster: Where it will run.
        stack: Which kernels it will use: a name in the calibration, `eager`, `compile` or `megatron`.
        products: The number format of products within units, if it is not the traced one: `float8`, `float4`.
        ring: Context parallelism is torch's ring attention over consecutive positions, and not Fairlead's, in which
            each rank has a part of both ends.
        calibration: How fast devices and stacks are; the shipped one by default.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        stack: str = "eager",
        products: str | None = None,
        ring: bool = False,
        calibration: Calibration | None = None,
    ) -> None:
        self.profile, self.cluster, self._stack, self._ring = profile, cluster, stack, ring
        self._kernels = one = _reduce(profile)
        self._narrow = np.zeros(len(one.kind), dtype=bool)
        self._dtypes = list(one.dtype)
        if products is not None:
            outside = one.counts[list(set(one.sorts[:2]))].sum((0, 1)) > 0
            self._narrow = (one.kind == 0) & ~outside
            self._dtypes = [
                products if narrow else dtype for narrow, dtype in zip(self._narrow, one.dtype, strict=True)
            ]
        self._peak = 1e12 * np.array([cluster.device.peak_of(dtype) for dtype in self._dtypes])
        self._element = np.array([_BYTES.get(dtype, 2) for dtype in self._dtypes], dtype=float)
        batch, m, n, k = one.shape.astype(float).T
        # A convolution reads less than the product that it is: its columns overlap.
        all_bytes = np.maximum(
            1.0, batch * (m * k + k * n + m * n) * np.array([_BYTES.get(name, 2) for name in one.dtype])
        )
        self._read = np.minimum(1.0, one.bytes / all_bytes)
        # A row of `counts` stands for one unit of that sort: weighed by how many there are.
        passes = np.tensordot(np.bincount(one.sorts, minlength=len(one.counts)).astype(float), one.counts, 1)
        main = Counter[str]()
        for kind, dtype, flops in zip(one.kind, self._dtypes, one.flops * passes.sum(0), strict=True):
            main[dtype] += flops * (kind == 0)
        self._main = main.most_common(1)[0][0] if main else "float32"
        self.model_flops = float(3 * passes[FORWARD] @ one.flops)
        self._optimizer_bytes = sum(k.bytes for k in profile.kernels if k.phase == "optimizer")
        units = profile.units
        self._plain = np.array([one.parameters for one in units], dtype=float)
        self._split = np.array([one.split_parameters for one in units], dtype=float)
        self._experts = np.array([one.expert_parameters for one in units], dtype=float)
        total = np.maximum(1.0, self._plain + self._experts)
        self._wide = np.array([one.parameter_bytes for one in units], dtype=float) / total
        self._trainable = np.array([one.trainable for one in units], dtype=float) / total
        self._blocks = self._split_blocks()
        self._sent_tokens = self._dispatched()
        self._calibrate(shipped() if calibration is None else calibration)

    def calibrated(self, calibration: Calibration) -> StepTimer:
        """The same under another calibration."""
        other = copy(self)
        other._calibrate(calibration)
        return other

    def _calibrate(self, calibration: Calibration) -> None:
        one, device = self._kernels, self.cluster.device
        self.calibration = calibration
        self.stack = calibration.stack(self._stack)
        self.collectives = Collectives(self.cluster, calibration.communication, calibration.hop_us)
        reached: dict[tuple[int, str, bool], float] = {}
        for key in set(zip(one.kind, self._dtypes, one.backward, strict=True)):
            kind, dtype, backward = key
            reached[key] = calibration.fraction(_KINDS[kind], dtype, device, self.stack, backward=bool(backward))
        fractions = [reached[key] for key in zip(one.kind, self._dtypes, one.backward, strict=True)]
        self._rate = self._peak * np.array(fractions)
        grouped = one.expert & (one.kind == 0) & (one.shape[:, 0] > 1)  # one product for all experts
        self._rate = np.where(grouped, self._rate * calibration.grouped, self._rate)
        self._bandwidth = device.bandwidth_gb_s * 1e9 * calibration.memory_fraction(device)

    def _split_blocks(self) -> Array:
        """For each part how often tensor parallelism gathers in its forward pass: runs of split products."""
        runs = np.zeros(len(self.profile.units) + 1)
        last: dict[int, bool] = {}
        for kernel in self.profile.kernels:
            if kernel.phase != "forward" or not kernel.unit or kernel.expert:
                continue
            if kernel.split and kernel.kind != "other":
                if not last.get(kernel.unit, False):
                    runs[kernel.unit + 1] += 1
                last[kernel.unit] = True
            elif _sequence(kernel) and not kernel.split and "add" in kernel.name:
                last[kernel.unit] = False
        return runs

    def _dispatched(self) -> Array:
        """For each part how many tokens its experts are sent in a micro-batch, each as often as it has experts."""
        sums: dict[int, Counter[tuple[int, int]]] = {}
        for kernel in self.profile.kernels:
            if kernel.expert and kernel.phase == "forward" and kernel.shape is not None and kernel.kind == "matmul":
                batch, m, n, k = kernel.shape
                sums.setdefault(kernel.unit + 1, Counter())[n, k] += batch * m
        sent = np.zeros(len(self.profile.units) + 1)
        for part, by_shape in sums.items():  # a gate has the shape of its neighbour: the fewest count each token once
            sent[part] = min(by_shape.values())
        return sent

    def parts(self, layout: Layout) -> tuple[Array, Array, Array]:
        """Seconds of one micro-batch: of each part (in front, behind, units) forward and backward.

        Then the kernels of each, and the seconds of its backward pass that recompute something.
        """
        one, mesh, fitted = self._kernels, layout.mesh, self.calibration
        tensor, context = mesh.tensor, mesh.context
        less = layout.micro_batch / self.profile.rows / context  # tokens of a rank
        split = np.where(one.split | one.expert, tensor, 1) * np.where(one.sequence & layout.sequence, tensor, 1)
        product = one.kind == 0
        shape = one.shape.astype(float)
        lines = np.arange(len(shape))
        along = np.where(one.along > 0, one.along, 1)
        shape[lines, along] *= less
        if tensor > 1:  # of the other two dimensions the larger is divided
            others = shape.copy()
            others[:, 0] = 0
            others[lines, along] = 0
            shape[lines, np.where(one.expert, along, others.argmax(1))] /= split
        if mesh.expert > 1:
            shape[:, 0] = np.where(one.expert, np.maximum(1, shape[:, 0] / mesh.expert), shape[:, 0])
            shape[lines, along] = np.where(one.expert, shape[lines, along] * mesh.expert, shape[lines, along])
        flops = one.flops * less / split
        batch, m, n, k = shape.T
        traffic = one.bytes * np.where(one.cast, 1.0, less) / split
        element = self._element
        own = batch * (m * k + k * n + m * n) * 2 * self._read
        cast = np.where(self._narrow, batch * (m * k + k * n) * (2 + element) * self.stack.cast, 0.0)
        traffic = np.where(product, own * element / 2, traffic * np.where(one.kind == 2, self.stack.traffic, 1.0))
        arithmetic = flops / self._rate
        part = filled(batch, m, n, k, units=self.cluster.device.units, depth=fitted.depth, wave=fitted.wave)
        arithmetic = np.where(product, arithmetic / part, arithmetic)
        if context > 1 and self._ring:  # of causal attention the last ranks have more
            uneven = 1 + self.stack.uneven_context * (2 * context / (context + 1) - 1)
            arithmetic = np.where(one.kind == 1, arithmetic * uneven, arithmetic)
        seconds = np.maximum(arithmetic, traffic / self._bandwidth) + cast / self._bandwidth
        seconds = seconds + self.calibration.kernel_us * 1e-6 * np.where(one.kind == 2, self.stack.traffic, 1.0)
        by_sort = one.counts @ seconds
        recomputation = one.counts[:, BACKWARD] @ (seconds * one.recomputed)
        return by_sort[one.sorts], one.counts.sum(2)[one.sorts], recomputation[one.sorts]

    def time(self, layout: Layout) -> StepTime:
        """The time of one optimizer step under a layout."""
        fitted, stack, mesh = self.calibration, self.stack, layout.mesh
        parts, launches, recomputation = self.parts(layout)
        tensor = self._tensor(layout)
        context = self._context(layout, parts)
        expert = self._expert(layout, parts)
        inside = {"tensor": tensor, "context": context, "expert": expert}
        full = parts + sum(inside.values())
        micro = layout.accumulation
        ranks, laps = mesh.pipeline, layout.stages_per_rank
        share = np.ones(len(parts))
        bubble = pipeline = 0.0
        if ranks > 1:
            share = self._stage(full.sum(1), ranks, laps)
            mean = full.sum() / ranks
            empty = bubble_fraction(ranks, micro, 1 if layout.schedule in ("gpipe", "1f1b") else laps)
            if layout.schedule.endswith("zero_bubble"):
                empty *= 0.5 if layout.schedule.startswith("interleaved") else 0.25
            bubble = mean * micro * empty / (1 - empty)
            pipeline = self._sends(layout) * micro
        compute = float((share @ parts).sum())
        sent = {name: float((share @ value).sum()) * micro for name, value in inside.items()}
        data, hidden = self._data(layout, full, share)
        sent["data"] = data
        sent["pipeline"] = pipeline
        optimizer = self._optimizer(layout, share) + self._accumulated(layout, share)
        device = compute * micro + sum(sent.values())
        host = self._host(launches, share) * micro
        # The host runs ahead of the device where it can, and neither does so always: between the larger and the sum.
        host = (device**4 + host**4) ** 0.25 - device + stack.step_ms * 1e-3
        contention = hidden * fitted.contention
        sent["data"] += contention
        seconds = compute * micro + sum(sent.values()) + bubble + optimizer + host
        nodes = max(1, layout.devices // self.cluster.node)
        waiting = seconds * fitted.jitter * sqrt(2 * log(nodes)) if nodes > 1 else 0.0
        seconds += waiting
        samples = layout.global_batch
        tokens = samples * self.profile.tokens / self.profile.rows
        flops = self.model_flops * samples / self.profile.rows
        tflops = flops / seconds / layout.devices / 1e12
        return StepTime(
            seconds,
            compute * micro,
            float(share @ recomputation) * micro,
            {name: value for name, value in sent.items() if value > 0},
            bubble,
            optimizer,
            host,
            waiting,
            tokens / seconds / layout.devices,
            samples / seconds,
            tflops,
            tflops / self.cluster.device.peak_of(self._main),
            seconds * layout.devices * self.cluster.device.power_w,
        )

    def _host(self, launches: Array, share: Array) -> float:
        """Seconds in which the host launches a micro-batch's kernels; mixtures wait for the sizes of what is sent."""
        mixtures = float(share @ (self._sent_tokens > 0))
        return float((share @ launches).sum()) * self.stack.launch_us * 1e-6 + mixtures * self.stack.dispatch_us * 1e-6

    def _width(self, layout: Layout) -> float:
        """Bytes that pass from unit to unit on one rank, before sequence parallelism divides them."""
        return self.profile.width_bytes * layout.micro_batch / self.profile.rows / layout.mesh.context

    def _tensor(self, layout: Layout) -> Array:
        """Two collectives forward and two backward for each run of split products: as long as two all-reduces."""
        zeros = np.zeros((len(self._blocks), 2))
        if layout.mesh.tensor == 1:
            return zeros
        group = Group.of(layout.mesh.tensor, 1, self.cluster.domain)
        one = self.collectives.seconds("all_reduce", self._width(layout), group)
        zeros[:, FORWARD] = self._blocks * one
        zeros[:, BACKWARD] = self._blocks * one * (1.5 if layout.sequence else 1.0)
        zeros[_BACK] = one
        if layout.checkpointing == "full":
            zeros[:, BACKWARD] += self._blocks * one
        return zeros * self.stack.exposed_tensor

    def _context(self, layout: Layout, parts: Array) -> Array:
        """Keys and values of all other ranks, ring or gather, hidden behind the attention of a part."""
        zeros = np.zeros_like(parts)
        size = layout.mesh.context
        if size == 1:
            return zeros
        one = self._kernels
        attention = one.kind == 1
        group = Group.of(size, layout.mesh.tensor, self.cluster.domain)
        # Of an attention's traffic q, k, v and the result are about four equal parts, less with shared keys.
        sizes = one.counts @ (one.bytes * attention) / np.maximum(1, one.counts @ attention)
        scale = layout.micro_batch / self.profile.rows / layout.mesh.tensor
        present = (one.counts @ attention) > 0
        for phase in (FORWARD, BACKWARD):
            each = np.array([self.collectives.seconds("all_gather", s * scale / 2, group) for s in sizes[:, phase]])
            zeros[:, phase] = (each * present[:, phase])[one.sorts] * (1 + phase)
        return zeros * self.stack.exposed_context

    def _expert(self, layout: Layout, parts: Array) -> Array:
        """Tokens to their experts and back, in both passes."""
        zeros = np.zeros_like(parts)
        size = layout.mesh.expert
        if size == 1 or not self._sent_tokens.any():
            return zeros
        # More ranks than `shard` has: those of `tensor` and `context` hold experts, too (Megatron's expert groups).
        stride = layout.mesh.tensor * layout.mesh.context if size <= layout.mesh.shard else 1
        group = Group.of(size, stride, self.cluster.domain)
        tokens = self.profile.tokens * layout.micro_batch / self.profile.rows / layout.mesh.context
        if layout.sequence:
            tokens /= layout.mesh.tensor
        sent = tokens * self.profile.width_bytes / self.profile.tokens
        reached = self.calibration.all_to_all
        for part in np.flatnonzero(self._sent_tokens):
            copies = max(1, round(self._sent_tokens[part] / self.profile.tokens))
            zeros[part] = 2 * self.collectives.dispatch(sent, copies, group, once=self.stack.once, reached=reached)
        return zeros * self.stack.exposed_expert

    def _stage(self, seconds: Array, ranks: int, laps: int) -> Array:
        """Which parts the slowest rank of a pipeline works on.

        Parts in order, in front first and behind last, are cut into ranks x laps runs, so that the longest is as short
        as it can be; rank r has every `ranks`-th of them.
        """
        order = np.concatenate(([_FRONT], np.arange(2, len(seconds)), [_BACK]))
        costs = seconds[order]
        ends = _cut(costs, ranks * laps)
        stage = np.searchsorted(ends, np.arange(len(costs)), side="right")
        rank = stage % ranks
        totals = np.bincount(rank, costs, minlength=ranks)
        slowest = int(totals.argmax())
        share = np.zeros(len(seconds))
        share[order] = rank == slowest
        return share

    def _sends(self, layout: Layout) -> float:
        """What a rank of a pipeline waits for its neighbours' activations and gradients, a micro-batch."""
        mesh = layout.mesh
        inner = mesh.tensor * mesh.context * mesh.shard * mesh.replicate
        size = self._width(layout) / (mesh.tensor if layout.sequence or mesh.tensor > 1 else 1)
        one = self.collectives.seconds("send", size, Group.of(2, inner, self.cluster.domain))
        return 2 * layout.stages_per_rank * one * self.stack.exposed_pipeline

    def _held(self, layout: Layout) -> tuple[Array, Array]:
        """Parameters of each unit on one tensor-parallel rank: those of all, and its experts'."""
        tensor = layout.mesh.tensor
        plain = self._plain - self._split + self._split / tensor
        return plain, self._experts / layout.mesh.expert

    def _data(self, layout: Layout, full: Array, share: Array) -> tuple[float, float]:
        """Seconds of data-parallel communication that are not hidden, and those that are."""
        mesh = layout.mesh
        copies = mesh.replicate * mesh.shard
        if copies == 1 and mesh.context == 1:
            return 0.0, 0.0
        stride = mesh.tensor
        domain = self.cluster.domain
        sharded = layout.sharding
        # Ranks of `context` hold the same parameters: they reduce, and shard, with the others.
        width = mesh.shard * mesh.context if sharded != "none" else copies * mesh.context
        group = Group.of(width, stride, domain)
        expert = Group.of(max(1, width // mesh.expert), stride * mesh.expert, domain)
        outer = Group.of(mesh.replicate, stride * width, domain) if sharded != "none" else Group(1, 1, 1)
        plain, experts = self._held(layout)
        held = share[1:].copy()
        held[0] = max(share[_FRONT], share[_BACK])
        plain, experts = plain * held, experts * held
        wide = self._wide * self._trainable
        narrow = np.minimum(self._wide, 2.0) if layout.cast else self._wide
        seconds = self.collectives.seconds

        def over(operation: Operation, of_plain: Array, of_experts: Array) -> Array:
            # Most units are alike: a call for each different one.
            pairs, back = np.unique(np.stack((of_plain, of_experts)), axis=1, return_inverse=True)
            values = [seconds(operation, a, group) + seconds(operation, b, expert) for a, b in pairs.T]
            return np.array(values)[back.ravel()]

        reduce: Operation = "all_reduce" if sharded == "none" else "reduce_scatter"
        gradients = over(reduce, plain * wide, experts * wide)
        if outer.ranks > 1:
            parts = (plain + experts) * wide / width
            gradients = gradients + np.array([seconds("all_reduce", size, outer) for size in parts])
        forward, backward = (full[1:, FORWARD] * held).copy(), (full[1:, BACKWARD] * held).copy()
        forward[0] += full[0, FORWARD] * share[_FRONT]
        backward[0] += full[0, BACKWARD] * share[_FRONT]
        micro = layout.accumulation
        each = self._reductions(layout)
        if sharded == "full" or (sharded == "gradients" and not layout.strategy.startswith("deepspeed")):
            gathers = over("all_gather", plain * narrow, experts * narrow)
            regathers = gathers if sharded == "full" else np.zeros_like(gathers)
            total = micro * (gathers.sum() + regathers.sum()) + each * gradients.sum()
            ahead = gathers[0] + np.maximum(0, gathers[1:] - forward[:-1]).sum()
            behind = np.maximum(0, regathers + gradients - backward).sum()
            light = np.maximum(0, regathers - backward).sum()
            if layout.one_unit:  # one unit: nothing runs before it is there, nor while it is reduced
                ahead, behind, light = gathers.sum(), regathers.sum() + gradients.sum() - gradients[0], regathers.sum()
            exposed = micro * ahead + each * behind + (micro - each) * light + gradients[0]
            # What is gathered is copied out of the buffer, what is reduced is cast and copied into one.
            gathered = float(((plain + experts) * narrow).sum()) * (2 if sharded == "full" else 1)
            reduced = float(((plain + experts) * (narrow + 2 * wide)).sum())
            copied = (micro * 2 * gathered + each * reduced) / self._bandwidth
            return float(exposed) + copied, float(max(0.0, total - exposed))
        gathers = over("all_gather", plain * narrow, experts * narrow) if sharded != "none" else np.zeros(1)
        room = backward.sum() * (1 - 1 / max(2, len(backward))) * self.stack.overlap_data
        first = forward.sum() * self.stack.overlap_data
        exposed = each * max(gradients.sum() - room, gradients.sum() / len(gradients)) + max(
            gathers.sum() - first, gathers.sum() / len(gathers)
        )
        total = each * gradients.sum() + gathers.sum()
        return float(exposed), float(max(0.0, total - exposed))

    def _reductions(self, layout: Layout) -> int:
        """How often a step reduces its gradients; DeepSpeed does it in each micro-batch, where it shards them."""
        each = self.stack.reduce_each or layout.strategy.startswith("deepspeed")
        return layout.accumulation if each and layout.sharding in ("full", "gradients") else 1

    def _accumulated(self, layout: Layout, share: Array) -> float:
        """Adding the gradients of further micro-batches to those of the first, where they are not sharded at once."""
        plain, experts = self._held(layout)
        held = share[1:].copy()
        held[0] = max(share[_FRONT], share[_BACK])
        size = float(((plain + experts) * held * self._trainable).sum()) * self.stack.gradient_bytes
        return (layout.accumulation - self._reductions(layout)) * size / self._bandwidth

    def _optimizer(self, layout: Layout, share: Array) -> float:
        """Reading and writing parameters, gradients and states, on the ranks that hold them."""
        mesh = layout.mesh
        plain, experts = self._held(layout)
        held = share[1:].copy()
        held[0] = max(share[_FRONT], share[_BACK])
        shards = mesh.shard * mesh.context if layout.sharding != "none" else 1
        own = plain / shards + experts / max(1, shards // mesh.expert)
        parameters = float((own * held * self._trainable).sum())
        of_all = max(1.0, float((self._trainable * (self._plain + self._experts)).sum()))
        each = self._optimizer_bytes / of_all if self._optimizer_bytes else 30.0
        rate = self._bandwidth if not layout.offload else self.calibration.host_gb_s * 1e9
        return parameters * each / rate


def _cut(costs: Array, stages: int) -> npt.NDArray[np.int64]:
    """Ends of the runs into which costs in order are cut, so that the largest sum is as small as it can be."""
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    low, high = max(sums[-1] / stages, costs.max()), sums[-1]

    def ends(limit: float) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(costs) and len(found) < stages:
            start = int(np.searchsorted(sums, sums[start] + limit * (1 + 1e-12), side="right")) - 1
            found.append(start)
        return found

    for _ in range(20):
        middle = (low + high) / 2
        if ends(middle)[-1] >= len(costs):
            high = middle
        else:
            low = middle
    return np.array(ends(high))


def step_time(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    stack: str = "eager",
    products: str | None = None,
) -> StepTime:
    """The time of one optimizer step; for many layouts of one profile make one `StepTimer`."""
    return StepTimer(profile, cluster, stack=stack, products=products, calibration=calibration).time(layout)
