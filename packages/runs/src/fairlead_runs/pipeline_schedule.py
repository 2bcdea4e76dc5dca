"""What is known of a pipeline schedule without running it: its bubble, its micro-batches, where its stages lie.

A *stage* is a run of layers that follow each other, S in all; P ranks hold v = S / P of them each; a batch is cut into
M *micro-batches*, which the stages work on at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]
"""The order in which a rank works on its stages and micro-batches."""


@dataclass(frozen=True)
class ScheduleFacts:
    """What a schedule asks for, and what it is good for."""

    stages_per_rank: tuple[int, int | None]
    """The fewest and the most stages that a rank may hold; None: any number."""
    says: str
    """One sentence for a user who chooses."""


SCHEDULES: Final[dict[Schedule, ScheduleFacts]] = {
    "gpipe": ScheduleFacts((1, 1), "all forward passes, then all backward passes; keeps the activations of M"),
    "1f1b": ScheduleFacts((1, 1), "a backward pass as soon as there is one; keeps the activations of at most S"),
    "interleaved_1f1b": ScheduleFacts((2, None), "several short stages a rank: a smaller bubble, more messages"),
    "interleaved_zero_bubble": ScheduleFacts(
        (2, None), "interleaved, with the gradients of weights computed where a rank would wait"
    ),
    "zbv_zero_bubble": ScheduleFacts(
        (2, 2), "two stages a rank in the shape of a V, so that rank 0 holds the first and the last; nearly no bubble"
    ),
}


def bubble_fraction(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """The part of a step in which a rank waits: (P - 1) / (v M + P - 1), if all stages take equally long.

    With one stage a rank it is (S - 1) / (M + S - 1), of GPipe (arXiv:1811.06965) and of 1F1B; v stages a rank
    divide it (arXiv:2104.04473). Schedules with zero bubble (arXiv:2401.10241) stay below.

    Example:
        >>> bubble_fraction(4, 12)
        0.2
        >>> bubble_fraction(4, 12, stages_per_rank=2)
        0.1111111111111111
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def usable(schedule: Schedule, micro_batches: int, ranks: int) -> bool:
    """Whether a schedule can be laid out for that number: the interleaved ones go in rounds of equal size.

    Example:
        >>> usable("interleaved_1f1b", 6, ranks=4), usable("interleaved_1f1b", 9, ranks=4)
        (True, False)
    """
    if micro_batches < 1:
        return False
    return not schedule.startswith("interleaved") or micro_batches % max(1, micro_batches // ranks) == 0


def choose_micro_batches(schedule: Schedule, rows: int, ranks: int, requested: int | None = None) -> int:
    """Into how many equal parts a batch of so many rows is cut.

    The largest number that divides the rows, is not above the request, and that the schedule can be laid out for. So
    a short last batch of an epoch is cut into fewer, and gives the same gradients. Without `requested` it is up to 4 P,
    with which the bubble is below a fifth.

    Example:
        >>> choose_micro_batches("1f1b", 32, ranks=2), choose_micro_batches("1f1b", 6, ranks=2, requested=4)
        (8, 3)
    """
    most = min(rows, 4 * ranks if requested is None else requested)
    return next(m for m in range(most, 0, -1) if rows % m == 0 and usable(schedule, m, ranks))


def stage_rank(stage: int, stages: int, ranks: int, schedule: Schedule) -> int:
    """The rank of the pipeline that holds a stage: in turn, or for `zbv_zero_bubble` there and back.

    Example:
        >>> [stage_rank(s, 4, 2, "interleaved_1f1b") for s in range(4)]
        [0, 1, 0, 1]
        >>> [stage_rank(s, 4, 2, "zbv_zero_bubble") for s in range(4)]
        [0, 1, 1, 0]
    """
    lap, position = divmod(stage, ranks)
    return ranks - 1 - position if schedule == "zbv_zero_bubble" and lap % 2 else position
