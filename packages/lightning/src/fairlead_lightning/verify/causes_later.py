"""Why the clipping norm or the weights differ, where the gradients of the first step are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

from fairlead_lightning.verify.compare import Compared
from fairlead_lightning.verify.fits import CLOSE, factor_of
from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import Tensors, distance, wide
from fairlead_lightning.verify.reference import Reference, References, apart
from fairlead_lightning.verify.text import counted, listed

_ROUGHLY: Final = 0.25
"""The distance below which an explanation holds of what steps of an optimizer have changed since."""
_NEARLY: Final = 0.02
"""The same of small differences after one step, which float32 rounds."""


def of_norms(compared: Compared, notes: Notes) -> Iterator[str]:
    """What the norm counts that a rank clips by; of the first rank with a wrong one."""
    one = next(one for one in compared.norms if one.red)
    norm = notes.ranks[one.rank]["clipped_by"]
    text = f"rank {one.rank} clips by a norm of {norm:.6g}; that of all gradients is {one.size:.6g}"
    have = _have(notes, one.rank)
    if have is not None and have < one.size * (1 - CLOSE) and math.isclose(norm, have, rel_tol=CLOSE):
        yield f"{text}: it counts what optimizers have, and that of a rank does not have all that it should"
        return
    counts = [what for what, other in _norms(notes, one.rank, one.size) if math.isclose(norm, other, rel_tol=CLOSE)]
    early = [
        f"it is of gradients that are added up over the {count} {what}, and not averaged yet"
        for what, count in (("batches of a step", notes.accumulate), ("replicas", notes.replicas))
        if count > 1 and math.isclose(norm, one.size * count, rel_tol=CLOSE)
    ]
    reasons = [*counts[:1], *early]
    yield f"{text}: {', or '.join(reasons)}" if reasons else text


def _have(notes: Notes, rank: int) -> float | None:
    """The norm of all that the optimizers of a rank's copy have; None: it clips by itself, or has stages."""
    if "squares" not in notes.ranks[rank] or notes.said("stages"):
        return None
    return _norm(notes, rank, [name for name, size in notes.said("mesh").items() if size > 1], [])


def _norms(notes: Notes, rank: int, true: float) -> Iterator[tuple[str, float]]:
    """Norms that count too little or too much, as the ranks' parts of the gradients make them."""
    if "squares" not in notes.ranks[rank]:  # a strategy that clips by itself
        together = math.sqrt(sum(other["clipped_by"] ** 2 for other in notes.ranks))
        size = notes.ranks[rank]["clipped_by"]
        if math.isclose(together, true, rel_tol=CLOSE):
            yield "it counts what this rank holds, not what the others do", size
        return
    dims = [name for name, size in notes.said("mesh").items() if size > 1]
    yield "it counts what this rank holds, not what the others do", _norm(notes, rank, [], [])
    for size in range(1, len(dims)):
        for some in itertools.combinations(dims, size):
            left = [name for name in dims if name not in some]
            text = f"it counts what the ranks of {_of(some)} hold, not what those of {_of(left)} do"
            yield text, _norm(notes, rank, list(some), [])
    for size in range(1, len(dims) + 1):
        for some in itertools.combinations(dims, size):
            text = f"it counts what the ranks of {_of(some)} hold alike once for each of them"
            yield text, _norm(notes, rank, dims, list(some))


def _norm(notes: Notes, rank: int, over: list[str], again: list[str]) -> float:
    """Of what the ranks have that lie beside this one: on `over` what is cut there, on `again` everything."""
    own = notes.ranks[rank]["place"]
    total = 0.0
    for other in notes.ranks:
        apart_on = [name for name, index in other["place"].items() if index != own[name]]
        for cut, square in other.get("squares", {}).items():
            cut_on = {name for flattened in cut for name in own if name in flattened.split("_")}
            total += square if all(d in again or (d in over and d in cut_on) for d in apart_on) else 0.0
    return math.sqrt(total)


def _of(dims: list[str] | tuple[str, ...]) -> str:
    return " and ".join(f"`{name}`" for name in dims)


def of_clipping(compared: Compared, notes: Notes, references: References) -> Iterator[str]:
    """Gradients are right until they are clipped."""
    red = [one for one in compared.applied if one.red]
    factors = {}
    for rank in sorted({one.rank for one in red}):
        mine = {one.name: notes.of_rank(rank, "applied")[one.name] for one in red if one.rank == rank}
        factor, off = factor_of(mine, references.exact.applied)
        if off < CLOSE:
            factors[rank] = factor
    if factors:
        each = ", ".join(f"{factor:.4g} x on rank {rank}" for rank, factor in factors.items())
        yield f"complete gradients are right; clipping leaves them {each}: it does not go by the norm of all of them"
    else:
        yield "complete gradients are right, what the optimizer gets is not: clipping, or a hook behind it"


def of_missed(compared: Compared, notes: Notes, references: References) -> Iterator[str]:
    """Copies or shards that one rank does not move in the first step; clipping and its norm follow them."""
    copies = [one for one in compared.first if one.red and one.copy]
    for rank in sorted({one.rank for one in copies}):
        names = [one.name for one in copies if one.rank == rank]
        unmoved = [n for n in names if not distance(notes.of_rank(rank, "first")[n], notes.start[n])]
        if unmoved:
            yield f"rank {rank} does not move {flat(unmoved)}: its optimizer does not have them"
            return
    parts = [one.name for one in compared.first if one.red and not one.copy and _left_out(one.name, notes, references)]
    if parts:
        yield f"a part of {flat(parts)} does not move: the optimizer of a rank that holds it does not have it"


def _left_out(name: str, notes: Notes, references: References) -> bool:
    """Whether some elements did not move at all in the first step, as they should have, and the others did."""
    first, start, exact = (wide(one[name]) for one in (notes.said("first"), notes.start, references.exact.first))
    still = (first == start) & (exact != start)
    moved = exact - start
    off = (first - exact)[~still]
    return bool(still.any()) and float(off.norm()) <= _ROUGHLY * float(moved.norm())


def of_rates(compared: Compared, notes: Notes, references: References) -> Iterator[str]:
    """The learning rates of the steps."""
    red = [one for one in compared.rates if one.red]
    own, true = notes.ranks[red[0].rank]["rates"], references.exact.rates
    pairs = [(a[0], b[0]) for a, b in zip(own, true, strict=False) if a and b]
    text = f"learning rates are {', '.join(f'{a:.4g}' for a, _ in pairs)}; in one process "
    text += ", ".join(f"{b:.4g}" for _, b in pairs)
    factors = [a / b for a, b in pairs if b]
    if red[0].rank:
        yield f"{text}: on rank {red[0].rank} alone"
    elif factors and all(math.isclose(one, factors[0], rel_tol=CLOSE) for one in factors):
        yield f"{text}: {factors[0]:.4g} x in each step"
    elif _every_second(pairs):
        yield f"{text}: a scheduler that is stepped twice a step"
    else:
        yield f"{text}; not known: a scheduler that is stepped more often, or counts batches or ranks, looks like this"


def _every_second(pairs: list[tuple[float, float]]) -> bool:
    """Whether the first rates are every second one of a process."""
    half = (len(pairs) + 1) // 2
    changes = len({b for _, b in pairs}) > 1
    return half > 1 and changes and all(math.isclose(pairs[i][0], pairs[2 * i][1], rel_tol=CLOSE) for i in range(half))


def of_buffers(compared: Compared) -> Iterator[str]:
    """Buffers, where weights are right."""
    red = [one for one in compared.buffers if one.red]
    ranks = sorted({one.rank for one in red if one.copy})
    if ranks:
        yield (
            f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} and rank 0 do not hold the same {red[0].name}: "
            "it follows the batches of each rank, or one rank alone changes it; reduce what it is made of"
        )
    else:
        yield f"{red[0].name} is not what one process makes of all batches: it follows a part of them"


def of_weights(compared: Compared, notes: Notes, references: References, reference: Reference) -> Iterator[str]:
    """What the steps of the optimizer have done otherwise."""
    copies = [one for one in compared.first if one.red and one.copy]
    if copies:
        ranks = sorted({one.rank for one in copies})
        names = [one.name for one in copies if one.rank == ranks[0]]
        text = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} and rank 0 do not hold the same weights any more"
        yield f"{text} after the first step: {flat(names)}"
        yield from of_missed(compared, notes, references)
        return
    red = [one for one in compared.weights if one.red]
    still = [one.name for one in red if one.rank == 0 and one.name in compared.still]
    exact = references.exact.weights
    if still:
        text = f"{counted(still, exact)} do not move: {flat(still)}"
        yield f"{text}; the optimizer does not have them, or their step is lost"
        return
    missed = list(of_missed(compared, notes, references))
    if missed:
        yield from missed
        return
    ranks = sorted({one.rank for one in red if one.rank})
    if ranks:
        yield f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} and rank 0 do not hold the same weights any more"
        return
    start = notes.start
    decays = _decays(compared, notes, references)
    if decays:
        text = f"{flat(list(decays))} differ by {factor_of(decays, start)[0]:+.2g} x what they began as"
        yield (
            f"{text}: weight decay reaches other parameters; where groups are made by p.ndim or p.shape, a flat shard "
            "of a matrix (FSDP's) is a vector"
        )
        return
    moves = {one.name: wide(notes.said("weights")[one.name]) - wide(start[one.name]) for one in red if one.rank == 0}
    if moves:
        steps = len(references.exact.losses)
        if steps > 1 and apart(moves, _moves(reference.after(steps - 1).weights, start, moves)) < CLOSE:
            left = len(notes.batches[0]) % notes.accumulate
            text = f"the weights are those of one process after {steps - 1} of {steps} steps: the last one is lost"
            yield text + (f", which is of the {left} batches left over at the end of the epoch" if left else "")
            return
        factor, off = factor_of(moves, _moves(exact, start, moves))
        if off < CLOSE:
            yield f"the steps are {factor:.4g} x those of one process: the learning rate, or how gradients are clipped"
            return
    yield "gradients of the first step agree: the optimizer's step, clipping, or a later batch differs"


def _decays(compared: Compared, notes: Notes, references: References) -> Tensors:
    """What differs after the first step, where all of it does by one multiple of what it began as."""
    red = [one.name for one in compared.first if one.red and one.rank == 0]
    off = {name: wide(notes.said("first")[name]) - wide(references.exact.first[name]) for name in red}
    return off if red and factor_of(off, notes.start)[1] < _NEARLY else {}


def _moves(weights: Tensors, start: Tensors, names: Tensors) -> Tensors:
    return {name: wide(weights[name]) - wide(start[name]) for name in names}
