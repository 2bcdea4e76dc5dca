"""Copies that go on while the next step computes: what is copied so, and what is held.

The stand-in below is for the GPU only: it notes when the update would have been held.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from fairlead_checkpoint_io import TorchCheckpointIOConfig
from fairlead_checkpoint_io.async_file_runtime import AsyncFileCheckpointIO
from fairlead_checkpoint_io.files.snapshot import OverlappedCopies, storages_of
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO


class Noting(OverlappedCopies):
    """Notes the weights and gradients at the moment of the hold, in place of making a GPU wait."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.held: list[tuple[float, float | None]] = []

    def save(self) -> None:
        self.watch()
        self.hold(None)  # type: ignore[arg-type]

    def _wait(self) -> None:
        for _ in self._copies:
            gradient = self.weight.grad
            self.held.append((self.weight.item(), None if gradient is None else gradient.item()))
        self._copies = []


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.nn.Parameter(torch.tensor(1.0))


@pytest.fixture
def copies(weight: torch.Tensor) -> Iterator[Noting]:
    noting = Noting(weight)
    yield noting
    noting.end()


def test_an_update_is_held_once_and_later_ones_are_not(weight: torch.Tensor, copies: Noting) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.tensor(1.0)
    optimizer.step()  # nobody watches yet
    copies.save()
    optimizer.step()
    optimizer.step()
    assert copies.held == [(0.5, 1.0)]
    copies.save()
    copies.end()
    optimizer.step()
    assert len(copies.held) == 1


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_computes_before_its_update_is_held(weight: torch.Tensor, copies: Noting, positional: bool) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight * 3
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    copies.save()
    loss = optimizer.step(closure) if positional else optimizer.step(closure=closure)
    assert loss == 3.0
    assert copies.held == [(1.0, 3.0)]  # the gradient is there, the weight is not updated
    assert weight.item() == -0.5


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.weight * 3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_lightnings_step_is_held_behind_its_backward(tmp_path: Path) -> None:
    model = Model()
    noting = Noting(model.weight)
    noting.save()
    try:
        Trainer(
            accelerator="cpu",
            max_steps=1,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, DataLoader([torch.zeros(1)], num_workers=0))  # type: ignore[arg-type]
    finally:
        noting.end()
    assert noting.held == [(1.0, 3.0)]


def test_the_state_of_an_optimizer_is_its_own_and_parameters_are_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    own = storages_of(optimizer, "cpu")
    state: list[dict[str, Any]] = list(optimizer.state.values())
    assert own == {
        entry[name].untyped_storage().data_ptr() for entry in state for name in ("exp_avg", "exp_avg_sq", "step")
    }
    assert own.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values())
    assert storages_of(optimizer) == set()  # nothing on a GPU
    first = next(model.parameters())
    optimizer.state[first]["mirror"] = first.detach()
    assert first.untyped_storage().data_ptr() not in storages_of(optimizer, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_a_gpu_go_on_and_do_not_get_into_the_file(tmp_path: Path) -> None:
    """Several saves, each followed at once by steps that change everything; against a copy made with the GPU idle."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(16)), torch.nn.BatchNorm1d(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    backend = AsyncFileCheckpointIO(TorchFileCheckpointIO(TorchCheckpointIOConfig()), max_in_flight=2)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(64, 2048, device="cuda")).square().sum().backward()
            optimizer.step()

    def state() -> dict[str, Any]:
        return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}

    steps(2)
    for number in range(4):
        torch.cuda.synchronize()
        expected = [leaf.cpu().clone() for leaf in torch.utils._pytree.tree_leaves(state()) if torch.is_tensor(leaf)]
        path = tmp_path / f"{number}.ckpt"
        backend.save_checkpoint(state(), path)
        steps(3)
        backend.wait()
        loaded = torch.load(path, weights_only=True)
        found = [leaf for leaf in torch.utils._pytree.tree_leaves(loaded) if torch.is_tensor(leaf)]
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    backend.teardown()
