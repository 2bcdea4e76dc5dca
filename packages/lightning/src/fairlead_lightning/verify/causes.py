"""Why a gradient differs, from the numbers alone: which share each replica and each batch of a step has in it.

The gradient of a step is a sum over the parts that went into it, g = sum w_irm g_irm, with g_irm that of micro-batch m
of batch i on replica r alone. Least squares give the weights w that the layout has used; those of the reference are
known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from fairlead_lightning.verify.compare import Compared, Difference
from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import CLOSE, Part, Shares, Tensors, distance, dot, factor_of, fitted, wide
from fairlead_lightning.verify.reference import Reference, References, apart
from fairlead_lightning.verify.text import counted, listed


def causes(compared: Compared, notes: Notes, references: References, reference: Reference) -> list[str]:
    """The likely causes of what differs, the likeliest first."""
    red = [one for one in compared.gradients if one.red]
    if red:
        found = list(_of_gradients(red, notes, references, reference))
    elif any(one.red for one in compared.norms):
        found = [*of_missed(compared, notes, references), *of_norms(compared, notes)]
    elif any(one.red for one in compared.applied):
        found = [*of_missed(compared, notes, references), *of_clipping(compared, notes, references)]
    elif any(one.red for one in compared.rates):
        found = list(of_rates(compared, notes, references))
    elif any(one.red for one in (*compared.first, *compared.weights)):
        found = list(of_weights(compared, notes, references, reference))
    elif any(one.red for one in compared.state):
        found = [
            "weights agree, what the optimizer holds does not: gradients of a later step differ in a way, such as a "
            "factor, that the optimizer's steps hide"
        ]
    elif any(one.red for one in compared.buffers):
        found = list(of_buffers(compared))
    elif any(one.red for one in compared.losses):
        found = [
            "gradients and weights are the same, the loss that is reported is not: it is not the mean of all ranks"
        ]
    else:
        return []
    return found or ["not known: no factor, no missing part, no zeros"]


def _of_gradients(
    red: Sequence[Difference], notes: Notes, references: References, reference: Reference
) -> Iterator[str]:
    exact, layout = references.exact.gradients, notes.fact("gradients")
    names = [one.name for one in red if one.rank == 0]
    zeros = [name for name in names if not _any(layout.get(name)) and _any(exact.get(name))]
    if zeros:
        yield f"no gradient reaches {counted(zeros, exact)}: {flat(zeros)}"
    left = [name for name in names if name not in zeros and name in exact]
    if left:
        yield from _shares(left, notes, references, reference)
    others = sorted({one.rank for one in red if one.rank})
    if others:
        yield from _between_ranks(others, [one.name for one in red if one.rank == others[0]], notes, exact)


def _shares(names: list[str], notes: Notes, references: References, reference: Reference) -> Iterator[str]:
    """What of the parts is in those gradients."""
    exact, layout = references.exact.gradients, notes.fact("gradients")
    wrong, right = {n: layout[n] for n in names}, {n: exact[n] for n in names}
    parts = reference.parts()
    used, off = fitted(wrong, parts)
    if off > CLOSE and notes.fact("micro_batches") > 1:
        parts = reference.parts(notes.fact("micro_batches"))
        used, off = fitted(wrong, parts)
    due, left = fitted(right, parts)
    if left > CLOSE:  # no sum of those parts in one process either
        due = {}
    if off > CLOSE or not due:
        if notes.replicas > 1 and due and _unreduced(wrong, due, parts, notes.replicas):
            yield "each number of it is of the batch of one replica alone: not reduced over the replicas"
        else:
            yield from _beside_shares(names, notes, references, reference)
        return
    factors = [u / d for u, d in zip(used.values(), due.values(), strict=True) if abs(d) > CLOSE]
    even = 1 / len(due)
    if max(factors) - min(factors) < 10 * CLOSE * max(map(abs, factors)):
        yield _scaled(sum(factors) / len(factors), names, notes, exact)
    elif _all_even(used.values(), even) and _shares_of_one(due.values(), even):
        shares = ", ".join(f"{100 * share:.0f} %" for share in due.values())
        what = "micro-batch" if len({micro for _, _, micro in due}) > 1 else "replica"
        yield (
            f"each {what}'s mean counts the same; in one process they would count {shares}, as they have samples or "
            "tokens: a mean over unequal counts, averaged a second time"
        )
    else:
        yield from _missing(used, due, names, exact)


def _all_even(shares: Iterable[float], even: float) -> bool:
    return all(math.isclose(share, even, rel_tol=10 * CLOSE) for share in shares)


def _shares_of_one(shares: Collection[float], even: float) -> bool:
    """Whether they are counts as shares of all, and not equal."""
    together = math.isclose(sum(shares), 1.0, rel_tol=10 * CLOSE) and min(shares) > -CLOSE
    return together and not _all_even(shares, even)


def _beside_shares(names: list[str], notes: Notes, references: References, reference: Reference) -> Iterator[str]:
    """Causes that are no other shares, the same for all parameters."""
    exact, layout = references.exact.gradients, notes.fact("gradients")
    factor, off = factor_of({n: layout[n] for n in names}, exact)
    if off < CLOSE:
        yield _scaled(factor, names, notes, exact)
        return
    dim = next((name for name in ("tensor", "tensor_parallel") if name in notes.fact("mesh")), "")
    row = _row_biases(notes, dim) if dim else []
    ranks = notes.fact("mesh").get(dim, 1)
    if row and apart(layout, reference.with_start(dict.fromkeys(row, ranks))) < CLOSE:
        text = f"the bias of row-parallel layers is added once by each of the {ranks} ranks of `{dim}`"
        yield f"{text}: {flat(row)}"
    elif notes.fact("mesh").get("context", 1) > 1:
        yield (
            "not known; with `context` it may be positions that each rank counts from 0, over its own tokens: take "
            "them from fairlead_distributed.parallel.context.positions(length) or torch.arange(length), or make "
            "them before the sequence is split"
        )


def _unreduced(wrong: Tensors, due: Shares, parts: Mapping[Part, Tensors], replicas: int) -> bool:
    """Whether each number of the gradient is of one replica alone, of whichever: shards that were not added up."""
    alone: list[Tensors] = [{} for _ in range(replicas)]
    for (number, replica, _), part in parts.items():
        weight = sum(share for other, share in due.items() if other[0] == number)
        for name in wrong.keys() & part.keys():
            alone[replica][name] = alone[replica].get(name, torch.zeros(())) + weight * wide(part[name])
    size = dot(wrong, wrong)
    for scale in (1.0, 1 / replicas):  # they may have been divided all the same
        off = 0.0
        for name, one in wrong.items():
            nearest = torch.stack([wide(one) - scale * each.get(name, torch.zeros(())) for each in alone])
            off += float(nearest.square().amin(dim=0).sum())
        if off < CLOSE**2 * size:
            return True
    return False


def _row_biases(notes: Notes, dim: str) -> list[str]:
    """Biases that every rank of a tensor group holds, of weights that are split."""
    held = notes.fact("placements")
    replicated = [name for name in held if name.endswith("bias") and "Replicate" in _over(dim, held[name])]
    return [name for name in replicated if "Shard" in _over(dim, held.get(f"{name.removesuffix('bias')}weight", ""))]


def _over(dim: str, placements: str) -> str:
    """`Replicate()` of `Shard(dim=0) over shard, Replicate() over tensor`, with what little stands before it."""
    before, found, _ = placements.partition(f" over {dim}")
    return before.rpartition(" over ")[2] if found else ""


def _missing(used: Shares, due: Shares, names: list[str], exact: Tensors) -> Iterator[str]:
    """Which parts are not in the gradient, or with another weight."""
    gone = {part for part, share in used.items() if abs(share) < 10 * CLOSE < abs(due[part])}
    numbers, replicas, pieces = ({part[at] for part in used} for at in range(3))
    early, lost, dropped = (
        [value for value in sorted(values) if all(part in gone for part in used if part[at] == value)]
        for at, values in enumerate((numbers, replicas, pieces))
    )
    where = "" if len(names) == len(exact) else f" in {counted(names, exact)}"
    if lost and len(lost) < len(replicas):
        remaining = listed(replicas - set(lost))
        yield f"only the batch of replica {remaining} is in it{where}: not reduced over the replicas"
    elif early and len(early) < len(numbers):
        yield f"only {_left(numbers, early)} of the {len(numbers)} batches of a step is in it{where}: {_LOST}"
    elif dropped and len(dropped) < len(pieces):
        yield f"only {_left(pieces, dropped)} of the {len(pieces)} micro-batches of a batch is in it{where}: {_LOST}"
    else:
        shares = ", ".join(f"{used[part]:.2g} for {due[part]:.2g}" for part in used)
        what = "micro-batches" if len(pieces) > 1 else "batches"
        yield f"the {what} have other shares in it{where} than in one process: {shares}"


_LOST = "the others' gradients are lost"


def _left(numbers: set[int], gone: list[int]) -> str:
    left = numbers - set(gone)
    return "the last" if left == {max(numbers)} else f"number {listed(n + 1 for n in left)}"


def _scaled(factor: float, names: list[str], notes: Notes, exact: Tensors) -> str:
    """All of them are a multiple of what they should be."""
    which = "all gradients are" if len(names) == len(exact) else f"{counted(names, exact)} are"
    text = f"{which} {factor:.4g} x those of one process"
    reasons = []
    mesh = {f"ranks of `{name}`": size for name, size in notes.fact("mesh").items()}
    counts = {"replicas": notes.replicas, **{name: size for name, size in mesh.items() if size != notes.replicas}}
    if notes.fact("world_size") not in counts.values():
        counts["ranks"] = notes.fact("world_size")
    for what, count in counts.items():
        biases = len(names) < len(exact) and all(n.endswith("bias") for n in names)
        if count > 1 and math.isclose(factor, count, rel_tol=CLOSE):
            reasons.append(f"added once by each of the {count} {what}" if biases else f"summed over the {count} {what}")
        if count > 1 and math.isclose(factor, 1 / count, rel_tol=CLOSE):
            reasons.append(f"divided by the {count} {what} once too often")
    several = {"batches of a step": notes.accumulate, "micro-batches of a batch": notes.fact("micro_batches")}
    for what, count in several.items():
        if count > 1 and math.isclose(factor, count, rel_tol=CLOSE):
            reasons.append(f"summed over the {count} {what}, not averaged")
        if count > 1 and math.isclose(factor, 1 / count, rel_tol=CLOSE):
            reasons.append(f"divided by the {count} {what} once too often")
    return f"{text}: {', or '.join(reasons)}" if reasons else text


def _between_ranks(others: list[int], names: list[str], notes: Notes, exact: Tensors) -> Iterator[str]:
    """The ranks do not hold the same full gradient: each has a part of the sum, or was left out of a reduction."""
    tied = [name for name in names if name in notes.fact("stages")]
    holders = notes.fact("stages")[tied[0]] if tied else range(len(notes.ranks))
    every = [{n: wide(notes.of_rank(rank, "gradients")[n]) for n in names} for rank in holders]
    total = {n: sum((one[n] for one in every), torch.zeros(())) for n in names}
    factor, off = factor_of(total, exact)
    ranks = f"rank{'s' if len(others) > 1 else ''} {listed(others)}"
    text = f"{ranks} and rank 0 do not hold the same gradient of {counted(names, exact)}: {flat(names)}"
    if tied and off < CLOSE:
        yield f"{text}; a weight that several stages hold: what each of them has is not added up"
    elif off < CLOSE and math.isclose(factor, len(every), rel_tol=CLOSE):
        yield f"{text}; their mean over the ranks is right: not reduced"
    elif off < CLOSE:
        yield f"{text}; added up they are {factor:.4g} x the right one: each holds a partial sum, not added up"
    else:
        share = [rank for rank in others if notes.ranks[rank]["replica"] == notes.ranks[0]["replica"]]
        dims = [f"`{name}`" for name in notes.fact("mesh") if name not in ("replicate", "shard")]
        over = f"the ranks of {' or '.join(dims)}" if share and dims else "the replicas"
        yield f"{text}; each has a part of it: a sum over {over} is missing in the backward pass"


def _any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())


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
    if "squares" not in notes.ranks[rank] or notes.fact("stages"):
        return None
    return _norm(notes, rank, [name for name, size in notes.fact("mesh").items() if size > 1], [])


def _norms(notes: Notes, rank: int, true: float) -> Iterator[tuple[str, float]]:
    """Norms that count too little or too much, as the ranks' parts of the gradients make them."""
    if "squares" not in notes.ranks[rank]:  # a strategy that clips by itself
        together = math.sqrt(sum(other["clipped_by"] ** 2 for other in notes.ranks))
        size = notes.ranks[rank]["clipped_by"]
        if math.isclose(together, true, rel_tol=CLOSE):
            yield "it counts what this rank holds, not what the others do", size
        return
    dims = [name for name, size in notes.fact("mesh").items() if size > 1]
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


def _norm(notes: Notes, rank: int, over: list[str], copies: list[str]) -> float:
    """Of what the ranks have that lie beside this one: on `over` what is cut there, on `copies` everything."""
    own = notes.ranks[rank]["coordinates"]
    total = 0.0
    for other in notes.ranks:
        apart_on = [name for name, index in other["coordinates"].items() if index != own[name]]
        for cut, square in other.get("squares", {}).items():
            cut_on = {name for flattened in cut for name in own if name in flattened.split("_")}
            total += square if all(d in copies or (d in over and d in cut_on) for d in apart_on) else 0.0
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
    first, start, exact = (wide(one[name]) for one in (notes.fact("first"), notes.start, references.exact.first))
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
            f"{text}: weight decay reaches other parameters; where groups are made by p.ndim or p.shape, a matrix "
            "that is partitioned already (DeepSpeed's stage 3) has one dimension"
        )
        return
    moves = {one.name: wide(notes.fact("weights")[one.name]) - wide(start[one.name]) for one in red if one.rank == 0}
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
    off = {name: wide(notes.fact("first")[name]) - wide(references.exact.first[name]) for name in red}
    return off if red and factor_of(off, notes.start)[1] < _NEARLY else {}


def _moves(weights: Tensors, start: Tensors, names: Tensors) -> Tensors:
    return {name: wide(weights[name]) - wide(start[name]) for name in names}
