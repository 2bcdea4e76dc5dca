"""Why a gradient differs, from the numbers alone: which share each replica and each batch of a step has in it.

The gradient of a step is a sum over the parts that went into it, g = sum w_ir g_ir, with g_ir that of batch i on
replica r alone. Least squares give the weights w that the layout has used; those of the reference are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fairlead_lightning.verify.compare import Compared, Difference
from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes, Tensors
from fairlead_lightning.verify.reference import Reference, References, apart

Shares = dict[tuple[int, int], float]
"""The weight of each (batch of a step, replica) in a gradient."""

_CLOSE: Final = 1e-3
"""A relative distance below which an explanation holds; the faults themselves are of the size of the gradient."""
_ROUGHLY: Final = 0.25
"""The same for what steps of an optimizer have changed since."""


def causes(compared: Compared, notes: Notes, references: References, reference: Reference) -> list[str]:
    """The likely causes of what differs, the likeliest first."""
    red = [one for one in compared.gradients if one.red]
    if red:
        found = list(_of_gradients(red, notes, references, reference))
        return found or ["none that is known: no factor, no missing part, no zeros"]
    if any(one.red for one in compared.norms):
        return list(_of_norms(compared, notes))
    if any(one.red for one in compared.weights):
        return list(_of_weights(compared, notes, references))
    if any(one.red for one in compared.losses):
        return ["gradients and weights are the same, the loss that is reported is not: it is not the mean of all ranks"]
    return []


def _of_gradients(
    red: Sequence[Difference], notes: Notes, references: References, reference: Reference
) -> Iterator[str]:
    exact, layout = references.exact.gradients, notes.said("gradients")
    names = [one.name for one in red if one.rank == 0]
    zeros = [name for name in names if not _any(layout.get(name)) and _any(exact.get(name))]
    if zeros:
        yield f"no gradient reaches {_count(zeros, exact)}: {flat(zeros)}"
    left = [name for name in names if name not in zeros and name in exact]
    if left:
        yield from _shares(left, notes, references, reference)
    others = sorted({one.rank for one in red if one.rank})
    if others:
        yield from _between_ranks(others, [one.name for one in red if one.rank == others[0]], notes, exact)


def _shares(names: list[str], notes: Notes, references: References, reference: Reference) -> Iterator[str]:
    """What of the parts is in those gradients."""
    exact, layout = references.exact.gradients, notes.said("gradients")
    parts = reference.parts()
    used, off = _fitted({n: layout[n] for n in names}, parts)
    due, _ = _fitted({n: exact[n] for n in names}, parts)
    if off > _CLOSE or not due:
        factor, off = _factor({n: layout[n] for n in names}, exact)
        if off < _CLOSE:
            yield _scaled(factor, names, notes, exact)
            return
        row = _row_biases(notes)
        if row and apart(layout, reference.with_start(dict.fromkeys(row, notes.said("mesh")["tensor"]))) < _CLOSE:
            ranks = notes.said("mesh")["tensor"]
            text = f"the bias of row-parallel layers is added once by each of the {ranks} ranks of `tensor`"
            yield f"{text}: {flat(row)}"
        elif not references.by_replica and notes.replicas > 1 and notes.said("automatic"):
            single = reference.one_by_one()
            if apart(layout, single.gradients) < _CLOSE:
                yield "it equals the mean over the replicas: a layer or the loss looks at the whole batch of a replica"
        return
    factors = [u / d for u, d in zip(used.values(), due.values(), strict=True) if abs(d) > _CLOSE]
    even = 1 / len(due)
    if max(factors) - min(factors) < 10 * _CLOSE * max(map(abs, factors)):
        yield _scaled(sum(factors) / len(factors), names, notes, exact)
    elif all(math.isclose(share, even, rel_tol=10 * _CLOSE) for share in used.values()):
        shares = ", ".join(f"{100 * share:.0f} %" for share in due.values())
        yield (
            f"each replica's mean counts the same; in one process they would count {shares}, as they have samples or "
            "tokens: a mean over unequal counts, averaged again"
        )
    else:
        yield from _missing(used, due, names, exact)


def _row_biases(notes: Notes) -> list[str]:
    """Biases that every rank of a tensor group holds, of weights that are split."""
    held = notes.said("placements")
    whole = [name for name in held if name.endswith("bias") and "Replicate" in _over_tensor(held[name])]
    return [name for name in whole if "Shard" in _over_tensor(held.get(f"{name.removesuffix('bias')}weight", ""))]


def _over_tensor(placements: str) -> str:
    """`Replicate()` of `Shard(dim=0) over shard, Replicate() over tensor`, with what little stands before it."""
    before, found, _ = placements.partition(" over tensor")
    return before.rpartition(" over ")[2] if found else ""


def _missing(used: Shares, due: Shares, names: list[str], exact: Tensors) -> Iterator[str]:
    """Which parts are not in the gradient, or with another weight."""
    gone = {part for part, share in used.items() if abs(share) < 10 * _CLOSE < abs(due[part])}
    replicas, numbers = ({part[at] for part in used} for at in (1, 0))
    lost = [r for r in replicas if all((i, r) in gone for i in numbers)]
    early = [i for i in numbers if all((i, r) in gone for r in replicas)]
    where = "" if len(names) == len(exact) else f" in {_count(names, exact)}"
    if lost and len(lost) < len(replicas):
        kept = _listed(replicas - set(lost))
        yield f"only the batch of replica {kept} is in it{where}: not reduced over the replicas"
    elif early and len(early) < len(numbers):
        kept = "the last" if numbers - set(early) == {max(numbers)} else f"batch {_listed(numbers - set(early))}"
        yield f"only {kept} of the {len(numbers)} batches of a step is in it{where}: the others' gradients are lost"
    else:
        shares = ", ".join(f"{used[part]:.2f} for {due[part]:.2f}" for part in used)
        yield f"the batches have other shares in it{where} than in one process: {shares}"


def _scaled(factor: float, names: list[str], notes: Notes, exact: Tensors) -> str:
    """All of them are a multiple of what they should be."""
    which = "all gradients are" if len(names) == len(exact) else f"{_count(names, exact)} are"
    text = f"{which} {factor:.4g} x those of one process"
    reasons = []
    mesh = {f"ranks of `{name}`": size for name, size in notes.said("mesh").items()}
    counts = {"replicas": notes.replicas, **{name: size for name, size in mesh.items() if size != notes.replicas}}
    if notes.said("world_size") not in counts.values():
        counts["ranks"] = notes.said("world_size")
    for what, count in counts.items():
        biases = len(names) < len(exact) and all(n.endswith("bias") for n in names)
        if count > 1 and math.isclose(factor, count, rel_tol=_CLOSE):
            reasons.append(f"added once by each of the {count} {what}" if biases else f"summed over the {count} {what}")
        if count > 1 and math.isclose(factor, 1 / count, rel_tol=_CLOSE):
            reasons.append(f"divided by the {count} {what} once too often")
    batches = notes.accumulate
    if batches > 1 and math.isclose(factor, batches, rel_tol=_CLOSE):
        reasons.append(f"summed over the {batches} batches of a step, not averaged")
    if batches > 1 and math.isclose(factor, 1 / batches, rel_tol=_CLOSE):
        reasons.append(f"divided by the {batches} batches of a step once too often")
    unique = list(dict.fromkeys(reasons))
    return f"{text}: {', or '.join(unique)}" if unique else text


def _between_ranks(others: list[int], names: list[str], notes: Notes, exact: Tensors) -> Iterator[str]:
    """The ranks do not hold the same whole gradient: each has a part of the sum, or was left out of a reduction."""
    every = [{n: notes.of_rank(rank, "gradients")[n].double() for n in names} for rank in range(len(notes.ranks))]
    total = {n: sum((one[n] for one in every), torch.zeros(())) for n in names}
    factor, off = _factor(total, exact)
    ranks = f"rank{'s' if len(others) > 1 else ''} {_listed(others)}"
    text = f"{ranks} and rank 0 do not hold the same gradient of {_count(names, exact)}: {flat(names)}"
    if off < _CLOSE and math.isclose(factor, len(every), rel_tol=_CLOSE):
        yield f"{text}; their mean over the ranks is right: not reduced"
    elif off < _CLOSE:
        yield f"{text}; added up they are {factor:.4g} x the right one: each holds a partial sum, not added up"
    else:
        share = [rank for rank in others if notes.ranks[rank]["replica"] == notes.ranks[0]["replica"]]
        dims = [f"`{name}`" for name in notes.said("mesh") if name not in ("replicate", "shard")]
        over = f"the ranks of {' or '.join(dims)}" if share and dims else "the replicas"
        yield f"{text}; each has a part of it: a sum over {over} is missing in the backward pass"


def _of_norms(compared: Compared, notes: Notes) -> Iterator[str]:
    for one in compared.norms:
        if not one.red:
            continue
        said = notes.ranks[one.rank]
        text = f"rank {one.rank} clips by a norm of {said['clipped_by']:.6g}; that of all gradients is {one.size:.6g}"
        if math.isclose(said["clipped_by"], said["own_norm"], rel_tol=_CLOSE):
            text += ": it counts what this rank holds, not what the others do"
        elif said["clipped_by"] > one.size:
            text += ": it counts what several ranks hold alike more than once"
        yield text
        return


def _of_weights(compared: Compared, notes: Notes, references: References) -> Iterator[str]:
    red = [one for one in compared.weights if one.red]
    still = [one.name for one in red if one.rank == 0 and one.name in compared.still]
    exact = references.exact.weights
    if still:
        text = f"{_count(still, exact)} do not move: {flat(still)}"
        yield f"{text}; the optimizer does not have them, or their step is lost"
        return
    ranks = sorted({one.rank for one in red if one.rank})
    if ranks:
        yield f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)} and rank 0 do not hold the same weights any more"
    start = notes.start
    apart_by = {one.name: notes.said("weights")[one.name].double() - exact[one.name] for one in red if one.rank == 0}
    decays = {name: one for name, one in apart_by.items() if _factor({name: one}, start)[1] < _ROUGHLY}
    if decays:
        text = f"{flat(list(decays))} differ by {_factor(decays, start)[0]:+.2g} x what they began as"
        yield (
            f"{text}: weight decay reaches other parameters; where groups are made by p.ndim or p.shape, a flat shard "
            "of a matrix (FSDP's) is a vector"
        )
        return
    moves = {one.name: notes.said("weights")[one.name].double() - start[one.name] for one in red if one.rank == 0}
    if moves:
        factor, off = _factor(moves, {n: exact[n].double() - start[n] for n in moves})
        if off < _CLOSE:
            yield f"the steps are {factor:.4g} x those of one process: the learning rate, or how gradients are clipped"
    if not ranks:
        yield "the gradients of the first step are the same: the optimizer's step, clipping, or a later batch differs"


def _fitted(gradients: Tensors, parts: dict[tuple[int, int], Tensors]) -> tuple[Shares, float]:
    """The share of each part in the gradients, and what is left of them, relative to them."""
    names = [n for n in gradients if any(n in one for one in parts.values())]
    if not names or not parts:
        return {}, math.inf
    # The Gram matrix alone: the gradients of all parameters side by side would take much memory.
    keys = list(parts)
    held = [{n: parts[key].get(n, torch.zeros(())).double() for n in names} for key in keys]
    wanted = {n: gradients[n].double() for n in names}
    gram = torch.tensor([[_dot(a, b) for b in held] for a in held], dtype=torch.float64)
    right = torch.tensor([_dot(a, wanted) for a in held], dtype=torch.float64)
    share: Tensor = torch.linalg.lstsq(gram, right.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    off = {n: wanted[n] - sum(float(s) * one[n] for s, one in zip(share, held, strict=True)) for n in names}
    size = math.sqrt(_dot(wanted, wanted))
    left = math.sqrt(_dot(off, off)) / size if size else math.inf
    return dict(zip(keys, share.tolist(), strict=True)), left


def _factor(tensors: dict[str, Any], exact: Tensors) -> tuple[float, float]:
    """The multiple of the reference that is nearest, and how far it is off, relative to the tensors."""
    own = {n: tensors[n].double() for n in tensors if n in exact}
    true = {n: exact[n].double() for n in own}
    square, size = _dot(true, true), math.sqrt(_dot(own, own))
    if not square or not size:
        return 0.0, math.inf
    factor = _dot(own, true) / square
    off = {n: own[n] - factor * true[n] for n in own}
    return factor, math.sqrt(_dot(off, off)) / size


def _dot(one: Tensors, other: Tensors) -> float:
    return sum(float((one[n] * other[n]).sum()) for n in one)


def _any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())


def _count(names: Sequence[str], exact: Tensors) -> str:
    biases = all(name.endswith("bias") for name in names)
    return f"{len(names)} of {len(exact)} parameters{', all of them biases' if biases else ''}"


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, sorted(numbers)))
