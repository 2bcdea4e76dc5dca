"""The same job in one process: in float64, in float32, and with its samples in another order."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast
from unittest.mock import patch

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from fairlead.errors import ConfigError, FairleadError
from fairlead_distributed.parallel.pipeline.micro_batches import cut
from fairlead_distributed.rng import seeded_states
from fairlead_lightning.verify.batches import NotOneBatchError, joined, shuffled
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import CLOSE, Rates, Tensors, dot, fitted, identical, wide
from fairlead_lightning.verify.one_process import Batches, GlobalBatch, OtherSeeds, PartByPart, stand_in, threads
from fairlead_lightning.verify.probe import ReferenceProbe, Trained
from fairlead_lightning.verify.samples import Reading, read_epochs

_CLOSE: Final = 1e-6


def comparable(notes: Notes, alone: Rates) -> Rates | None:
    """The rates of all ranks, where they are the same and belong to the same groups as in one process."""
    own: Rates = notes.fact("rates")
    same = all(rank["rates"] == own for rank in notes.ranks)
    fits = len(own) == len(alone) and all(len(a) == len(b) for a, b in zip(own, alone, strict=True))
    return own if same and fits else None


def alike(one: Rates | None, other: Rates) -> bool:
    """Whether they are the same rates."""
    if one is None or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(len(a) == len(b) and all(map(_close, a, b)) for a, b in pairs)


def by_rule(own: Rates, alone: Rates, counts: Sequence[int]) -> bool:
    """Whether each group has one factor in all steps: 1, a number of ranks or its root, or one through it."""
    known = [factor for count in counts for factor in (count, math.sqrt(count), 1 / count, 1 / math.sqrt(count))]
    for pairs in zip(*(zip(a, b, strict=True) for a, b in zip(own, alone, strict=True)), strict=True):
        if not any(all(_close(a, b * factor) for a, b in pairs) for factor in (1.0, *known)):
            return False
    return True


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=0.0)


@contextmanager
def seeing_world_size(ranks: int) -> Iterator[None]:
    """Code inside that reads the number of ranks gets this one, as rank 0."""
    with ExitStack() as stack:
        for name in ("world_size", "num_devices"):
            stack.enter_context(patch.object(L.Trainer, name, ranks))
        stack.enter_context(patch.object(dist, "is_initialized", lambda: True))
        stack.enter_context(patch.object(dist, "get_world_size", lambda group=None: ranks))
        stack.enter_context(patch.object(dist, "get_rank", lambda group=None: 0))
        stack.enter_context(patch.dict(os.environ, {"WORLD_SIZE": str(ranks), "RANK": "0"}))
        yield


def shown(rates: Rates) -> str:
    """Those of the first group of each step, or one where they are the same.

    Example:
        >>> shown([[0.1], [0.1]]), shown([[0.1], [0.2]])
        ('0.1', '0.1, 0.2')
    """
    first = [f"{one[0]:.4g}" for one in rates if one]
    return first[0] if len(set(first)) == 1 else ", ".join(first)


BOUND: Final = 1e-3
"""The largest distance, relative to a gradient or to how far a weight moved, that can be rounding of float32."""
EPSILON: Final = torch.finfo(torch.float32).eps
_RESOLVED: Final = 30
"""An element of a gradient that is not so many times its own noise has no sign that float32 could tell."""


def resolved(name: str, exact: Tensors, repeats: Sequence[Tensors]) -> Tensor | None:
    """Which elements of a gradient float32 can tell from zero; None: all of them.

    What it cannot tell are gradients that are zero by construction, such as that of a bias before a norm or of keys
    before a softmax: Adam makes steps of full size of their rounding.
    """
    if name not in exact:
        return None
    true = wide(exact[name])
    noise = torch.zeros_like(true)
    for one in repeats:
        if name in one:
            noise = torch.maximum(noise, (wide(one[name]) - true).abs())
    lost = (noise > 0) & (true.abs() <= _RESOLVED * noise)
    return ~lost if bool(lost.any()) else None


def require_little_noise(exact: Any, runs: Sequence[Any], notes: Notes) -> None:
    """Raises where what float32 does to a gradient, a weight or a loss is more than rounding.

    Raises:
        ConfigError: A fault of that size could not be seen.
    """
    gradients = [one.gradients for one in runs]
    masks = {name: resolved(name, exact.gradients, gradients) for name in exact.gradients}
    unresolved = sum(int((~mask).sum()) for mask in masks.values() if mask is not None)
    every = sum(one.numel() for one in exact.gradients.values())
    if unresolved > every / 2:
        raise _too_much("the gradients", f"{unresolved} of {every} elements are nothing but rounding", 1)
    for name, true in exact.gradients.items():
        worst, size = _worst(name, true, gradients, masks[name])
        if worst > BOUND * size:
            raise _too_much(f"the gradient of {name}", f"{worst / size if size else 1:.2g} of it", 1)
    for name, true in exact.weights.items():
        start = notes.start[name]
        worst, size = _worst(name, true, [one.weights for one in runs], masks.get(name), start)
        rounding = 4 * EPSILON * float(wide(true).square().sum().sqrt())
        if worst > max(BOUND * size, rounding):
            far = f"{worst / size if size else 1:.2g} of how far it moved"
            raise _too_much(f"the weight {name}", far, 2)
    for number, loss in enumerate(exact.losses):
        worst = max(abs(one.losses[number] - loss) for one in runs)
        if worst > BOUND * max(abs(loss), abs(exact.losses[0])):
            raise _too_much(f"the loss of step {number + 1}", f"{worst:.2g} for {loss:.4g}", number + 1)


def _worst(
    name: str, true: Tensor, runs: Sequence[Tensors], mask: Tensor | None, start: Tensor | None = None
) -> tuple[float, float]:
    keep = mask if mask is not None else torch.ones_like(wide(true), dtype=torch.bool)
    exact = wide(true)
    size = exact - wide(start) if start is not None else exact
    off = [(wide(one[name]) - exact)[keep] for one in runs if name in one]
    return max(float(one.square().sum().sqrt()) for one in off), float(size[keep].square().sum().sqrt())


def _too_much(what: str, far: str, step: int) -> ConfigError:
    since = "its gradients" if step == 1 else f"weights from step {step} on"
    return ConfigError(
        f"the job cannot be verified: no fault can be seen in {since}",
        where="model",
        why=f"float32 alone changes {what} by {far}, in one process and with the samples in another order: that is "
        "no rounding, and would hide a fault of that size",
        fix="verify at a lower learning rate (--set model.args.lr=...), with fewer --steps, or a model whose loss does "
        "not jump; random numbers of the model's own look like this, too",
    )


_SEED = 20_231
_RANDOM = 1e-5
"""Two trainings in float64 that differ by more, relative to the full gradient, do not differ by rounding."""


class Build(Protocol):
    """How the job's objects are made, each time anew."""

    def model(self) -> L.LightningModule:
        """The model, as the job has it."""

    def data(self) -> L.LightningDataModule | None:
        """The job's datamodule, for a model that asks its trainer for it."""

    def trainer(self, precision: str, accumulate: int, steps: int, callbacks: Sequence[L.Callback]) -> L.Trainer:
        """A Trainer for one process with the job's settings."""


@dataclass
class References:
    """The trainings in one process that a layout is compared with.

    Attributes:
        exact: In float64, or in float32 where the model does not run in float64.
        repeats: In float32: as it is, then with the samples of each batch in another order.
        by_replica: Whether the batches of the replicas were taken one after the other, not put together.
        remarks: What was found about the model on the way.
        alone: The batches that one process reads from the user's own loader; None where it is unknown.
        epochs: What it reads in an epoch, of each loader.
        rates: Why it was trained with the learning rates of the layout; empty: it was not.
    """

    exact: Trained
    repeats: list[Trained]
    by_replica: bool = False
    remarks: list[str] = field(default_factory=list)
    alone: list[Any] | None = None
    epochs: list[Reading] | None = None
    rates: str = ""


class Reference:
    """Trains a job in one process, on the batches and from the weights that the ranks of a layout have noted.

    Args:
        dim: The dimension of the samples, along which the batches of replicas are put together; None: they never are.
    """

    def __init__(self, build: Build, notes: Notes, dim: int | None = 0) -> None:
        self._build = build
        self._notes = notes
        self._dim = dim
        self._loader: Any = None
        self._read: list[Reading] | None = None
        self._rates: Rates | None = None
        self._why_rates = ""
        self._parts: dict[int, dict[tuple[int, int, int], Tensors]] = {}

    def measure(self, repeats: int, *, why_by_replica: str = "") -> References:
        """The reference, and how far float32 alone moves it.

        Args:
            repeats: Trainings in float32 that show it.
            why_by_replica: Why the batches of the replicas are to be taken one after the other.

        Raises:
            ConfigError: The model draws random numbers, or float32 does not determine what it does.
        """
        remarks: list[str] = []
        batches = self._batches(remarks, why_by_replica)
        try:
            plain = self._train(batches, "32-true")
        except FairleadError:
            raise
        except Exception as error:
            if len(batches[0]) > 1 or self._notes.replicas == 1 or not self._notes.fact("automatic"):
                raise
            why = f"a step on the batches of all replicas, put together, fails ({type(error).__name__}: {error!s:.80})"
            return self.measure(repeats, why_by_replica=why)
        by_replica = len(batches[0]) > 1
        precision = "64-true"
        try:
            exact = self._train(batches, precision)
        except (RuntimeError, TypeError, ValueError) as error:
            remarks.append(
                f"the model does not run in float64 ({str(error).splitlines()[0]:.80}): compared with float32"
            )
            exact, precision = plain, "32-true"
        self._require_no_randomness(batches, precision, exact)
        order = [[shuffled_batch(part, 0) for part in step] for step in batches]
        permuted = all(part is not None for step in order for part in step)
        if permuted and apart(self._train(order, precision, steps=1).gradients, exact.gradients) > _RANDOM:
            remarks.append("the loss depends on the order of the samples in a batch: noise was measured in one order")
            permuted = False
        runs = [plain]
        for number in range(1, repeats + 1):
            other = [[shuffled_batch(part, number) for part in step] for step in batches] if permuted else batches
            with threads(1 + number % 2):
                # In one order, weights that are rounded otherwise show as much.
                start = None if permuted else _rounded_otherwise(self._notes.start, number)
                runs.append(self._train(other, "32-true", start=start))
        found = References(exact, runs, by_replica, remarks, self._alone(), self._epochs(), self._why_rates)
        require_little_noise(exact, runs, self._notes)
        return found

    def why_not_joined(self, references: References) -> str:
        """Why batches that were put together say nothing: their gradient is not a sum of the replicas' gradients."""
        notes = self._notes
        if references.by_replica or notes.replicas == 1 or not notes.fact("automatic"):
            return ""
        _, off = fitted(references.exact.gradients, self.parts())
        if off < CLOSE:
            return ""
        return (
            "the replicas' batches, put together along dimension 0, are no sum of their parts: their samples lie along "
            "another one (--batch-dim), or a layer or the loss depends on the full batch of a replica"
        )

    def take_rates(self, alone: Rates) -> bool:
        """Trains with the learning rates of the layout from now on, where they are made of the number of ranks.

        Args:
            alone: The rates of one process.

        Returns:
            Whether they are; else nothing has changed.
        """
        notes = self._notes
        own, ranks = comparable(notes, alone), notes.fact("world_size")
        if own is None:
            return False
        seen = alike(self._rates_as_on(ranks), own)
        if not seen and not by_rule(own, alone, [ranks, notes.replicas]):
            return False
        proof = f"one process that sees {ranks} ranks has them, too" if seen else "one factor in all steps"
        self._rates = own
        self._why_rates = (
            f"learning rates are {shown(own)} on {ranks} ranks and {shown(alone)} in one process, made of the number "
            f"of ranks ({proof}): one process was trained with those of the ranks"
        )
        return True

    def _rates_as_on(self, ranks: int) -> Rates | None:
        """The rates of one process whose `configure_optimizers` sees so many ranks; None: it does not run so."""
        try:
            return self._train(self._batches([]), "32-true", world_size=ranks).rates
        except Exception:  # the user's code, in a world that is not there: no explanation
            return None

    def parts(self, count: int = 1) -> dict[tuple[int, int, int], Tensors]:
        """The first step's gradient of each (batch of a step, replica, micro-batch) alone.

        Args:
            count: Into how many micro-batches a batch is cut; none of them where one cannot be cut so.
        """
        if count not in self._parts:
            found = {}
            for replica, batches in enumerate(self._notes.batches):
                for number in range(min(self._notes.accumulate, len(batches))):
                    for at, piece in enumerate(_micro_batches(batches[number], count)):
                        trained = self._train([[piece]], "64-true", steps=1, accumulate=1)
                        found[number, replica, at] = trained.gradients
            self._parts[count] = found
        return self._parts[count]

    def after(self, steps: int) -> Trained:
        """The same training in float64, with fewer steps."""
        return self._train(self._batches([]), "64-true", steps=steps)

    def with_start(self, factors: Mapping[str, float]) -> Tensors:
        """The first step's gradients, had some of the weights been a multiple of what they are."""
        scaled = {name: one * factors.get(name, 1.0) for name, one in self._notes.start.items()}
        return self._train(self._batches([]), "64-true", steps=1, start=scaled).gradients

    def _require_no_randomness(self, batches: Sequence[GlobalBatch], precision: str, exact: Trained) -> None:
        """A repeated training has the same bits; with other seeds, too."""
        reasons = (
            "two trainings in one process with the same seeds, order and precision differ: it has a generator of its "
            "own, or reads a clock or anything else that changes",
            "two trainings in one process differ when the seeds are others",
        )
        for seed, why in zip((_SEED, _SEED + 1), reasons, strict=True):
            other = self._train(batches, precision, seed=seed)
            if self._the_same(exact, other):
                continue
            with threads(1):  # some sums over threads have no order, such as those of index_put on a CPU
                exact_repeat, other = self._train(batches, precision), self._train(batches, precision, seed=seed)
            if self._the_same(exact_repeat, other):
                continue
            if not identical(exact_repeat.gradients, other.gradients):
                when = ""
            else:
                steps = [
                    i for i, pair in enumerate(zip(exact_repeat.losses, other.losses, strict=True)) if _unlike(*pair)
                ]
                when = f", from step {steps[0] + 1} on" if steps else ", after the first step"
            raise ConfigError(
                f"the model cannot be verified: it draws random numbers in its training step{when}",
                where="model",
                why=why,
                fix="switch that off for the verification, as --set model.args.dropout=0; rates of dropout that are "
                "attributes of a layer are set to 0 already",
            )

    def _the_same(self, one: Trained, other: Trained) -> bool:
        if self._notes.start and all(not tensor.is_cuda for tensor in one.weights.values()) and not _on_device():
            bits = identical(one.gradients, other.gradients) and identical(one.weights, other.weights)
            return bits and not any(_unlike(*pair) for pair in zip(one.losses, other.losses, strict=True))
        close = apart(one.gradients, other.gradients) < _RANDOM  # a GPU's sums have no order
        return close and all(math.isclose(a, b, rel_tol=_RANDOM) for a, b in zip(one.losses, other.losses, strict=True))

    def _each(self) -> list[GlobalBatch]:
        return [list(step) for step in zip(*self._notes.batches, strict=True)]

    def _batches(self, remarks: list[str], why: str = "") -> list[GlobalBatch]:
        """Put together, or those of all replicas for each step with a remark why."""
        notes = self._notes
        every = self._each()
        if notes.replicas == 1:
            return every
        if not why and self._dim is None:
            why = "as --batch-dim none asks for"
        local = notes.fact("batch_norms")
        if not why and local:
            why = f"batch norm computes over the batch of each replica ({local[0]}); layer_sync would make it one"
        if not why:
            try:
                return [[joined(step, dim=self._dim or 0)] for step in every]
            except NotOneBatchError as error:
                why = f"the batches of the replicas cannot be put together ({error})"
        if not notes.fact("automatic"):
            raise ConfigError(
                "the job cannot be verified",
                where="model",
                why=f"{why}, and a manual optimization cannot be trained replica by replica",
                fix="layer_sync: torch_sync_batchnorm; or batches of one shape",
            )
        remarks.append(f"{why}: compared replica by replica, not with joined batches")
        self._dim = None  # from now on
        return every

    def _train(
        self,
        batches: Sequence[GlobalBatch],
        precision: str,
        *,
        seed: int = _SEED,
        steps: int | None = None,
        accumulate: int | None = None,
        start: Tensors | None = None,
        world_size: int = 0,
    ) -> Trained:
        notes = self._notes
        count = accumulate or notes.accumulate
        L.seed_everything(_SEED, workers=True, verbose=False)
        model, data = self._build.model(), self._build.data()
        if precision == "64-true":  # Lightning leaves complex numbers as they are
            cast("Any", model)._apply(_as_complex128)
        probe = ReferenceProbe(notes.start if start is None else start, self._rates)
        if steps is not None:
            batches = batches[: steps * count]
        by_parts: list[L.Callback] = [PartByPart(batches)] if len(batches[0]) > 1 else []
        trainer = self._build.trainer(precision, count, steps or notes.fact("max_steps"), [*by_parts, probe])
        for owner in (model, data):
            if owner is not None and is_overridden("on_before_batch_transfer", owner):
                vars(owner)["on_before_batch_transfer"] = _unchanged  # the batches are noted behind it
        if world_size:
            vars(model)["configure_optimizers"] = _seeing_world_size(model.configure_optimizers, world_size)
        self._replace_loader(model, data, batches)
        L.seed_everything(seed, workers=True, verbose=False)
        others = OtherSeeds(seed) if seed != _SEED else nullcontext()
        if isinstance(others, OtherSeeds):
            others.of_module(model)
        with others:
            if data is None and not is_overridden("train_dataloader", model):
                trainer.fit(model, train_dataloaders=Batches(batches, notes.fact("length")))
            else:
                trainer.fit(model, datamodule=data)
        seen = probe.seen
        seen.losses = [sum(seen.losses[i : i + count]) for i in range(0, len(seen.losses), count)]
        return seen

    def _replace_loader(self, model: Any, data: Any, batches: Sequence[GlobalBatch]) -> None:
        """The user's own is made as always, and gives the noted batches."""
        owner = data if data is not None and is_overridden("train_dataloader", data) else model
        if not is_overridden("train_dataloader", owner):
            return
        vars(owner).pop("train_dataloader", None)
        real = owner.train_dataloader

        def train_dataloader() -> Any:
            self._loader = real()
            return stand_in(batches, self._notes.fact("length"), self._loader)

        vars(owner)["train_dataloader"] = train_dataloader

    def _alone(self) -> list[Any] | None:
        """As many batches as the layout has read, by the user's own loader in this one process."""
        loader = self._loader
        if not isinstance(loader, torch.utils.data.DataLoader):
            return None
        alone: Any = object.__new__(type(loader))
        vars(alone).update(vars(loader))
        vars(alone).update(num_workers=0, timeout=0, prefetch_factor=None, persistent_workers=False, _iterator=None)
        found = []
        for batch in alone:
            found.append(batch)
            if len(found) == self._notes.replicas * len(self._notes.batches[0]):
                break
        return found

    def _epochs(self) -> list[Reading] | None:
        """What the user's own loader reads in an epoch in this one process."""
        if self._loader is None or self._read is not None:
            return self._read
        layout = [rank["read"] for rank in self._notes.ranks]

        def gather(own: list[Any]) -> list[list[Any]]:
            return [own, *([one.dataset for one in rank] for rank in layout)]

        self._read = read_epochs(self._loader, [seeded_states(seed) for seed in (_SEED, _SEED + 1)], gather)
        return self._read


def _micro_batches(batch: Any, count: int) -> list[Any]:
    """As a pipeline has cut it; none of them where it cannot be cut so."""
    try:
        return cut(batch, count)
    except ConfigError:
        return []


def _seeing_world_size(configure: Callable[[], Any], ranks: int) -> Callable[[], Any]:
    @functools.wraps(configure)
    def configured() -> Any:
        with seeing_world_size(ranks):
            return configure()

    return configured


def _as_complex128(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor


def _on_device() -> bool:
    return torch.accelerator.is_available()


def _unlike(one: float, other: float) -> bool:
    return one != other and not (math.isnan(one) and math.isnan(other))


def _rounded_otherwise(start: Tensors, seed: int) -> Tensors:
    """Weights that differ by half a unit in the last digit, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
        return tensor * (1 + sign * torch.finfo(torch.float32).eps)

    return {name: other(tensor) for name, tensor in start.items()}


def _unchanged(batch: Any, dataloader_idx: int) -> Any:
    return batch


def shuffled_batch(batch: Any, seed: int) -> Any:
    """The batch with its samples in another order, the same at each call."""
    return shuffled(batch, torch.Generator().manual_seed(seed))


def apart(one: Tensors, other: Tensors) -> float:
    """How far two gradients are apart, relative to the second, as one vector."""
    both: Iterable[str] = one.keys() & other.keys()
    size = math.sqrt(dot(other, other))
    off = math.sqrt(sum(float((wide(one[name]) - wide(other[name])).square().sum()) for name in both))
    return off / size if size else off
