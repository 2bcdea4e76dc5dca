"""Who tries what with whom, and which node is to blame for pairs that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

Pair = tuple[int, int]
_FEWEST: Final = 3


def schedule(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of pairs in which each node meets another partner each time: about log2 of the nodes, at least three.

    The circle method of tournaments: in a round all nodes are paired at once, with an odd number all but one.

    Example:
        >>> schedule([0, 1, 2, 3])
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    if len(nodes) < 2:
        return []
    seats: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    count = min(len(seats) - 1, max(_FEWEST, (len(nodes) - 1).bit_length()))
    rounds = []
    for _ in range(count):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def blame(tried: Mapping[Pair, bool]) -> tuple[set[int], list[Pair]]:
    """The nodes that are at fault for pairs that failed, and the failed pairs of which that is unclear.

    At fault is who failed with more than half of its partners, the worst first; what they spoiled for others does not
    count against these. Nobody is, unless the rest is at least half of all, and some of it can work with each other.

    Args:
        tried: Each pair, and whether it succeeded.

    Example:
        >>> blame({(0, 1): True, (0, 2): False, (1, 2): False})
        ({2}, [])
        >>> blame({(0, 1): False})
        (set(), [(0, 1)])
    """
    bad: set[int] = set()
    left = dict(tried)
    while True:
        tries = Counter(node for pair in left for node in pair)
        fails = Counter(node for pair, ok in left.items() if not ok for node in pair)
        worst = max((fails[node] / tries[node] for node in fails), default=0.0)
        if worst <= 0.5:
            break
        bad |= {node for node in fails if fails[node] / tries[node] == worst}
        left = {pair: ok for pair, ok in left.items() if not bad & set(pair)}
    nodes = {node for pair in tried for node in pair}
    if bad and (not any(left.values()) or 2 * len(bad) > len(nodes)):
        return set(), sorted(pair for pair, ok in tried.items() if not ok)
    # Against a node that met bad ones only, nothing is shown.
    good = nodes - bad
    shown = {node for pair, ok in tried.items() if not ok and good & set(pair) for node in bad & set(pair)}
    return shown, sorted(pair for pair, ok in left.items() if not ok)
