"""The layout's numbers against the reference's, each within a multiple of the noise that was measured for it.

Copies of one tensor on several ranks are compared bit by bit, whatever the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from fairlead_lightning.verify.neutral import flat
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import Tensors, distance, norm, wide
from fairlead_lightning.verify.probe import Trained
from fairlead_lightning.verify.reference import BOUND, EPSILON, References, resolved
from fairlead_lightning.verify.samples import other_datasets, read_twice, repeats, unlike_one_process

MULTIPLE: Final = 10
"""A difference of more than so many times the noise is one."""
_LENT: Final = 1e-5
"""The most noise, relative to its size, that a tensor is given because others have it."""
FIRST_STEP: Final = "step 1"
Kind = Literal[
    "gradient",
    "gradient of the optimizer",
    "clipping norm",
    "weight after step 1",
    "optimizer state",
    "learning rate",
    "weight",
    "buffer",
    "loss",
]


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
        copy: It is compared with rank 0's copy, not with one process.
        zero: By construction, so that what there is of it is rounding: its size says nothing.
    """

    kind: Kind
    name: str
    off: float
    size: float
    noise: float
    rank: int = 0
    copy: bool = False
    zero: bool = False

    @property
    def ratio(self) -> float:
        """How many times the noise."""
        return self.off / self.noise if self.noise else (math.inf if self.off else 0.0)

    @property
    def red(self) -> bool:
        """Whether it is more than rounding; a number that is not finite is."""
        return not self.ratio <= MULTIPLE

    @property
    def void(self) -> bool:
        """A weight that moves by less than float32 could tell: that it does not differ says nothing."""
        return self.kind.startswith("weight") and not self.copy and 0 < self.size <= MULTIPLE * self.noise

    @property
    def relative(self) -> float:
        """The distance relative to the reference."""
        return self.off / self.size if self.size else (math.inf if self.off else 0.0)


@dataclass
class Compared:
    """All that was compared, in the order of the model.

    Attributes:
        wrong: What is wrong whatever the numbers say: dead models, ranks of one replica that got different batches.
        still: Parameters that are to be trained and did not move in the layout.
        local: Buffers that hold statistics of one rank's batches, and differ.
        zero: Parameters whose gradient, or a part of it, is zero by construction.
        loose: Buffers that float32 does not determine.
        unread: Why it is not known which samples an epoch has; empty where it is.
    """

    gradients: list[Difference] = field(default_factory=list)
    applied: list[Difference] = field(default_factory=list)
    norms: list[Difference] = field(default_factory=list)
    first: list[Difference] = field(default_factory=list)
    state: list[Difference] = field(default_factory=list)
    rates: list[Difference] = field(default_factory=list)
    weights: list[Difference] = field(default_factory=list)
    buffers: list[Difference] = field(default_factory=list)
    losses: list[Difference] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    unread: str = ""
    moved: int = 0

    def __iter__(self) -> Iterator[Difference]:
        early = [one for one in self.rates if one.name == FIRST_STEP]
        late = [one for one in self.rates if one.name != FIRST_STEP]
        yield from (*self.gradients, *self.norms, *self.applied, *early, *self.first, *late)
        yield from (*self.weights, *self.state, *self.buffers, *self.losses)

    @property
    def red(self) -> list[Difference]:
        """What differs: the earlier in a step first, gradients in the order of the model, later ones by their share."""
        found = [one for one in self if one.red]
        kinds = list(dict.fromkeys(one.kind for one in found))
        ordered = ("gradient", "clipping norm", "loss", "learning rate")

        def position(one: Difference) -> tuple[int, float]:
            return kinds.index(one.kind), 0.0 if one.kind in ordered else -one.relative

        return sorted(found, key=position)


def compare(notes: Notes, references: References) -> Compared:
    """Compares what the ranks have noted with the reference."""
    found = Compared()
    exact, repeats = references.exact, references.repeats
    start = {name: notes.start[name] for name in exact.weights}
    gradients = [one.gradients for one in repeats]
    masks = {name: resolved(name, exact.gradients, gradients) for name in exact.gradients}
    found.zero = [name for name, mask in masks.items() if mask is not None]
    of = _Tensors(notes, {name: mask for name, mask in masks.items() if mask is not None})
    found.gradients = of.compared("gradient", "gradients", exact.gradients, gradients)
    if notes.fact("knows_applied"):
        applied = [one.applied for one in repeats]
        found.applied = of.compared("gradient of the optimizer", "applied", exact.applied, applied)
    found.first = of.compared("weight after step 1", "first", exact.first, [r.first for r in repeats], start)
    found.weights = of.compared("weight", "weights", exact.weights, [r.weights for r in repeats], start)
    if exact.state is not None and all(rank["knows_state"] for rank in notes.ranks):
        found.state = of.compared("optimizer state", "state", exact.state, [r.state or {} for r in repeats])
    found.norms = list(_norms(notes, references))
    found.rates = list(_rates(notes, exact)) if not references.rates else []
    found.buffers = list(_buffers(notes, references, found.local, found.loose))
    for number, loss in enumerate(exact.losses[: len(notes.losses)]):
        if math.isnan(loss):
            continue  # a manual optimization that returns none
        noise = max(abs(one.losses[number] - loss) for one in repeats)
        off, size = abs(notes.losses[number] - loss), abs(loss)
        found.losses.append(Difference("loss", f"step {number + 1}", off, size, max(noise, EPSILON * size)))
    _liveness(found, notes, exact)
    context = notes.fact("mesh").get("context", 1)
    if context > 1 and not any(
        notes_of_rank["attentions"] for notes_of_rank in notes.ranks
    ):  # each rank computed all of it: right, and not what was requested
        text = f"context {context}: no attention was computed over the ranks, each had full sequences"
        found.wrong.append(f"{text}; context parallelism was never switched on")
    if notes.fact("expert") > 1 and not any(notes_of_rank["mixtures"] for notes_of_rank in notes.ranks):
        found.wrong.append(f"expert {notes.fact('expert')}: no mixture is divided, each rank has all experts")
    for rank in notes.other_batches:
        found.wrong.append(f"rank {rank} is of one replica with another rank, and got other batches")
    _samples(found, notes, references)
    if notes.fact("unlike"):
        text = f"the layout does not begin with the weights that rank 0 has built: {flat(notes.fact('unlike'))}"
        found.wrong.append(text)
    for rank, notes_of_rank in enumerate(notes.ranks):
        others = [name for name in notes_of_rank["others"]["start"] if name in exact.weights]
        if others:
            found.wrong.append(f"rank {rank} does not begin with rank 0's weights: {flat(others)}")
    return found


class _Tensors:
    """Compares one kind of tensors after the other; of each parameter only what float32 determines."""

    def __init__(self, notes: Notes, masks: dict[str, Tensor]) -> None:
        self._notes = notes
        self._masks = masks

    def compared(
        self, kind: Kind, what: str, exact: Tensors, repeats: Sequence[Tensors], start: Tensors | None = None
    ) -> list[Difference]:
        """Each tensor of rank 0, and those that other ranks have otherwise.

        A single number may be lucky in all repeats: the noise of a tensor is at least that of the median one relative
        to its size, but never more than very little of its size for that, and what float32 can tell apart.
        """
        notes = self._notes
        # Gradients are compared in full: what is rounding in them is as large in the repeats.
        by_elements = not kind.startswith("gradient")
        masks = {name: self._mask(name) if by_elements else None for name in exact}
        cut = {n: _cut(wide(one), masks[n]) for n, one in exact.items()}
        sizes = {n: norm(cut[n] - _cut(wide(start[n]), masks[n]) if start is not None else cut[n]) for n in exact}
        noises = {
            n: max((norm(_cut(wide(run[n]), masks[n]) - cut[n]) for run in repeats if n in run), default=0.0)
            for n in exact
        }
        zero = {name for name in exact if not by_elements and self._is_zero(name)}
        shares = [noises[n] / sizes[n] for n in exact if sizes[n] and n not in zero]
        usual = min(statistics.median(shares or [0.0]), _LENT)
        found = []
        tensors = self._tensors(0, what, exact)
        for name in [*exact, *(n for n in tensors if n not in exact)]:
            if name not in exact:  # a gradient that one process does not have: zeros, unless it is more
                off = norm(tensors[name])
                found += [Difference(kind, name, off, 0.0, 0.0)] if off else []
                continue
            floor = max(usual * sizes[name], EPSILON * norm(cut[name]))
            noise = max(noises[name], floor)
            if kind == "optimizer state" and sizes[name]:
                noise = max(min(noise, BOUND * sizes[name]), floor)
            if by_elements and not cut[name].numel():
                continue
            if kind == "optimizer state" and name not in tensors and self._holds(tensors, name):
                continue  # a count of an expert's steps, which its ranks alone have
            off = self._off(tensors.get(name), cut[name], masks[name])
            found.append(Difference(kind, name, off, sizes[name], noise, zero=name in zero))
        for rank in range(1, len(notes.ranks)):
            found += self._of_rank(rank, kind, what, exact, {f.name: f for f in found if not f.rank})
        return found

    def _of_rank(
        self, rank: int, kind: Kind, what: str, exact: Tensors, first: dict[str, Difference]
    ) -> Iterator[Difference]:
        """Copies that differ from rank 0's: of gradients within the noise, of stored tensors bit by bit."""
        notes = self._notes
        tensors, base = self._tensors(rank, what, exact), self._tensors(0, what, exact)
        for name in notes.ranks[rank]["others"][what]:
            if name not in tensors:
                continue
            if name not in exact:
                off = norm(tensors[name])
                yield from [Difference(kind, name, off, 0.0, 0.0, rank)] if off else []
            elif kind.startswith("gradient"):
                one = first[name]
                off = distance(tensors[name], exact[name])
                yield Difference(kind, name, off, one.size, one.noise, rank, zero=one.zero)
            elif name in base:
                size = first[name].size if name in first else norm(base[name])
                yield Difference(kind, name, distance(tensors[name], base[name]), size, 0.0, rank, copy=True)

    def _tensors(self, rank: int, what: str, exact: Tensors) -> Tensors:
        """Those of a rank; of what optimizers get those that are in an optimizer."""
        found = self._notes.of_rank(rank, what)
        return {name: one for name, one in found.items() if name in exact} if what == "applied" else found

    def _off(self, tensor: Tensor | None, exact: Tensor, mask: Tensor | None) -> float:
        if tensor is None:
            return norm(exact)
        own = wide(tensor)
        if mask is None and own.shape != exact.shape:
            return math.inf
        return norm(_cut(own, mask) - exact)

    def _mask(self, name: str) -> Tensor | None:
        """That of the parameter whose tensor this is: itself, or what an optimizer holds for it."""
        mask = self._masks.get(name.rpartition(" of ")[2])
        if mask is None or " of " not in name:
            return mask
        held = self._notes.fact("state").get(name)
        return mask if held is not None and wide(held).shape == mask.shape else None

    def _holds(self, tensors: Tensors, name: str) -> bool:
        parameter = name.partition(" of ")[2]
        return name.startswith("step of ") and any(other.endswith(f" of {parameter}") for other in tensors)

    def _is_zero(self, name: str) -> bool:
        mask = self._masks.get(name)
        return mask is not None and not bool(mask.any())


def _cut(tensor: Tensor, mask: Tensor | None) -> Tensor:
    return tensor if mask is None else tensor[mask]


def _norms(notes: Notes, references: References) -> Iterator[Difference]:
    """The norm that each rank clips by."""
    true = references.exact.norm
    noise = max(abs(one.norm - true) for one in references.repeats)
    for rank, notes_of_rank in enumerate(notes.ranks):
        if "clipped_by" in notes_of_rank:
            # Found by a division: a few units in the last digit of float32 more.
            noise = max(noise, 4 * EPSILON * true)
            yield Difference(
                "clipping norm", f"rank {rank}", abs(notes_of_rank["clipped_by"] - true), true, noise, rank
            )


def _rates(notes: Notes, exact: Trained) -> Iterator[Difference]:
    """The learning rate of each step, of each rank that has another than the first one with its groups."""
    for rank, notes_of_rank in enumerate(notes.ranks):
        if rank and notes_of_rank["rates"] == notes.ranks[0]["rates"]:
            continue
        for number, (own, true) in enumerate(zip(notes_of_rank["rates"], exact.rates, strict=False)):
            if len(own) != len(true):
                continue  # groups of a stage's parameters
            off = math.dist(own, true)
            size = math.hypot(*true)
            yield Difference("learning rate", f"step {number + 1}", off, size, 8 * EPSILON * size, rank)


def _buffers(notes: Notes, references: References, local: list[str], loose: list[str]) -> Iterator[Difference]:
    """Buffers at the end: rank 0's against one process, the others' against rank 0's bit by bit.

    What batch norms keep of the batches of a rank differs on purpose.
    """
    exact, base = references.exact.buffers, notes.of_rank(0, "buffers")
    on_purpose = set().union(*(rank["local_buffers"] for rank in notes.ranks))
    for rank in range(len(notes.ranks)):
        own = base if rank == 0 else notes.ranks[rank]["others"]["buffers"]
        for name, tensor in own.items():
            if rank and name in base:
                if name in on_purpose and notes.ranks[rank]["replica"] != notes.ranks[0]["replica"]:
                    local += [name] if name not in local else []
                    continue
                yield Difference("buffer", name, distance(tensor, base[name]), norm(base[name]), 0.0, rank, copy=True)
                continue
            if name not in exact or tensor.shape != exact[name].shape:
                continue  # a module that is built otherwise when it is split
            if name in on_purpose:
                local += [name] if name not in local else []
                continue
            true = exact[name]
            noise = max((distance(one.buffers.get(name), true) for one in references.repeats), default=0.0)
            size = norm(true)
            if noise > BOUND * size:  # such as a running mean behind a bias that only rounding moves
                loose += [name]
                continue
            noise = max(noise, EPSILON * size)
            yield Difference("buffer", name, distance(tensor, true), size, noise, rank)


def _samples(found: Compared, notes: Notes, references: References) -> None:
    """Which samples are read, in the compared steps and in an epoch."""
    replicas = [rank["replica"] for rank in notes.ranks]
    found.wrong += other_datasets([rank["read"] for rank in notes.ranks], replicas)
    steps = list(read_twice(notes.batches, references.alone, notes.full_epoch, repeats(references.epochs)))
    first = [notes.ranks[replicas.index(replica)]["read"] for replica in sorted(set(replicas))]
    epoch, found.unread = unlike_one_process(first, references.epochs)
    # Orders that differ leave out samples, and read others twice: the epoch says both.
    missing = [one for one in epoch if one.startswith("samples are missing")]
    found.wrong += missing or steps or epoch


def _liveness(found: Compared, notes: Notes, exact: Trained) -> None:
    """Two dead models would agree."""
    trainable = [name for name in notes.fact("trainable") if name in exact.weights]
    sides = [
        ("the layout", notes.fact("gradients"), notes.fact("weights"), notes.losses),
        ("one process", exact.gradients, exact.weights, exact.losses),
    ]
    still: dict[str, list[str]] = {}
    for side, gradients, weights, losses in sides:
        if not any(norm(one) for one in gradients.values()):
            found.wrong.append(f"no gradient at all in {side}")
        still[side] = [n for n in trainable if torch.equal(wide(weights[n]), wide(notes.start[n]))]
        if trainable and len(still[side]) == len(trainable):
            found.wrong.append(f"no weight moves in {side}")
        finite = [loss for loss in losses if math.isfinite(loss)]
        if len(finite) > 1 and max(finite) - min(finite) <= 2 * EPSILON * max(map(abs, finite)):
            found.wrong.append(f"the loss does not move in {side}")
    found.still = [n for n in trainable if n in still["the layout"]]
    found.moved = len(trainable) - len(found.still)
