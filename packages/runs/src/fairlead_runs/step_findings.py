"""Why a training is slow, in findings: the loader, the communication, one rank, what is done between two steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from fairlead.findings import Finding
from fairlead_runs.step_times import RankTimes

LEAST_STEPS: Final = 20
"""Steps that a rank must have measured: fewer say nothing."""
LEAST_S: Final = 1.0
"""Seconds that its steps must have taken, likewise."""
_DATA: Final = 0.2
_COMMUNICATION: Final = 0.25
_LOGGING: Final = 0.3
_SLOWER: Final = 1.15
"""How much longer a rank computes than the median, to be named."""


def step_findings(ranks: Sequence[RankTimes]) -> Iterator[Finding]:
    """What slows the steps of one start, the largest share first; nothing, where nothing is large.

    Args:
        ranks: Those of one start that were read; also some of them, or one.
    """
    ranks = [one for one in ranks if one.steps >= LEAST_STEPS and one.mean_s and one.mean_s * one.steps >= LEAST_S]
    if not ranks:
        return
    found = [finding for finding in (_data(ranks), _communication(ranks), _logging(ranks)) if finding is not None]
    for _, finding in sorted(found, key=lambda pair: -pair[0]):
        yield finding
    yield from _slow_ranks(ranks)


def _share(ranks: Sequence[RankTimes], part: str) -> tuple[float, float]:
    """The median over the ranks of a part's share of a step, and a step's seconds."""
    return (
        statistics.median(one.shares.get(part, 0.0) for one in ranks),
        statistics.median(one.mean_s or 0.0 for one in ranks),
    )


def _data(ranks: Sequence[RankTimes]) -> tuple[float, Finding] | None:
    share, step = _share(ranks, "data")
    if share < _DATA:
        return None
    facts = ranks[0].facts
    workers = int(facts["workers"]) if "workers" in facts else None
    known = [] if workers is None else [f"{workers} worker{'s' if workers != 1 else ''} a rank"]
    if "pinned" in facts:
        known.append(f"pinned memory {'on' if facts['pinned'] else 'off'}")
    advice = {
        None: "have the loader prepare batches ahead",
        0: "num_workers=4: the process that trains loads its batches itself",
    }.get(workers, f"num_workers={2 * (workers or 0)}, as far as the rank's CPUs go; persistent_workers=True")
    if facts.get("pinned") == 0.0 and facts.get("device_steps"):
        advice += "; pin_memory=True"
    return share, Finding(
        "warning",
        "data-wait",
        f"the loader takes {share:.0%} of a step: {milliseconds(share * step)} of {milliseconds(step)}",
        why=(", ".join(known) or "nothing is known of the loader's workers")
        + f"; without the wait a step would take {milliseconds((1 - share) * step)}",
        fix=f"{advice}; or do less for each sample: decode and resize once, before the training",
    )


def _communication(ranks: Sequence[RankTimes]) -> tuple[float, Finding] | None:
    share, step = _share(ranks, "communication")
    if share < _COMMUNICATION:
        return None
    size = ranks[0].facts.get("comm_bytes", 0.0)
    nodes = len({one.node for one in ranks})
    of = f" of {_bytes(size)}" if size else ""
    return share, Finding(
        "warning",
        "communication-wait",
        f"{share:.0%} of a step waits for the gradients{of} to be averaged: "
        f"{milliseconds(share * step)} of {milliseconds(step)}",
        why=f"{len(ranks)} ranks on {nodes} node{'s' if nodes != 1 else ''}; what overlaps with the backward pass is "
        "not counted",
        fix="by these figures: "
        + ", ".join(f"{what} would give {speedup:.2f} times the samples a second" for what, speedup in _gains(share)),
    )


def _gains(share: float) -> Iterator[tuple[str, float]]:
    """What each way to send less would give, where the rest of a step stays as it is."""
    yield "twice the batch of a rank, or accumulate_grad_batches: 2,", 1 / (1 - share / 2)
    yield "4 times either", 1 / (1 - share * 3 / 4)
    yield "gradients sent in 16 bits (ddp_comm_hook: bf16_compress)", 1 / (1 - share / 2)


def _logging(ranks: Sequence[RankTimes]) -> tuple[float, Finding] | None:
    share, step = _share(ranks, "logging")
    if share < _LOGGING:
        return None
    return share, Finding(
        "warning",
        "logging-slow",
        f"callbacks, loggers and other code between two steps take {share:.0%} of a step: "
        f"{milliseconds(share * step)} of {milliseconds(step)}",
        why="they run in each step, and the device waits for them",
        fix="log less often (log_every_n_steps), and call .item() only where a value is logged",
    )


def _slow_ranks(ranks: Sequence[RankTimes]) -> Iterator[Finding]:
    if len(ranks) < 2:
        return
    own = {one.rank: one.own_s or 0.0 for one in ranks}
    usual = statistics.median(own.values())
    slow = sorted((one for one in ranks if own[one.rank] > _SLOWER * usual), key=lambda one: -own[one.rank])
    if not slow or len(slow) > len(ranks) // 2:
        return
    shown = ", ".join(f"rank {one.rank} ({one.host}): {milliseconds(own[one.rank])}" for one in slow[:4]) + (
        f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    )
    first, nodes = slow[0], len({one.node for one in ranks})
    longest = max(first.shares.items(), key=lambda pair: pair[1] if pair[0] != "communication" else 0.0)[0]
    yield Finding(
        "warning",
        "slow-rank",
        f"{'the other rank waits' if len(ranks) == 2 else 'the other ranks wait'} for "
        f"{'a slow one' if len(slow) == 1 else f'{len(slow)} slow ones'}: {shown} a step",
        why=f"the median rank works {milliseconds(usual)} a step; most of rank {first.rank}'s time is {longest}",
        fix="test its node: `fairlead doctor`, in its job; or exclude the node: `fairlead doctor --nodes`"
        if nodes > 1
        else "look for what it does more than the others, and for what else runs on its CPUs or its device",
    )


def milliseconds(seconds: float) -> str:
    """A short time: `4.66 ms`, `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _bytes(size: float) -> str:
    for large, unit in ((1e9, "GB"), (1e6, "MB")):
        if size >= large:
            return f"{size / large:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
