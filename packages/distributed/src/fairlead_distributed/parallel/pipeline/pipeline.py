"""A pipeline: runs the stages of all ranks on micro-batches, in a schedule of torch's."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fairlead.engines import too_old
from fairlead.errors import ConfigError
from fairlead_distributed.parallel.pipeline.between_stages import Tied, add_up
from fairlead_distributed.parallel.pipeline.micro_batches import cut, digest, joined, rows_of, run_forward, signature
from fairlead_distributed.parallel.pipeline.stage import RunningStage
from fairlead_runs.pipeline_schedule import SCHEDULES, Schedule, choose_micro_batches, stage_rank

_KEPT = 4  # schedules laid out for different shapes of batches
Call = tuple[tuple[Any, ...], dict[str, Any]]

_TORCHS: Final[Mapping[Schedule, type]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


def schedule_class(schedule: Schedule, micro_batches: int, stages: int) -> Any:
    """Torch's class; with fewer micro-batches than stages torch has no 1F1B, which then is the same as GPipe."""
    return ScheduleGPipe if schedule == "1f1b" and micro_batches < stages else _TORCHS[schedule]


class Pipeline:
    """Forward and backward passes of a model whose layers lie on several ranks, with the gradients of one process.

    The loss of a batch is the mean of its micro-batches' losses, each weighed by `weight`: by its number of samples, or
    for a loss that is a mean over tokens by the tokens that count. That is the loss of the full batch, so the
    gradients are those of one process, whatever the schedule. At the first step it is checked.

    Shapes and number formats of activations are found in a dry run of the first micro-batch, by stages, and once more
    where a batch has another shape.

    Args:
        stages: This rank's stages, in their order; `PipelineStage`, or any other module.
        loss: `loss(output, target)`, of a batch or a part of it: a mean, shape ().
        schedule: See `fairlead_runs.pipeline_schedule.SCHEDULES`.
        micro_batches: Into how many parts a batch is cut at most; None: up to four times the ranks.
        weight: `weight(target)`: how many things the loss of this target is a mean over; None: its rows.
        group: The ranks of this pipeline, in the order of their stages; None: all ranks.
        device: Where this rank computes; None: where the parameters of its stages are.
        replicas: The ranks with the same stages and other data, whose gradients something else averages (FSDP, DDP);
            None: there are none. Their weights count together, so that their mean is that of one process, too.
        tied: Weights that other ranks hold as well.
        check_loss: Compare the weighed loss of the micro-batches with that of the full batch at the first step.

    Raises:
        ConfigError: The stages do not fit the schedule; or, at a step, the loss or the batch do not fit.

    Example:
        >>> stages = [nn.Linear(4, 8), nn.Linear(8, 1)]  # one process may hold them all
        >>> pipeline = Pipeline(stages, loss=nn.functional.mse_loss, micro_batches=2)
        >>> pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 1)).shape
        torch.Size([])
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        loss: Callable[[Any, Any], Tensor],
        schedule: Schedule = "1f1b",
        micro_batches: int | None = None,
        weight: Callable[[Any], Any] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        replicas: dist.ProcessGroup | None = None,
        tied: Sequence[Tied] = (),
        check_loss: bool = True,
    ) -> None:
        if (old := too_old("pipeline")) is not None:
            raise old
        self.group, self.replicas = group, replicas
        self.ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.stages, self.schedule, self.requested = list(stages), schedule, micro_batches
        self.count = self.ranks * len(self.stages)
        _check_stages(schedule, len(self.stages), self.ranks)
        self.owners = [stage_rank(one, self.count, self.ranks, schedule) for one in range(self.count)]
        self.indices = [one for one, owner in enumerate(self.owners) if owner == self.rank]
        self.device = torch.device(device) if device is not None else _device_of(self.stages)
        self.tied = list(tied)
        self.parameters = list(dict.fromkeys(p for stage in self.stages for p in stage.parameters()))
        self.check_next_batch = True
        """Whether the ranks compare the next batch: one that loads others would train on inputs with wrong targets."""
        self.most_alive: list[int] = []
        """For each of this rank's stages, the most micro-batches whose activations the last step stored at once."""
        self.parts = 1
        """Into how many micro-batches the last batch was cut."""
        self._loss, self._weight, self._check_loss = loss, weight, check_loss
        self._laid_out: OrderedDict[Any, tuple[Any, list[RunningStage]]] = OrderedDict()
        self._targets: list[Any] = []
        self._scales: list[float] = []
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] | None = None
        self._sending: dist.Work | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so the loss."""
        return self.owners[-1] == self.rank

    def step(self, *inputs: Any, target: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch: adds to the `.grad` of this rank's parameters, as `loss.backward()` does.

        All ranks of the pipeline are given the same batch; the first stage takes the inputs, the last one the target.

        Returns:
            The loss of the full batch, shape (), without a graph, the same on all ranks.
        """
        loss, gradients = self.gradients(*inputs, target=target, **kwargs)
        add_gradients(self.parameters, gradients)
        return loss

    def gradients(self, *inputs: Any, target: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
        """The loss as in `step`, and the gradients of this batch alone, by parameter; `.grad` stays as it was."""
        call: Call = (inputs, kwargs)
        if self.check_next_batch:
            self.check_batch((call, target))
        parts = self.parts = choose_micro_batches(self.schedule, rows_of(call), self.ranks, self.requested)
        calls, self._targets = cut(call, parts), cut(target, parts)
        weights = [self._weigh(one, mine) for one, mine in zip(self._targets, calls, strict=True)]
        total = sum(weights)
        self._scales = [one * self._share(total) for one in weights]
        self._losses, self._outputs = {}, {} if self._check_loss and parts > 1 else None
        before = [one.grad for one in self.parameters]
        for one in self.parameters:
            one.grad = None
        try:
            self._run(calls)
            add_up(self.tied)
            found = [one.grad for one in self.parameters]
        finally:
            for one, grad in zip(self.parameters, before, strict=True):
                one.grad = grad
        return self._full_loss(weights, target), found

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch, on all ranks of the pipeline; without gradients.

        A collective: all ranks call it, with the same inputs.
        """
        call: Call = (inputs, kwargs)
        if self.check_next_batch:
            self.check_batch(call)
        rows = [len(t) for t in _tensors(call) if t.ndim]
        parts = choose_micro_batches(self.schedule, rows[0], self.ranks, self.requested) if len(set(rows)) == 1 else 1
        return run_forward(self.stages, self.indices, self.owners, cut(call, parts), self.device, self.group)

    def check_batch(self, batch: Any) -> None:
        """Whether all ranks of the pipeline have the same batch; a collective.

        Raises:
            ConfigError: On all of them, where they have not.
        """
        self.check_next_batch = False
        if self.ranks == 1:
            return
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, digest(batch), group=self.group)
        if len(set(found)) > 1:
            other = [rank for rank, one in enumerate(found) if one != found[0]]
            raise ConfigError(
                "the stages of a pipeline were given different batches",
                where="Pipeline",
                why=f"that of pipeline rank {other[0]} is not that of rank 0: its targets would belong to other inputs",
                fix="let all ranks of a pipeline load the same samples in the same order, and draw random "
                "augmentations from the sample's own seed (fairlead_distributed.sample_rng)",
            )

    def _weigh(self, target: Any, call: Call) -> float:
        if self._weight is None:
            return float(rows_of(call))
        weight = float(self._weight(target))
        if not weight >= 0 or math.isinf(weight):
            raise ConfigError(
                f"a micro-batch weighs {weight}", where="pipeline_weight", fix="return how many tokens count"
            )
        return weight

    def _share(self, total: float) -> float:
        """What the loss of a micro-batch is multiplied with for each thing that it is a mean over."""
        if self.replicas is None:
            return 1.0 / total if total else 0.0
        everyone = torch.tensor(
            total, dtype=torch.float64 if self.device.type != "mps" else torch.float32, device=self.device
        )
        dist.all_reduce(everyone, group=self.replicas)
        # Gradients are averaged over the replicas afterwards; what belongs here is their sum.
        return dist.get_world_size(self.replicas) / float(everyone) if float(everyone) else 0.0

    def _micro_loss(self, output: Any, index: Tensor | int) -> Tensor:
        at = int(index)
        loss = self._loss(output, self._targets[at])
        if not isinstance(loss, Tensor) or loss.ndim:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss of a micro-batch is {found}, not one number", where="pipeline_loss")
        self._losses[at] = loss.detach()
        if self._outputs is not None:
            self._outputs[at] = _detached(output)
        if self._scales[at] == 0:  # a mean over nothing is NaN, also times 0; what it hands back is nothing
            return torch.stack([one.sum() * 0.0 for one in _tensors(output) if one.requires_grad]).sum()
        return loss * self._scales[at]

    def _run(self, calls: list[Call]) -> None:
        if self.ranks == 1:
            for at, (inputs, kwargs) in enumerate(calls):
                out: Any = self.stages[0](*inputs, **kwargs)
                for stage in self.stages[1:]:
                    out = stage(*out) if isinstance(out, tuple) else stage(out)
                self._micro_loss(out, at).backward()  # type: ignore[no-untyped-call]
            self.most_alive = [1] * len(self.stages)
            return
        schedule, running = self._lay_out(calls)
        for one in running:
            one.most_alive = 0
            one.inputs = calls
        numbers = torch.arange(len(calls))
        target = {"target": numbers} if self.is_last else {}
        schedule.step(*([numbers] if 0 in self.indices else []), **target, return_outputs=False)
        for one in running:
            one.inputs = []
        self.most_alive = [one.most_alive for one in running]

    def _lay_out(self, calls: list[Call]) -> tuple[Any, list[RunningStage]]:
        """Torch's schedule for batches of this shape: it keeps what it has learned of the shapes between stages."""
        mode = (torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type))
        key = (len(calls), signature(calls[0]), mode, tuple(one.requires_grad for one in self.parameters))
        if key in self._laid_out:
            self._laid_out.move_to_end(key)
            return self._laid_out[key]
        running = [
            RunningStage(module, index, self.count, self.device, self.group)
            for module, index in zip(self.stages, self.indices, strict=True)
        ]
        kind = schedule_class(self.schedule, len(calls), self.count)
        single = SCHEDULES[self.schedule].stages_per_rank == (1, 1)
        made = kind(running[0] if single else running, len(calls), loss_fn=self._micro_loss, scale_grads=False)
        self._laid_out[key] = made, running
        while len(self._laid_out) > _KEPT:
            self._laid_out.popitem(last=False)
        return made, running

    def _full_loss(self, weights: list[float], target: Any) -> Tensor:
        """The loss on all ranks; where it was not what the full batch has, an error on all of them."""
        pair = torch.full((2,), math.nan, dtype=torch.float32, device=self.device)
        if self.is_last:
            total = sum(weights)
            parts = [self._losses[i] * (one / total if total else 0.0) for i, one in enumerate(weights) if one]
            pair[0] = torch.stack(parts).sum() if parts else 0.0
            if self._outputs is not None:
                with torch.no_grad():
                    pair[1] = self._loss(joined([self._outputs[i] for i in range(len(weights))]), target)
        checked, self._outputs, self._losses, self._targets = self._outputs is not None, None, {}, []
        if self.ranks > 1:
            if self._sending is not None:
                self._sending.wait()
            self._sending = dist.broadcast(pair, group_src=self.owners[-1], group=self.group, async_op=True)
            # The last stage continues: the first one is still in its backward passes when the loss is known.
            if checked or not self.is_last:
                self._sending.wait()
        if checked:
            self._check_loss = False
            _compare(*pair.tolist())
        return pair[0].clone()  # `pair` may still be on its way


def add_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Adds to each parameter's `.grad`."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _compare(mine: float, of_batch: float) -> None:
    if not math.isfinite(of_batch) or abs(mine - of_batch) <= 1e-3 * max(abs(mine), abs(of_batch)):
        return  # a loss that is NaN in one process, too, is noticed elsewhere
    raise ConfigError(
        "the losses of the micro-batches do not make the loss of the full batch",
        where="pipeline_loss",
        why=f"their weighed mean is {mine:.6g}, that of the full batch {of_batch:.6g}, and so with the gradients",
        fix="for a mean over tokens that are not all counted, say how many are: "
        "`def pipeline_weight(self, *targets): return (targets[0] != PADDING).sum()`; for a loss that is no mean "
        "over its batch (of pairs, or of random parts) set check_loss: false",
    )


def _check_stages(schedule: Schedule, stages: int, ranks: int) -> None:
    fewest, most = SCHEDULES[schedule].stages_per_rank
    if ranks > 1 and (stages < fewest or (most is not None and stages > most)):
        wanted = str(fewest) if fewest == most else f"{fewest} or more"
        raise ConfigError(
            f"{schedule} takes {wanted} stages a rank, not {stages}",
            where="Pipeline(stages=)",
            fix="1f1b and gpipe take one stage a rank, interleaved_1f1b and interleaved_zero_bubble two or more",
        )


def _device_of(stages: Sequence[nn.Module]) -> torch.device:
    return next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_flatten(value)[0] if isinstance(one, Tensor)]


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, value)
