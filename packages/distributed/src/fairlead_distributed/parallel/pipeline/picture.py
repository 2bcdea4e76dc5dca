"""A schedule drawn as text, from the order in which torch really runs it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from fairlead_runs.pipeline_schedule import SCHEDULES, Schedule, usable

TORCH_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}
"""Torch's classes by our names."""

_TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}
"""A backward pass takes about twice as long as a forward pass: the gradients of inputs (I), then of weights (W)."""


def schedule_class(schedule: Schedule, micro_batches: int, stages: int) -> type:
    """Torch's class; with fewer micro-batches than stages torch has no 1F1B, which then is the same as GPipe."""
    return ScheduleGPipe if schedule == "1f1b" and micro_batches < stages else TORCH_SCHEDULES[schedule]


def picture(schedule: Schedule, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> str:
    """What each rank does when, one column for the time of a forward pass.

    `F3` is the forward pass of micro-batch 3, `B3==` its backward pass, which takes twice as long; `I3` and `W3` are
    the two halves of one, for the inputs and for the weights. Where a rank has several stages, `F1.3` is of its
    stage 1. A dot is waiting: the bubble.

    Example:
        >>> print(picture("1f1b", ranks=2, micro_batches=3))
        rank 0 | F0 F1 .  .  B0=== F2 B1=== .  B2===
        rank 1 | .  F0 B0=== F1 B1=== F2 B2=== .  .
    """
    rows = _timed(schedule, ranks, micro_batches, stages_per_rank)
    several = (stages_per_rank or SCHEDULES[schedule].stages_per_rank[0]) > 1
    length = max(one.end for row in rows for one in row)
    width = max(len(one.text(several)) for row in rows for one in row) + 1
    lines = []
    for rank, row in enumerate(rows):
        cells, now = "", 0
        for one in row:
            cells += ".".ljust(width) * (one.begin - now)
            took = one.end - one.begin
            cells += one.text(several).ljust(width * took - 1, "=" if took > 1 else " ") + " "
            now = one.end
        cells += ".".ljust(width) * (length - now)
        lines.append(f"rank {rank} | {cells}".rstrip(" "))
    return "\n".join(lines)


def measured_bubble(schedule: Schedule, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> float:
    """The part of a step in which ranks wait, counted in the picture: all stages take equally long.

    Example:
        >>> measured_bubble("gpipe", ranks=4, micro_batches=12)
        0.2
    """
    rows = _timed(schedule, ranks, micro_batches, stages_per_rank)
    length = max(one.end for row in rows for one in row)
    busy = sum(one.end - one.begin for row in rows for one in row)
    return (length * ranks - busy) / (length * ranks)


class _Action(NamedTuple):
    begin: int
    end: int
    kind: str
    stage: int
    micro_batch: int

    def text(self, several: bool) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}" if several else f"{self.kind}{self.micro_batch}"


def _timed(schedule: Schedule, ranks: int, micro_batches: int, per_rank: int | None) -> list[list[_Action]]:
    """What each rank does, each action as soon as what it needs is there."""
    per_rank = per_rank or SCHEDULES[schedule].stages_per_rank[0]
    if not usable(schedule, micro_batches, ranks):
        raise ValueError(f"{schedule} cannot be laid out for {micro_batches} micro-batches on {ranks} ranks")
    stages = ranks * per_rank
    if per_rank == 1:
        waiting = [_one_stage(schedule, rank, ranks, micro_batches) for rank in range(ranks)]
    else:
        made = get_schedule_ops(schedule_class(schedule, micro_batches, stages), ranks, micro_batches, per_rank)
        waiting = [[_plain(action) for action in row if _computes(action)] for row in made]
    done: dict[tuple[str, int, int], int] = {}
    rows: list[list[_Action]] = [[] for _ in range(ranks)]
    free = [0] * ranks
    while any(waiting):
        before = len(done)
        for rank, actions in enumerate(waiting):
            while actions:
                kind, stage, micro_batch = actions[0]
                needs = _needs(kind, stage, micro_batch, stages)
                if any(need not in done for need in needs):
                    break
                begin = max([free[rank], *(done[need] for need in needs)])
                end = begin + _TIMES[kind]
                rows[rank].append(_Action(begin, end, *actions.pop(0)))
                free[rank] = end
                # Others wait for gradients of inputs, which a whole backward pass has at its end as well.
                done["I" if kind == "B" else kind, stage, micro_batch] = end
        if len(done) == before:
            raise ValueError(f"{schedule} of {ranks} ranks and {micro_batches} micro-batches never ends")
    return rows


def _one_stage(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """What torch's two schedules of one stage do; the order that its 1F1B tells (`pipeline_order`) is not that."""
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, ranks - rank)
    order = [("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("B", rank, m))
        if ahead + m < micro_batches:
            order.append(("F", rank, ahead + m))
    return order


def _computes(action: Any) -> bool:
    return action is not None and action.microbatch_index is not None  # the reduction of gradients has none


def _plain(action: object) -> tuple[str, int, int]:
    text = str(action)  # 0F3, 1B2, 2I0, 3W1
    at = next(i for i, letter in enumerate(text) if letter.isalpha())
    return text[at], int(text[:at]), int(text[at + 1 :])


def _needs(kind: str, stage: int, micro_batch: int, stages: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    return [("F", stage, micro_batch) if stage == stages - 1 else ("I", stage + 1, micro_batch)]
