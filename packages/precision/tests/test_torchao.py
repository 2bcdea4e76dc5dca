"""8-bit floating point by torchao, emulated on this CPU: which layers, what they compute, how near they train."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fairlead.errors import ConfigError
from fairlead_precision import TorchAOFloat8PrecisionConfig
from fairlead_precision.torchao_runtime import convert

Build = Callable[..., Any]

NO_UNITS = 2**-4 / (1 - 2**-4)
"""The largest relative error of rounding to E4M3, which has 3 bits behind the point: half of 2^-3, of what is left."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these small layers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(pl.LightningModule):
    """Fits a smooth function. Of its Linear layers `body.2` and `body.4` fit the units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (12, 64, 64, 32)
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.GELU()]
        self.body = nn.Sequential(*layers)
        self.odd = nn.Linear(32, 20)
        self.head = nn.Linear(20, 4)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.odd(self.body(x)))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
    y = torch.stack([x.sum(1).sin(), x[:, 0], x[:, 1] * x[:, 2], x.square().mean(1)], 1)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def trainer(precision: Any, epochs: int) -> pl.Trainer:
    return pl.Trainer(
        plugins=[precision],
        callbacks=list(getattr(precision, "callbacks", ())),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
    )


def test_the_layers_that_fit_are_converted_and_the_others_said() -> None:
    model = Net()
    before = dict(model.named_parameters())
    conversion = convert(model, TorchAOFloat8PrecisionConfig(ignore_modules=("body.4",)), emulate=True)
    assert conversion is not None
    assert conversion.converted == ("body.2",)
    assert conversion.left == {
        "body.0": "a size that is no multiple of 16",
        "body.4": "trainer.precision.ignore_modules",
        "odd": "a size that is no multiple of 16",
        "head": "a size that is no multiple of 16",
    }
    assert str(conversion).startswith("1 of 5 Linear layers converted; left as they are: body.0, odd, head (a size")
    assert type(model.body[2]).__name__ == "Float8Linear"
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert convert(model, TorchAOFloat8PrecisionConfig(), emulate=True) is None


@pytest.mark.parametrize(("skips", "converted"), [(True, ("1",)), (False, ("0", "1", "2"))])
def test_the_first_and_last_layer(skips: bool, converted: tuple[str, ...]) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    found = convert(model, TorchAOFloat8PrecisionConfig(skip_first_and_last=skips), emulate=True)
    assert found is not None
    assert found.converted == converted


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_values_are_rounded_to_8_bits_and_no_more(recipe: Any) -> None:
    """A layer with one input and one weight per output: nothing adds up, so each value has its rounding errors only."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.rand(16) + 0.5))
    plain = copy.deepcopy(model)
    convert(model, TorchAOFloat8PrecisionConfig(recipe=recipe, skip_first_and_last=False), emulate=True)
    x = torch.rand(4, 16) + 0.5
    got, want = model(x), plain(x)
    error = (got / want - 1).abs().max().item()
    assert 0 < error <= (1 + NO_UNITS) ** 2 - 1
    got.sum().backward()
    want.sum().backward()
    weight, reference = (net[0].weight.grad for net in (model, plain))
    assert weight is not None
    assert reference is not None
    assert (weight - reference).norm() <= 2 * NO_UNITS * reference.norm()
    assert torch.equal(weight, reference) is (recipe == "rowwise_with_gw_hp")  # which leaves this product as it is


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("compute", ["bf16-mixed", "bf16-true", "32-true"])
def test_it_trains_near_the_same_without_8_bits(recipe: Any, compute: Any, build: Build) -> None:
    """Each loss is within 10 % of the first loss of that without 8 bits, the last too; and they are not the same."""
    import lightning.pytorch.plugins.precision as precisions

    made: dict[str, Any] = {
        "bf16-mixed": lambda: precisions.MixedPrecision("bf16-mixed", "cpu"),
        "bf16-true": lambda: precisions.HalfPrecision("bf16-true"),
        "32-true": precisions.Precision,
    }
    plain, model = Net(), Net()
    trainer(made[compute](), 10).fit(plain, data())
    config = TorchAOFloat8PrecisionConfig(recipe=recipe, compute=compute)
    precision = build(config, strategy="single_device")
    assert precision.precision == compute
    trainer(precision, 10).fit(model, data())
    assert precision.conversion.converted == ("body.2", "body.4")
    assert plain.losses[-1] < 0.7 * plain.losses[0]
    assert model.losses == pytest.approx(plain.losses, abs=0.1 * plain.losses[0])
    assert model.losses != plain.losses
    started = dict(Net().named_parameters())
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter.float(), started[name].to(parameter.dtype).float()), name


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated:FutureWarning")
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, build: Build) -> None:
    """And its checkpoint is one of plain Linear layers."""

    def train(epochs: int, start: Path | None) -> tuple[Net, pl.Trainer]:
        model = Net()
        to = trainer(build(TorchAOFloat8PrecisionConfig(), strategy="single_device"), epochs)
        to.fit(model, data(), ckpt_path=start)
        return model, to

    _, first = train(2, None)
    first.save_checkpoint(tmp_path / "half.ckpt")
    whole, _ = train(4, None)
    resumed, _ = train(4, tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert Net().load_state_dict(torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"])


def test_a_loop_of_ones_own(build: Build) -> None:
    config = TorchAOFloat8PrecisionConfig(compute="32-true")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[build(config, "fabric", strategy="ddp")])
    model: Any = Net()
    module, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    x, y = next(iter(data()))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert type(model.body[2]).__name__ == "Float8Linear"
    assert losses[-1] < 0.7 * losses[0]


def test_it_goes_to_spawned_ranks(build: Build) -> None:
    """`ddp_spawn` pickles the precision."""
    config = TorchAOFloat8PrecisionConfig(recipe="rowwise")
    again = pickle.loads(pickle.dumps(build(config, strategy="ddp")))
    model = Net()
    again.convert_module(model)
    assert again.precision == "bf16-mixed"
    assert type(model.body[2]).__name__ == "Float8Linear"


def test_a_model_without_a_layer_that_fits_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing would be computed by 8-bit floating point"):
        convert(nn.Sequential(nn.Linear(16, 16)), TorchAOFloat8PrecisionConfig(), emulate=True)


@pytest.mark.parametrize("emulate", [False, True])
def test_an_older_gpu_is_refused_unless_it_is_to_emulate(
    emulate: bool, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    config = TorchAOFloat8PrecisionConfig(emulate=emulate)
    if emulate:
        assert build(config, accelerator="cuda").precision == "bf16-mixed"
        return
    with pytest.raises(ConfigError, match="A100 cannot compute in 8-bit"):
        build(config, accelerator="cuda")
