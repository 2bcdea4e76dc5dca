"""The same job in one process: in float64, in float32, and again with its samples in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from fairlead.errors import ConfigError
from fairlead_lightning.verify.batches import NotOneBatchError, detached, joined, pieces, shuffled
from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.probe import ReferenceProbe, Tensors

_SEED = 20_231
_RANDOM = 1e-5
"""Two trainings in float64 that differ by more, relative to the whole gradient, do not differ by rounding."""


class Build(Protocol):
    """How the job's objects are made, each time anew."""

    def model(self) -> L.LightningModule:
        """The model, as the job has it."""

    def data(self) -> L.LightningDataModule | None:
        """The job's datamodule, for a model that asks its trainer for it."""

    def trainer(self, precision: str, accumulate: int, steps: int, callback: L.Callback) -> L.Trainer:
        """A Trainer for one process with the job's settings."""


@dataclass
class Trained:
    """What one training in one process did."""

    gradients: Tensors
    losses: list[float]
    weights: Tensors

    @property
    def norm(self) -> float:
        """The norm of all gradients of the first step, before clipping."""
        return math.sqrt(sum(float(one.double().square().sum()) for one in self.gradients.values()))


@dataclass
class References:
    """The trainings in one process that a layout is compared with.

    Attributes:
        exact: In float64, or in float32 where the model does not run in float64.
        repeats: In float32: as it is, then with the samples of each batch in another order.
        by_replica: Whether the batches of the replicas were taken one after the other, not put together.
        said: What was found about the model on the way.
    """

    exact: Trained
    repeats: list[Trained]
    by_replica: bool = False
    said: list[str] = field(default_factory=list)


class Reference:
    """Trains a job in one process, on the batches and from the weights that the ranks of a layout have noted."""

    def __init__(self, build: Build, notes: Notes) -> None:
        self._build = build
        self._notes = notes

    def measure(self, repeats: int) -> References:
        """The reference, and how far float32 alone moves it.

        Raises:
            ConfigError: The model draws random numbers in its training step: nothing could be compared.
        """
        said: list[str] = []
        batches, by_replica = self._batches(said)
        precision = "64-true"
        plain = self._train(batches, "32-true", by_replica)
        try:
            exact = self._train(batches, precision, by_replica)
        except (RuntimeError, TypeError, ValueError) as error:
            said.append(f"the model does not run in float64 ({str(error).splitlines()[0]:.80}): compared with float32")
            exact, precision = plain, "32-true"
        order = [shuffled_batch(batch, 0) for batch in batches]
        again = self._train(batches, precision, by_replica, seed=_SEED + 1, steps=1)
        if apart(again.gradients, exact.gradients) > _RANDOM:
            raise ConfigError(
                "the model cannot be verified: it draws random numbers in its training step",
                where="model",
                why="two trainings in one process differ by more than rounding when the seed is another",
                fix="switch that off for the verification, as --set model.args.dropout=0; rates of dropout that are "
                "attributes of a layer are set to 0 already",
            )
        permuted = None not in order
        if permuted and apart(self._train(order, precision, by_replica, steps=1).gradients, exact.gradients) > _RANDOM:
            said.append("the loss depends on the order of the samples in a batch: noise was measured in one order")
            permuted = False
        runs = [plain]
        for number in range(1, repeats + 1):
            other = [shuffled_batch(batch, number) for batch in batches] if permuted else batches
            with threads(1 + number % 2):
                runs.append(self._train(other, "32-true", by_replica))
        return References(exact, runs, by_replica, said)

    def one_by_one(self) -> Trained:
        """The replicas' batches one after the other, each counting the same: the mean of their means."""
        batches = [batch for step in zip(*self._notes.batches, strict=True) for batch in step]
        return self._train(batches, "64-true", by_replica=True)

    def parts(self, count: int = 1) -> dict[tuple[int, int, int], Tensors]:
        """The first step's gradient of each (batch of a step, replica, micro-batch) alone.

        Args:
            count: Into how many micro-batches a batch is cut; none of them where one cannot be cut so.
        """
        found = {}
        for replica, batches in enumerate(self._notes.batches):
            for number in range(min(self._notes.accumulate, len(batches))):
                for at, piece in enumerate(pieces(batches[number], count) or ()):
                    found[number, replica, at] = self._train([piece], "64-true", steps=1, accumulate=1).gradients
        return found

    def after(self, steps: int) -> Trained:
        """The same training in float64, with fewer steps."""
        batches, by_replica = self._batches([])
        return self._train(batches, "64-true", by_replica, steps=steps)

    def with_start(self, factors: Mapping[str, float]) -> Tensors:
        """The first step's gradients, had some of the weights been a multiple of what they are."""
        plain = self._notes.start
        batches, by_replica = self._batches([])
        scaled = {name: one * factors.get(name, 1.0) for name, one in plain.items()}
        self._notes.start = scaled
        try:
            return self._train(batches, "64-true", by_replica, steps=1).gradients
        finally:
            self._notes.start = plain

    def _batches(self, said: list[str]) -> tuple[list[Any], bool]:
        notes = self._notes
        every = [list(step) for step in zip(*notes.batches, strict=True)]
        local = notes.said("batch_norms") if notes.replicas > 1 else []
        if not local:
            try:
                return [joined(step) if len(step) > 1 else step[0] for step in every], False
            except NotOneBatchError as error:
                why = f"the batches of the replicas cannot be put together ({error})"
        else:
            why = f"batch norm computes over the batch of each replica ({local[0]}); layer_sync would make it one"
        if not notes.said("automatic"):
            raise ConfigError(
                "the job cannot be verified",
                where="model",
                why=f"{why}, and a manual optimization cannot be trained replica by replica",
                fix="layer_sync: torch_sync_batchnorm; or batches of one shape",
            )
        said.append(f"{why}: compared replica by replica, not with whole batches")
        return [batch for step in every for batch in step], True

    def _train(
        self,
        batches: Sequence[Any],
        precision: str,
        by_replica: bool = False,
        *,
        seed: int = _SEED,
        steps: int | None = None,
        accumulate: int | None = None,
    ) -> Trained:
        notes = self._notes
        count = accumulate or notes.accumulate * (notes.replicas if by_replica else 1)
        L.seed_everything(_SEED, workers=True, verbose=False)
        model, data = self._build.model(), self._build.data()
        probe = ReferenceProbe(notes.start)
        if steps is not None:
            batches = batches[: steps * count]
        trainer = self._build.trainer(precision, count, steps or notes.said("max_steps"), probe)
        for owner in (model, data):
            if owner is not None and is_overridden("on_before_batch_transfer", owner):
                vars(owner)["on_before_batch_transfer"] = _unchanged  # the batches are noted behind it
        L.seed_everything(seed, workers=True, verbose=False)
        loader = Batches(batches)
        if data is None:
            trainer.fit(model, train_dataloaders=loader)
        else:
            vars(data)["train_dataloader"] = lambda: loader
            trainer.fit(model, datamodule=data)
        sums = [sum(probe.losses[i : i + count]) for i in range(0, len(probe.losses), count)]
        return Trained(probe.gradients, sums, probe.weights)


class Batches:
    """A loader of what it is given."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(detached, self._batches)  # a training step may change its batch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With another number of threads, sums are cut in other places."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _unchanged(batch: Any, dataloader_idx: int) -> Any:
    return batch


def shuffled_batch(batch: Any, seed: int) -> Any:
    """The batch with its samples in another order, the same at each call."""
    return shuffled(batch, torch.Generator().manual_seed(seed))


def apart(one: Tensors, other: Tensors) -> float:
    """How far two gradients are apart, relative to the second, as one vector."""
    squares = [float(other[name].double().square().sum()) for name in other]
    both = one.keys() & other.keys()
    off = [float((one[name].double() - other[name].double()).square().sum()) for name in both]
    whole = math.sqrt(sum(squares))
    return math.sqrt(sum(off)) / whole if whole else math.sqrt(sum(off))
