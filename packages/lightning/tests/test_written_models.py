"""Models, callbacks and optimizers as people write them: what their training changes is there again, or is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from test_exact_resume import BATCH, Net, Noisy, Quiet, assert_equal, at, exactness, run, shuffled
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import ConcatDataset, DataLoader, default_collate

pytestmark = pytest.mark.full


class DropoutSchedule(Net):
    """Drops more and more, and turns the momentum of its batch norm down."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        layers: Any = self.net
        layers[1].momentum *= 0.95
        layers[2].p = min(0.6, layers[2].p + 0.03)


class ThroughData(Net):
    """Writes into tensors in ways that leave their version as it was."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.mean, self.view = torch.zeros(()), torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.data.mul_(0.9).add_(0.1 * loss.detach())
        self.view.numpy()[:] += 0.01
        return loss * (1 + self.mean + self.view.sum())


class GradientNorms(Net):
    """Clips by the norms of the gradients before, which it takes where Lightning says: before they are zeroed."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.norms: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.norms.append(sum(float(one.grad.norm()) for one in self.parameters() if one.grad is not None))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.1 + 0.5 * float(np.mean(self.norms[-3:])), "norm")


class Zeroing(Net):
    """Leaves gradients at zero, not at None: a layer that is left out in a step is moved by its momentum."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.sometimes = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        left_out = self.global_step % 3 != 0
        return super().training_step((x if left_out else x + self.sometimes(x), y), batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class TwoOptimizers(Net):
    """Steps one of its optimizers with each batch, and accumulates for the other."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.automatic_optimization = False
        self.other = nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        each, rarely = optimizers
        loss: Tensor = super().training_step(batch, batch_idx) + self.other(batch[0]).square().mean()
        each.zero_grad()
        self.manual_backward(loss)
        each.step()
        if batch_idx % 3 == 2:
            rarely.step()
            rarely.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), 0.01) for one in (self.net, self.other)]


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state it shares; its slow weights are in no state_dict."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.steps = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [[one.detach().clone() for one in group["params"]] for group in inner.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            group["lr"] *= 0.97
            for one, its in zip(group["params"], slow, strict=True):
                if self.steps % 3 == 0:
                    its.data.lerp_(one.data, 0.5)
                    one.data.copy_(its)
        return loss


class LookingAhead(Net):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.AdamW(self.parameters(), lr=0.02))


class Damped(torch.optim.SGD):
    """Keeps in an attribute what it has seen of its gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.02)
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        weights = self.param_groups[0]["params"]
        self.norms.append(sum(float(one.grad.norm()) for one in weights if one.grad is not None))
        for one in weights:
            one.data.mul_(1 - 0.01 * float(np.mean(self.norms)))
        super().step()
        return loss


class Damping(Net):
    def configure_optimizers(self) -> Any:
        return Damped(self.parameters())


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


class Metered(Net):
    """Has an object of its own that counts."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.meter: Meter | None = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.meter = self.meter or Meter()
        self.meter.total, self.meter.count = self.meter.total + loss.item(), self.meter.count + 1
        return loss / (0.5 + self.meter.total / self.meter.count)


class Made(Metered):
    """Makes that object in its first step."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.meter = None


class Growing(Net):
    """Keeps what it has seen in a buffer, which grows."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.bank: Tensor
        self.register_buffer("bank", torch.zeros(1, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.bank = torch.cat([self.bank, batch[0][:1]])
        return super().training_step(batch, batch_idx) * (1 + self.bank.mean())


class Unfreezing(Net):
    """Gives its optimizer another group in the second epoch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[3].parameters(), lr=0.02)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.net[:2].parameters()), "lr": 0.005})


class Pruned(Net):
    """Prunes a layer in each epoch."""

    def on_train_epoch_start(self) -> None:
        prune.l1_unstructured(self.net[0], "weight", amount=0.2)  # type: ignore[no-untyped-call]


class Clipping(L.Callback):
    """Sets the trainer's own value lower and lower."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.gradient_clip_val *= 0.9


MODELS = (
    DropoutSchedule,
    ThroughData,
    GradientNorms,
    Zeroing,
    TwoOptimizers,
    Damping,
    Metered,
    Growing,
    Unfreezing,
    Pruned,
)


@pytest.mark.parametrize("net", MODELS)
def test_what_a_training_changes_is_there_again(tmp_path: Path, net: type[Net]) -> None:
    assert_equal(tmp_path, shuffled, at("train", 4), at("train", 9), net=net)
    assert exactness(tmp_path / "killed")["reasons"] == []


def test_a_clip_value_that_a_callback_sets(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"callbacks": lambda: [Clipping()], "gradient_clip_val": 1.0}
    assert_equal(tmp_path, shuffled, at("train", 9), **settings)
    assert exactness(tmp_path / "killed")["reasons"] == []


class Jitter:
    """A transform with a generator of its own, and a count."""

    def __init__(self) -> None:
        self.random, self.calls = np.random.default_rng(3), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + float(self.random.normal()) + 0.01 * self.calls


class Transformed(Quiet):
    def __init__(self, transform: Callable[[Tensor], Tensor], count: int = 26) -> None:
        super().__init__(count)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.x[index]), self.y[index]


class Mixing(Jitter):
    """A `collate_fn` that is an object."""

    def __call__(self, samples: Any) -> Any:
        x, y = default_collate(samples)
        return super().__call__(x), y


def transformed() -> Any:
    return DataLoader(Transformed(Jitter()), BATCH, shuffle=True)


def mixed() -> Any:
    return DataLoader(Noisy(), BATCH, shuffle=True, collate_fn=Mixing())


@pytest.mark.parametrize("loaders", [transformed, mixed])
def test_what_transforms_keep_is_there_again(tmp_path: Path, loaders: Callable[[], Any]) -> None:
    assert_equal(tmp_path, loaders, at("train", 4), at("train", 9))
    assert exactness(tmp_path / "killed")["reasons"] == []


def jittered(x: Tensor, jitter: Jitter) -> Tensor:
    return jitter(x)


def in_parts() -> Any:
    return ConcatDataset([Transformed(Jitter(), 13), Transformed(Jitter(), 13)])


def by_partial() -> Any:
    return Transformed(partial(jittered, jitter=Jitter()))


def by_closure() -> Any:
    count = 0

    def transform(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x + 0.01 * count

    return Transformed(transform)


@pytest.mark.parametrize("dataset", [in_parts, by_partial, by_closure])
def test_what_lies_deeper_is_named(tmp_path: Path, dataset: Callable[[], Any]) -> None:
    run(tmp_path, lambda: DataLoader(dataset(), BATCH, shuffle=True), max_epochs=1)
    (reason,) = exactness(tmp_path)["reasons"]
    assert reason["what"].startswith("loader 0 dataset.")
    assert not reason["certain"]


class Validated(L.LightningDataModule):
    """Draws what it validates on where the loader is made; the samples have noise of a generator of their own."""

    def train_dataloader(self) -> Any:
        return shuffled()

    def val_dataloader(self) -> Any:
        samples = torch.randperm(26)[:8].tolist()
        return DataLoader(Blurred(samples), BATCH)


class Blurred(Quiet):
    def __init__(self, samples: list[int]) -> None:
        super().__init__()
        self.samples, self.random = samples, np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(self.samples[index])
        return x + float(self.random.normal()), y


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_validation_is_on_the_same_samples(tmp_path: Path, epochs: int) -> None:
    settings: dict[str, Any] = {"reload_dataloaders_every_n_epochs": epochs}
    assert_equal(tmp_path, Validated, at("train", 4), at("train", 9), **settings)
    assert exactness(tmp_path / "killed")["reasons"] == []


class Skipping(Net):
    """Leaves the rest of an epoch out, as Lightning lets it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (1, 4) else None


def test_the_rest_of_an_epoch_is_left_out(tmp_path: Path) -> None:
    run(tmp_path, shuffled, net=Skipping)
    assert (tmp_path / "run/metrics.csv").read_text().splitlines()[-1].startswith("17,2,")


class AnotherLoss(Net):
    """Changes its loss for another module."""

    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.criterion: nn.Module = nn.CrossEntropyLoss()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.criterion = nn.MultiMarginLoss()


class AnotherFunction(Net):
    def __init__(self, kill: Any) -> None:
        super().__init__(kill)
        self.criterion: Any = nn.functional.cross_entropy

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.criterion = nn.functional.multi_margin_loss


class LateAverage(L.Callback):
    """Makes its average where it is used first: a resumed run has no module to put the weights into."""

    def __init__(self) -> None:
        self.average: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average = self.average or copy.deepcopy(pl_module.net)


class Progress(TQDMProgressBar):
    """One of Lightning's, which keeps a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self._bar = 0, object()

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.steps += 1


def test_a_callback_derived_from_lightnings_keeps_its_own_attributes(tmp_path: Path) -> None:
    made: list[Progress] = []

    def callbacks() -> list[L.Callback]:
        made.append(Progress())
        return [made[-1]]

    run(tmp_path, shuffled, callbacks=callbacks, max_epochs=1, enable_progress_bar=True)
    assert exactness(tmp_path)["reasons"] == []
    run(tmp_path, shuffled, callbacks=callbacks, max_epochs=2, enable_progress_bar=True)
    assert [one.steps for one in made] == [7, 14]


def test_what_cannot_be_there_again_is_named(tmp_path: Path) -> None:
    def named(net: type[Net], *callbacks: L.Callback) -> str:
        root = tmp_path / f"{net.__name__}{len(callbacks)}"
        run(root, shuffled, net=net, callbacks=lambda: list(callbacks), max_epochs=2)
        assert exactness(root)["exact"] is not True
        return str(exactness(root)["reasons"][0])

    assert "a MultiMarginLoss that training has made" in named(AnotherLoss)
    assert "model.criterion" in named(AnotherFunction)
    assert "make it before the training begins" in named(Net, LateAverage())
    assert "make it before the training begins" in named(Made)
    assert "the optimizer Lookahead" in named(LookingAhead)
