"""Runs in 4 and 8 bits through Fairlead's own Trainer: converted, saved, resumed, on one rank and on two."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead.errors import ConfigError
from fairlead_distributed.parallel.tensor import parallelize_tensor
from fairlead_distributed.testing import run_ranks
from fairlead_precision import TorchAOFloat8PrecisionConfig
from fairlead_precision.torchao_runtime import convert

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(L.LightningModule):
    """Fits a smooth function; the middle of its layers fit 8-bit units."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = (8, 32, 32, 32, 1)
        layers: list[nn.Module] = []
        for i, size in enumerate(sizes[1:]):
            layers += [nn.Linear(sizes[i], size), nn.Tanh()]
        self.net = nn.Sequential(*layers[:-1])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3, generator=generator)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8)


def fit(folder: Path, name: str, steps: int, precision: Any, **settings: Any) -> tuple[Net, float, float]:
    """The model, and the loss of all samples before and after."""
    config = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": precision,
        "max_steps": steps,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 2,
        "checkpoint": {"every_n_steps": 2},
        **settings,
    }
    model = Net()
    x, y = next(iter(DataLoader(Data().train_dataloader().dataset, batch_size=32)))
    with torch.no_grad():
        before = nn.functional.mse_loss(model.net(x), y).item()
    Trainer(TrainerConfig.model_validate(config), run=RunConfig(name=name, dir=str(folder))).fit(model, Data())
    with torch.no_grad():
        after = nn.functional.mse_loss(model.net(x).float(), y).item() if "strategy" not in settings else before
    return model, before, after


FP8 = {"name": "fp8-torchao", "compute": "bf16-mixed"}


@pytest.mark.parametrize("precision", ["nf4-dq", "int8", "int8-training", FP8], ids=str)
def test_a_run_that_goes_on_ends_with_the_bits_of_one_that_never_stopped(precision: Any, tmp_path: Path) -> None:
    whole, before, after = fit(tmp_path, "whole", 24, precision)
    assert after < 0.8 * before
    fit(tmp_path, "parts", 10, precision)
    parts, _, _ = fit(tmp_path, "parts", 24, precision)
    expected, found = whole.state_dict(), parts.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


SPLIT = {"name": "tensor_parallel", "plan": {"net.2": "colwise", "net.4": "rowwise"}}


def trained(rank: int, folder: Path, strategy: Any, precision: Any, devices: int = 2) -> tuple[str, dict[str, Tensor]]:
    config = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": strategy,
        "precision": precision,
        "max_steps": 6,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 2,
        "enable_checkpointing": False,
    }
    model = Net()
    Trainer(TrainerConfig.model_validate(config), run=RunConfig(name="run", dir=str(folder))).fit(model, Data())
    full = {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in model.named_parameters()}
    return type(model.net[2]).__name__, full


@pytest.mark.parametrize(
    ("strategy", "precision", "layer"),
    [
        *(("ddp", "nf4", "FourBitLinear"), ("ddp", "fp8-torchao", "Float8Linear")),
        *(("fsdp2", "fp8-torchao", "Float8Linear"), (SPLIT, "fp8-torchao", "Float8Linear")),
    ],
    ids=str,
)
def test_two_ranks(strategy: Any, precision: str, layer: str, tmp_path: Path) -> None:
    """Both hold the same weights after training, which moved.

    Sharded ones are those of `ddp` up to the rounding, and split layers' those of one process.
    """
    ranks = run_ranks(trained, 2, tmp_path, strategy, precision)
    started = dict(Net().named_parameters())
    for kind, weights in ranks:
        assert kind == layer
        for name, value in weights.items():
            assert torch.equal(value, ranks[0][1][name])
    moved = [name for name, value in ranks[0][1].items() if not torch.equal(value, started[name].to(value.dtype))]
    assert set(moved) >= {name for name in started if precision != "nf4" or name.endswith("bias")}
    if strategy != "ddp":
        many = 2 if strategy == "fsdp2" else 1  # ranks that split layers have one batch
        plain = run_ranks(trained, many, tmp_path / "plain", "ddp", precision, many)[0][1]
        for name, value in ranks[0][1].items():
            torch.testing.assert_close(value, plain[name], rtol=0.05, atol=0.02)


def split_layers(rank: int) -> dict[str, Any]:
    """A pair of 8-bit layers, whole and split over two ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    whole: Any = copy.deepcopy(plain)
    convert(whole, TorchAOFloat8PrecisionConfig(recipe="rowwise", skip_first_and_last=False), emulate=True)
    split: Any = copy.deepcopy(whole)
    narrow = nn.Sequential(nn.Linear(16, 32))
    convert(narrow, TorchAOFloat8PrecisionConfig(skip_first_and_last=False), emulate=True)
    parallelize_tensor(split, init_device_mesh("cpu", (2,)), {"0": "colwise", "2": "rowwise"})
    x = torch.randn(4, 32)
    out, expected = split(x), whole(x)
    out.square().sum().backward()
    expected.square().sum().backward()
    gradient = split[0].weight.grad.full_tensor() - whole[0].weight.grad
    with torch.no_grad():
        found = {
            "columns": torch.equal(split[0](x), whole[0](x).chunk(2, -1)[rank]),
            "plain": float((expected - plain(x)).abs().max()),
            "out": float((out - expected).abs().max()),
            "gradient": float(gradient.abs().max()),
        }
    with pytest.raises(ConfigError, match="16 features are 8 on each rank"):
        parallelize_tensor(narrow, init_device_mesh("cpu", (2,)), {"0": "rowwise"})
    return found


def test_a_split_layer_computes_in_8_bits() -> None:
    """A rank's rows of a weight have their own scales, so that its features are those of the whole layer to the bit."""
    for found in run_ranks(split_layers, 2):
        assert found["columns"] is True
        assert found["out"] < found["plain"]  # between them lies the rounding of parts of a sum
        assert 0 < found["plain"] < 0.2
        assert found["gradient"] < 0.2
