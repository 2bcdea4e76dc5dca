"""What a communication benchmark's times mean: bandwidths as nccl-tests has them, and what is slow."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fairlead.errors import ConfigError

BUS_FACTORS: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}
"""By which the algorithm's bandwidth, size / time, is multiplied for that of the bus, by the number of ranks.

nccl-tests, doc/PERFORMANCE.md: the result "reflect[s] the speed of the inter-GPU communication [and] can be compared
with the hardware peak bandwidth, independently of the number of ranks used". The size is that of the full buffer: of
what an all-gather gives, and of what a reduce-scatter takes.
"""
LEAST_GAP: Final = 0.2
"""What is less than this share below the median is not called slow."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `64MiB`, `8M`: K, M and G are powers of 1024, as nccl-tests has them.

    Example:
        >>> parse_size("64MiB"), parse_size("8M")
        (67108864, 8388608)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no size", where="--sizes", fix="--sizes 1KiB,1MiB,64MiB")
    return int(float(found[1]) * 1024 ** " kmg".index(found[2].lower() or " "))


@dataclass(frozen=True)
class Slow:
    """A node, or a pair of which no node is to blame, with its bandwidth and how far that is below the median."""

    nodes: tuple[str, ...]
    bytes_per_s: float
    below: float

    def __str__(self) -> str:
        who = " and ".join(self.nodes)
        what = f"all links of {who}" if len(self.nodes) == 1 else f"the link between {who}"
        return f"slow: {what}: {gigabytes(self.bytes_per_s)} GB/s, {self.below:.0%} below the median"


def slow_links(pairs: Sequence[Mapping[str, Any]]) -> list[Slow]:
    """Nodes most of whose links are slow, and further single links that are, the slowest first.

    Slow is what lies below the median by a fifth, and by more than three times the usual spread (the median absolute
    deviation, scaled to a standard deviation): a few bad links do not move either.
    """
    if len(pairs) < 3:
        return []
    rates = [float(pair["bytes_per_s"]) for pair in pairs]
    middle = statistics.median(rates)
    spread = 1.4826 * statistics.median(abs(rate - middle) for rate in rates)
    bound = min(middle * (1 - LEAST_GAP), middle - 3 * spread)
    bad = [(set(pair["nodes"]), rate) for pair, rate in zip(pairs, rates, strict=True) if rate < bound]
    found: list[Slow] = []
    for node in sorted({name for pair in pairs for name in pair["nodes"]}):
        own = [rate for pair, rate in zip(pairs, rates, strict=True) if node in pair["nodes"]]
        if sum(rate < bound for rate in own) > len(own) / 2 and len(own) > 1:
            found.append(Slow((node,), statistics.median(own), 1 - statistics.median(own) / middle))
    named = {one.nodes[0] for one in found}
    found += [Slow(tuple(sorted(pair)), rate, 1 - rate / middle) for pair, rate in bad if not pair & named]
    return sorted(found, key=lambda one: one.bytes_per_s)


def gigabytes(rate: float) -> str:
    """10^9 bytes a second, with three digits."""
    return f"{rate / 1e9:.3g}"
