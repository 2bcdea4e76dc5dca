"""Why a gradient differs, from the numbers alone: which share each replica and each batch of a step has in it.

The gradient of a step is a sum over the parts that went into it, g = sum w_irm g_irm, with g_irm that of micro-batch m
of batch i on replica r alone. Least squares give the weights w that the layout has used; those of the reference are
known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fairlead_lightning.verify.batches import tensors
from fairlead_lightning.verify.causes_later import of_buffers, of_clipping, of_missed, of_norms, of_rates, of_weights
from fairlead_lightning.verify.compare import Compared, Difference
from fairlead_lightning.verify.fits import CLOSE, Part, Shares, factor_of, fitted
from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import Tensors, dot, wide
from fairlead_lightning.verify.positions import local_positions
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
    exact, layout = references.exact.gradients, notes.said("gradients")
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
    exact, layout = references.exact.gradients, notes.said("gradients")
    wrong, right = {n: layout[n] for n in names}, {n: exact[n] for n in names}
    parts = reference.parts()
    used, off = fitted(wrong, parts)
    if off > CLOSE and notes.said("micro_batches") > 1:
        parts = reference.parts(notes.said("micro_batches"))
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
            "tokens: a mean over unequal counts, averaged again"
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
    exact, layout = references.exact.gradients, notes.said("gradients")
    factor, off = factor_of({n: layout[n] for n in names}, exact)
    if off < CLOSE:
        yield _scaled(factor, names, notes, exact)
        return
    dim = next((name for name in ("tensor", "tensor_parallel") if name in notes.said("mesh")), "")
    row = _row_biases(notes, dim) if dim else []
    ranks = notes.said("mesh").get(dim, 1)
    if row and apart(layout, reference.with_start(dict.fromkeys(row, ranks))) < CLOSE:
        text = f"the bias of row-parallel layers is added once by each of the {ranks} ranks of `{dim}`"
        yield f"{text}: {flat(row)}"
        return
    context = notes.said("mesh").get("context", 1)
    lengths = {tensor.shape[1] for tensor in tensors(notes.batches[0][0]) if tensor.ndim > 1}
    modes = local_positions(lengths, context) if context > 1 else ()
    if any(apart(layout, reference.within(mode)) < CLOSE for mode in modes):
        yield (
            f"each of the {context} ranks of `context` counts positions from 0, over the tokens that it holds; take "
            "them from fairlead_distributed.parallel.context.positions(length) or torch.arange(length), or make them "
            "before the sequence is split"
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
    held = notes.said("placements")
    whole = [name for name in held if name.endswith("bias") and "Replicate" in _over(dim, held[name])]
    return [name for name in whole if "Shard" in _over(dim, held.get(f"{name.removesuffix('bias')}weight", ""))]


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
        kept = listed(replicas - set(lost))
        yield f"only the batch of replica {kept} is in it{where}: not reduced over the replicas"
    elif early and len(early) < len(numbers):
        yield f"only {_kept(numbers, early)} of the {len(numbers)} batches of a step is in it{where}: {_LOST}"
    elif dropped and len(dropped) < len(pieces):
        yield f"only {_kept(pieces, dropped)} of the {len(pieces)} micro-batches of a batch is in it{where}: {_LOST}"
    else:
        shares = ", ".join(f"{used[part]:.2g} for {due[part]:.2g}" for part in used)
        what = "micro-batches" if len(pieces) > 1 else "batches"
        yield f"the {what} have other shares in it{where} than in one process: {shares}"


_LOST = "the others' gradients are lost"


def _kept(numbers: set[int], gone: list[int]) -> str:
    left = numbers - set(gone)
    return "the last" if left == {max(numbers)} else f"number {listed(n + 1 for n in left)}"


def _scaled(factor: float, names: list[str], notes: Notes, exact: Tensors) -> str:
    """All of them are a multiple of what they should be."""
    which = "all gradients are" if len(names) == len(exact) else f"{counted(names, exact)} are"
    text = f"{which} {factor:.4g} x those of one process"
    reasons = []
    mesh = {f"ranks of `{name}`": size for name, size in notes.said("mesh").items()}
    counts = {"replicas": notes.replicas, **{name: size for name, size in mesh.items() if size != notes.replicas}}
    if notes.said("world_size") not in counts.values():
        counts["ranks"] = notes.said("world_size")
    for what, count in counts.items():
        biases = len(names) < len(exact) and all(n.endswith("bias") for n in names)
        if count > 1 and math.isclose(factor, count, rel_tol=CLOSE):
            reasons.append(f"added once by each of the {count} {what}" if biases else f"summed over the {count} {what}")
        if count > 1 and math.isclose(factor, 1 / count, rel_tol=CLOSE):
            reasons.append(f"divided by the {count} {what} once too often")
    several = {"batches of a step": notes.accumulate, "micro-batches of a batch": notes.said("micro_batches")}
    for what, count in several.items():
        if count > 1 and math.isclose(factor, count, rel_tol=CLOSE):
            reasons.append(f"summed over the {count} {what}, not averaged")
        if count > 1 and math.isclose(factor, 1 / count, rel_tol=CLOSE):
            reasons.append(f"divided by the {count} {what} once too often")
    return f"{text}: {', or '.join(reasons)}" if reasons else text


def _between_ranks(others: list[int], names: list[str], notes: Notes, exact: Tensors) -> Iterator[str]:
    """The ranks do not hold the same whole gradient: each has a part of the sum, or was left out of a reduction."""
    tied = [name for name in names if name in notes.said("stages")]
    holders = notes.said("stages")[tied[0]] if tied else range(len(notes.ranks))
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
        dims = [f"`{name}`" for name in notes.said("mesh") if name not in ("replicate", "shard")]
        over = f"the ranks of {' or '.join(dims)}" if share and dims else "the replicas"
        yield f"{text}; each has a part of it: a sum over {over} is missing in the backward pass"


def _any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())
