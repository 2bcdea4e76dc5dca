"""The loss scale of float16: what is clipped is unscaled, and a step that overflows is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fairlead_precision import MixedPrecisionConfig

Build = Callable[..., Any]

CLIP = 0.05
STEPS = 6


class Net(pl.LightningModule):
    """Keeps the norm of its gradients before and after they are clipped."""

    def __init__(self, overflows_at: int = -1, lr: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.overflows_at = overflows_at
        self.lr = lr
        self.before: list[float] = []
        self.after: list[float] = []
        self.scales: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        return loss * 1e38 if batch_idx == self.overflows_at else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before.append(norm(self))

    def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:  # type: ignore[override]
        self.clip_gradients(optimizer, **settings)
        self.after.append(norm(self))

    def on_train_batch_end(self, *unused: Any) -> None:
        self.scales.append(vars(self.trainer.precision_plugin)["scaler"].get_scale())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def norm(module: nn.Module) -> float:
    """Of all gradients together, by hand."""
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in module.parameters() if p.grad is not None))


def batches() -> list[list[Tensor]]:
    x = torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
    return [[one, one.sum(1, keepdim=True)] for one in x]


def train(build: Build, model: Net, clip: float | None = CLIP) -> Net:
    plugin = build(MixedPrecisionConfig(dtype="float16", init_scale=1024.0), strategy="single_device")
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    trainer = pl.Trainer(
        plugins=[plugin],
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=4))
    return model


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_gradients_are_unscaled_before_they_are_clipped(build: Build) -> None:
    """Against a loop in plain torch that unscales, measures and clips by hand; the order the other way differs."""
    model = train(build, Net())
    right, wrong = Net().net, Net().net
    norms = []
    for net, unscales in ((right, True), (wrong, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for x, y in batches():
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = nn.functional.mse_loss(net(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if unscales:
                scaler.unscale_(optimizer)
                norms.append(norm(net))
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
    assert model.before == pytest.approx(norms, rel=1e-6)
    assert min(model.before) > 2 * CLIP
    assert model.after == pytest.approx([CLIP] * STEPS, rel=1e-4)
    for ours, theirs, other in zip(model.net.parameters(), right.parameters(), wrong.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, other, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_a_step_that_overflows_is_left_out_and_the_scale_falls(build: Build) -> None:
    model = train(build, Net(overflows_at=2, lr=0.05), clip=None)
    assert model.scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    assert not math.isfinite(model.before[2])
    assert all(math.isfinite(one) for i, one in enumerate(model.before) if i != 2)
    plain = Net().net
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
        if i != 2:
            optimizer.step()
    for ours, theirs in zip(model.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
