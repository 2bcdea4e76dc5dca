"""Why a training is slow, in findings: the loader, the communication, one rank, what is done between two steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from fairlead.findings import Finding
from fairlead_runs.describe import counted, duration
from fairlead_runs.step_times import RankTimes

LEAST_STEPS: Final = 20
"""Steps that a rank must have measured: fewer say nothing."""
LEAST_S: Final = 1.0
"""Seconds that its steps must have taken, likewise."""
_LARGE: Final = {"data": 0.2, "communication": 0.25, "logging": 0.3}
"""The share of a step from which on a part is named."""
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
    step = statistics.median(one.mean_s or 0.0 for one in ranks)
    shares = {part: statistics.median(one.shares.get(part, 0.0) for one in ranks) for part in _LARGE}
    make = {"data": _data, "communication": _communication, "logging": _logging}
    for part in sorted((part for part in _LARGE if shares[part] >= _LARGE[part]), key=lambda part: -shares[part]):
        yield make[part](ranks, shares[part], f"{duration(shares[part] * step)} of {duration(step)}", step)
    yield from _slow_ranks(ranks)


def _data(ranks: Sequence[RankTimes], share: float, taken: str, step: float) -> Finding:
    facts = ranks[0].facts
    known, advice = [], "have the loader prepare batches ahead"
    if "workers" in facts:
        workers = int(facts["workers"])
        known.append(f"{counted(workers, 'worker')} a rank")
        advice = f"num_workers={2 * workers or 4}, as far as the rank's CPUs go; persistent_workers=True"
    if "pinned" in facts:
        known.append(f"pinned memory {'on' if facts['pinned'] else 'off'}")
    if facts.get("pinned") == 0.0 and facts.get("device_steps"):
        advice += "; pin_memory=True"
    return Finding(
        "warning",
        "data-wait",
        f"the loader takes {share:.0%} of a step: {taken}",
        why=", ".join([*known, f"without the wait a step would take {duration((1 - share) * step)}"]),
        fix=f"{advice}; or do less for each sample: decode and resize once, before the training",
    )


def _communication(ranks: Sequence[RankTimes], share: float, taken: str, _: float) -> Finding:
    size = ranks[0].facts.get("comm_bytes", 0.0)
    of = f" of {size / 1e9:.3g} GB" if size else ""
    half, quarter = 1 / (1 - share / 2), 1 / (1 - share * 3 / 4)
    where = f"{counted(len(ranks), 'rank')} on {counted(len({one.node for one in ranks}), 'node')}"
    return Finding(
        "warning",
        "communication-wait",
        f"{share:.0%} of a step waits for the gradients{of} to be averaged: {taken}",
        why=f"{where}; what overlaps with the backward pass is not counted",
        fix="twice the batch of a rank, accumulate_grad_batches: 2, or gradients in 16 bits (ddp_comm_hook: "
        f"bf16_compress) would each give {half:.2f} times the samples a second; 4 times the batch {quarter:.2f} times",
    )


def _logging(_: Sequence[RankTimes], share: float, taken: str, __: float) -> Finding:
    return Finding(
        "warning",
        "logging-slow",
        f"callbacks, loggers and other code between two steps take {share:.0%} of a step: {taken}",
        why="they run in each step, and the device waits for them",
        fix="log less often (log_every_n_steps), and call .item() only where a value is logged",
    )


def _slow_ranks(ranks: Sequence[RankTimes]) -> Iterator[Finding]:
    own = {one.rank: one.own_s or 0.0 for one in ranks}
    usual = statistics.median(own.values())
    slow = sorted((one for one in ranks if own[one.rank] > _SLOWER * usual), key=lambda one: -own[one.rank])
    if not slow or len(slow) > len(ranks) // 2:
        return
    shown = [f"rank {one.rank} ({one.host}): {duration(own[one.rank])}" for one in slow]
    more = [f"{len(slow) - 4} more"] if len(slow) > 4 else []
    first = slow[0]
    longest = max(first.shares.items(), key=lambda pair: pair[1] if pair[0] != "communication" else 0.0)[0]
    yield Finding(
        "warning",
        "slow-rank",
        f"the others wait for {counted(len(slow), 'slow rank')}: {', '.join([*shown[:4], *more])} a step",
        why=f"the median rank works {duration(usual)} a step; most of rank {first.rank}'s time is {longest}",
        fix="test its node: `fairlead doctor`, in its job; or exclude the node: `fairlead doctor --nodes`"
        if len({one.node for one in ranks}) > 1
        else "look for what it does more than the others, and for what else runs on its CPUs or its device",
    )
