"""One small training, written by hand, with Lightning's Trainer and with Fairlead's: what `step` and `ddp` compare.

Each call trains anew and returns the seconds of one step, taken between two steps in the middle: building a trainer,
the first steps, and the checkpoint at the end are not counted.  Both trainers have the same things switched on: a CSV
file with the same interval, a checkpoint callback with the same interval, progress shown about as often.  Fairlead has
besides what it always has: the history, the heartbeat, its signals.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Run, RunConfig, Trainer, TrainerConfig
from fairlead_lightning.display.quiet import quiet

__all__ = ["Net", "Workload"]

LOG_EVERY: Final = 50
SHOWN_EVERY_S: Final = 0.5  # what Fairlead's bars do on a terminal
SAVE_EVERY: Final = 100_000  # the callbacks look at every step; what a save costs is measured by `checkpoint`


class Net(L.LightningModule):
    """A classifier of fully connected layers.

    Args:
        widths: The sizes of its layers, input and output included.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes), of x, (batch, features)."""
        logits: Tensor = self.layers(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss, logged."""
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the cheapest, so that what surrounds it shows most."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Span(L.Callback):
    """The time at the end of two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.began = self.ended = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at the clock, twice in a fit."""
        if batch_idx + 1 == self.first:
            self.began = time.perf_counter()
        elif batch_idx + 1 == self.last:
            self.ended = time.perf_counter()


@dataclass
class Workload:
    """What is trained, and for how long.

    Attributes:
        folder: Where runs are written; the same on all ranks.
        widths: The sizes of the layers.
        batch_size: Samples in a batch of each rank.
        warm_up: Steps before the clock starts.
        steps: Steps that are timed.
        expected_s: About what a step takes: Lightning's bar is refreshed as often as Fairlead's line is shown.
        settings: Arguments that Lightning's and Fairlead's Trainer take alike.
    """

    folder: Path
    widths: Sequence[int]
    batch_size: int
    warm_up: int
    steps: int
    expected_s: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    _fits: int = 0

    def by_hand(self, *, distributed: bool = False, communicates: bool = True) -> float:
        """A loop that does nothing else but look at the loss from time to time.

        Args:
            distributed: Whether the gradients of all ranks are averaged.
            communicates: False: they would be, and nothing is sent.
        """
        net, loader = self._net(), self._loader()
        model: nn.Module = net
        quiet: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if distributed:
            model = self._wrap(net)
            if not communicates:
                assert isinstance(model, nn.parallel.DistributedDataParallel)
                quiet = model.no_sync
        optimizer: Any = net.configure_optimizers()
        model.train()
        began = ended = 0.0
        losses = []
        for done, batch in enumerate(loader, start=1):
            optimizer.zero_grad()
            with quiet():
                loss = self._learn(model, batch)
            optimizer.step()
            if done % LOG_EVERY == 0:
                losses.append(loss.item())
            if done == self.warm_up:
                began = time.perf_counter()
            elif done == self.warm_up + self.steps:
                ended = time.perf_counter()
        return (ended - began) / self.steps

    def in_run(self, *, distributed: bool = False) -> float:
        """The same loop in a `Run`.

        Args:
            distributed: Whether the gradients of all ranks are averaged.
        """
        net, loader = self._net(), self._loader()
        model: nn.Module = self._wrap(net) if distributed else net
        optimizer: Any = net.configure_optimizers()
        model.train()
        began = ended = 0.0
        folder = self._next("run")
        checkpoint = {"every_n_steps": SAVE_EVERY, "every_n_epochs": None}
        with (
            _unseen(),
            Run(
                folder,
                model=model,
                optimizer=optimizer,
                max_steps=self._total,
                log_every_n_steps=LOG_EVERY,
                checkpoint=checkpoint,
            ) as run,
        ):
            run.restore()
            for done, batch in enumerate(run.batches(loader), start=1):
                optimizer.zero_grad()
                loss = self._learn(model, batch)
                optimizer.step()
                run.step(loss=loss)
                if done == self.warm_up:
                    began = time.perf_counter()
                elif done == self.warm_up + self.steps:
                    ended = time.perf_counter()
        return (ended - began) / self.steps

    def lightning(self) -> float:
        """Lightning's Trainer, with what Fairlead's has of the same kind."""
        folder = self._next("lightning")
        refresh = max(1, round(SHOWN_EVERY_S / self.expected_s))
        span = _Span(self.warm_up, self.warm_up + self.steps)
        with _unseen():
            trainer = L.Trainer(
                **self._common(),
                default_root_dir=folder,
                logger=CSVLogger(folder),
                callbacks=[
                    ModelCheckpoint(folder / "checkpoints", every_n_train_steps=SAVE_EVERY, save_last=True),
                    TQDMProgressBar(refresh_rate=refresh),
                    span,
                ],
            )
            trainer.fit(self._net(), self._loader())
        return self._step(span)

    def fairlead(self) -> float:
        """Fairlead's Trainer, with its run directory."""
        folder = self._next("fairlead")
        span = _Span(self.warm_up, self.warm_up + self.steps)
        config = TrainerConfig.model_validate(
            {
                **self._common(),
                "progress_interval": SHOWN_EVERY_S,
                "checkpoint": {"every_n_steps": SAVE_EVERY, "every_n_epochs": None},
            }
        )
        with _unseen():
            trainer = Trainer(config, run=RunConfig(name=folder.name, dir=str(folder.parent)), callbacks=[span])
            trainer.fit(self._net(), self._loader())
        return self._step(span)

    def _common(self) -> dict[str, Any]:
        return {
            "accelerator": "cpu",
            "max_steps": self._total,
            "max_epochs": 1,
            "log_every_n_steps": LOG_EVERY,
            "enable_model_summary": False,
            **self.settings,
        }

    @property
    def _total(self) -> int:
        return self.warm_up + self.steps + 1  # the last timed step must not be the one that ends the epoch

    def _wrap(self, net: L.LightningModule) -> nn.Module:
        return nn.parallel.DistributedDataParallel(net)

    def _learn(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, whose gradients are there behind it."""
        loss = self._loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def _net(self) -> L.LightningModule:
        gc.collect()  # what the last turn has left is no part of this one
        torch.manual_seed(0)
        return Net(self.widths)

    def _loader(self) -> DataLoader[Any]:
        """Each rank has enough of its own for one epoch, however the samples are divided."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        generator = torch.Generator().manual_seed(0)
        # A few distinct samples, seen again and again: memory is no matter here.
        x = torch.randn(self.batch_size, self.widths[0], generator=generator)
        y = torch.randint(self.widths[-1], (self.batch_size,), generator=generator)
        repeats = self._total * ranks
        dataset = TensorDataset(x.expand(repeats, -1, -1).flatten(0, 1), y.expand(repeats, -1).flatten())
        return DataLoader(dataset, batch_size=self.batch_size)

    def _next(self, kind: str) -> Path:
        self._fits += 1
        return self.folder / f"{kind}-{self._fits}"

    def _step(self, span: _Span) -> float:
        if span.ended <= span.began or span.began == 0.0:
            raise RuntimeError(f"the training ended before step {span.last}")
        return (span.ended - span.began) / self.steps


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Progress goes nowhere: the standard output has the results."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        quiet(),
    ):
        yield
