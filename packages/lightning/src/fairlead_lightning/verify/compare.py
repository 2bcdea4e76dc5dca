"""The layout's numbers against the reference's, each within a multiple of the noise that was measured for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes, Tensors
from fairlead_lightning.verify.reference import References, Trained

MULTIPLE: Final = 10
"""A difference of more than so many times the noise is one."""
_EPSILON: Final = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Difference:
    """One number, or one parameter, against the reference.

    Attributes:
        kind: What was compared.
        name: The parameter's name; `step 2` of a loss.
        off: The distance from the reference, as a 2-norm.
        size: The 2-norm of the reference itself; of a weight, how far it moved.
        noise: What float32 alone makes of it.
        rank: Whose it is, where the ranks do not have the same.
    """

    kind: Literal["gradient", "clipping norm", "weight", "loss"]
    name: str
    off: float
    size: float
    noise: float
    rank: int = 0

    @property
    def ratio(self) -> float:
        """How many times the noise."""
        return self.off / self.noise if self.noise else (math.inf if self.off else 0.0)

    @property
    def red(self) -> bool:
        """Whether it is more than rounding; a number that is not finite is."""
        return not self.ratio <= MULTIPLE

    @property
    def relative(self) -> float:
        """The distance relative to the reference."""
        return self.off / self.size if self.size else (math.inf if self.off else 0.0)


@dataclass
class Compared:
    """All that was compared, in the order of the model.

    Attributes:
        wrong: What is wrong whatever the numbers say: dead models, ranks of a replica with batches of their own.
        still: Parameters that are to be trained and did not move in the layout.
    """

    gradients: list[Difference] = field(default_factory=list)
    norms: list[Difference] = field(default_factory=list)
    weights: list[Difference] = field(default_factory=list)
    losses: list[Difference] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)
    moved: int = 0

    def __iter__(self) -> Iterator[Difference]:
        yield from (*self.gradients, *self.norms, *self.weights, *self.losses)

    @property
    def red(self) -> list[Difference]:
        """What differs, gradients first, each in the order of the model."""
        return [one for one in self if one.red]


def compare(notes: Notes, references: References) -> Compared:
    """Compares what the ranks have noted with the reference."""
    found = Compared()
    exact, repeats = references.exact, references.repeats
    start = {name: notes.start[name] for name in exact.weights}
    found.gradients = _tensors("gradient", notes, exact.gradients, [one.gradients for one in repeats], None)
    found.weights = _tensors("weight", notes, exact.weights, [one.weights for one in repeats], start)
    found.norms = list(_norms(notes, references))
    for number, loss in enumerate(exact.losses[: len(notes.losses)]):
        if math.isnan(loss):
            continue  # a manual optimization that returns none
        noise = max(abs(one.losses[number] - loss) for one in repeats)
        off, size = abs(notes.losses[number] - loss), abs(loss)
        found.losses.append(Difference("loss", f"step {number + 1}", off, size, max(noise, _EPSILON * size)))
    _liveness(found, notes, exact)
    context = notes.said("mesh").get("context", 1)
    if context > 1 and not any(
        said["attentions"] for said in notes.ranks
    ):  # each rank computed all of it: right, and not what was asked
        text = f"context {context}: no attention was computed over the ranks, each had whole sequences"
        found.wrong.append(f"{text}; context parallelism was never switched on")
    if notes.said("expert") > 1 and not any(said["mixtures"] for said in notes.ranks):
        found.wrong.append(f"expert {notes.said('expert')}: no mixture is divided, each rank has all experts")
    for rank in notes.other_batches:
        found.wrong.append(f"rank {rank} is of one replica with another rank, and got other batches")
    if notes.said("unlike"):
        text = f"the layout does not begin with the weights that rank 0 has built: {flat(notes.said('unlike'))}"
        found.wrong.append(text)
    for rank, said in enumerate(notes.ranks):
        others = [name for name in said["others"]["start"] if name in exact.weights]
        if others:
            found.wrong.append(f"rank {rank} does not begin with rank 0's weights: {flat(others)}")
    return found


def _tensors(
    kind: Literal["gradient", "weight"], notes: Notes, exact: Tensors, repeats: list[Tensors], start: Tensors | None
) -> list[Difference]:
    """Each parameter of rank 0, and those that other ranks have otherwise.

    A single number may be lucky in all repeats: the noise of a parameter is at least that of the median one, relative
    to its size, and what float32 can tell apart.
    """
    sizes = {n: _norm(one - start[n].double() if start is not None else one) for n, one in _double(exact).items()}
    noises = {n: max(_apart(run.get(n), exact[n]) for run in repeats) for n in exact}
    usual = statistics.median([noises[n] / sizes[n] for n in exact if sizes[n]] or [0.0])
    what = "gradients" if kind == "gradient" else "weights"
    found = []
    for rank in range(len(notes.ranks)):
        tensors = notes.of_rank(rank, what)
        names = [*exact, *(n for n in tensors if n not in exact)] if rank == 0 else notes.ranks[rank]["others"][what]
        for name in names:
            if name not in exact:  # a gradient that one process does not have: zeros, unless it is more
                off = _norm(tensors[name])
                found += [Difference(kind, name, off, 0.0, 0.0, rank)] if off else []
                continue
            noise = max(noises[name], usual * sizes[name], _EPSILON * _norm(exact[name]))
            found.append(Difference(kind, name, _apart(tensors.get(name), exact[name]), sizes[name], noise, rank))
    return found


def _norms(notes: Notes, references: References) -> Iterator[Difference]:
    """The norm that each rank clips by."""
    true = references.exact.norm
    noise = max(abs(one.norm - true) for one in references.repeats)
    for rank, said in enumerate(notes.ranks):
        if "clipped_by" in said:
            # Found by a division: a few units in the last place of float32 more.
            noise = max(noise, 4 * _EPSILON * true)
            yield Difference("clipping norm", f"rank {rank}", abs(said["clipped_by"] - true), true, noise, rank)


def _liveness(found: Compared, notes: Notes, exact: Trained) -> None:
    """Two dead models would agree."""
    trainable = [name for name in notes.said("trainable") if name in exact.weights]
    sides = [
        ("the layout", notes.said("gradients"), notes.said("weights"), notes.losses),
        ("one process", exact.gradients, exact.weights, exact.losses),
    ]
    still: dict[str, list[str]] = {}
    for side, gradients, weights, losses in sides:
        if not any(_norm(one) for one in gradients.values()):
            found.wrong.append(f"no gradient at all in {side}")
        still[side] = [n for n in trainable if torch.equal(weights[n].double(), notes.start[n].double())]
        if trainable and len(still[side]) == len(trainable):
            found.wrong.append(f"no weight moves in {side}")
        finite = [loss for loss in losses if math.isfinite(loss)]
        if len(finite) > 1 and max(finite) - min(finite) <= 2 * _EPSILON * max(map(abs, finite)):
            found.wrong.append(f"the loss does not move in {side}")
    found.still = [n for n in trainable if n in still["the layout"]]
    found.moved = len(trainable) - len(found.still)


def _double(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum().sqrt())


def _apart(one: torch.Tensor | None, other: torch.Tensor) -> float:
    return _norm(other if one is None else one.double() - other.double())
