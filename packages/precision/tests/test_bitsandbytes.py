"""bitsandbytes on this CPU: what is stored, what it computes, what trains, and what a checkpoint gives back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning.pytorch as pl
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fairlead.errors import ConfigError
from fairlead_distributed.testing import run_ranks
from fairlead_precision import BitsandbytesPrecisionConfig
from fairlead_precision.bitsandbytes_runtime import (
    EightBitLinear,
    EightBitTrainingLinear,
    FourBitLinear,
    convert,
)

Build = Callable[..., Any]

MODES = ["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"]
FROZEN = MODES[:-1]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these small layers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(mode: Any, *ignore: str) -> BitsandbytesPrecisionConfig:
    return BitsandbytesPrecisionConfig(mode=mode, ignore_modules=ignore)


class Net(pl.LightningModule):
    """Fits a smooth function; the layer `head` is small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.GELU())
        self.head = nn.Linear(32, 4)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class Late(Net):
    """The same, made where Lightning has big models made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.body
        del self.body

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            self.body = self.made
            del self.made


def data() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    y = torch.stack([x.sum(1).sin(), x[:, 0], x[:, 1] * x[:, 2], x.square().mean(1)], 1)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def trainer(precision: Any, **settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 10,
    }
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(plugins=[precision], callbacks=list(precision.callbacks), **{**quiet, **settings})


def float_weight(layer: Any) -> Tensor:
    """What a quantised layer computes with."""
    found: Tensor
    if isinstance(layer, FourBitLinear):
        found = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    else:
        assert isinstance(layer, EightBitLinear)
        found = layer.weight.float() * layer.state.SCB[:, None] / 127
    return found


@pytest.mark.parametrize("mode", FROZEN)
@pytest.mark.parametrize("sizes", [(64, 48), (33, 17)])
def test_weights_are_stored_in_few_bits_and_stand_for_the_float_ones(mode: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(*sizes))
    before = model[0].weight.detach().clone()
    convert(model, config(mode))
    stored = model[0].weight
    assert isinstance(stored, Tensor)
    assert not stored.requires_grad
    if mode == "int8":
        assert (stored.dtype, stored.numel()) == (torch.int8, before.numel())
        bound = before.abs().amax(1, keepdim=True) * (1 / 127 / 2 + 2**-10)  # it quantises what float16 holds
    else:
        assert isinstance(stored, bnb.nn.Params4bit)
        assert (stored.dtype, stored.numel()) == (torch.uint8, (before.numel() + 1) // 2)
        assert (stored.quant_type, stored.quant_state.nested) == (mode[:3], mode.endswith("-dq"))
        # At most half the widest gap between two of the 16 values, times the largest weight of the block; with scales
        # of 8 bits these are off as well, by less than 1/64 of the largest.
        gap = get_4bit_type(mode[:3], device="cpu").unique().diff().max() / 2
        bound = before.abs().max() * (gap + (1 / 64 if mode.endswith("-dq") else 0))
    error = (float_weight(model[0]) - before).abs()
    assert (error <= bound * 1.01).all()
    assert error.max() > 0


@pytest.mark.parametrize("sizes", [(64, 48), (32, 32), (96, 8), (16, 24), (33, 17)])
def test_rows_of_any_length_are_computed_with_their_own_scales(sizes: tuple[int, int]) -> None:
    """A scale is that of 64 weights, which may be of several rows; some are a hundred times larger here."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(*sizes, bias=False))
    model[0].weight.data[::3] *= 100
    before = model[0].weight.detach().clone()
    convert(model, config("nf4"))
    blocks = before.flatten().split(64)
    largest = torch.cat([block.abs().max().expand(len(block)) for block in blocks]).view_as(before)
    gap = get_4bit_type("nf4", device="cpu").unique().diff().max() / 2
    error = (model(torch.eye(sizes[0])).T - before).abs()
    assert (error <= largest * gap * 1.01).all()


@pytest.mark.parametrize("mode", MODES)
def test_it_computes_what_the_quantised_weights_say(mode: str) -> None:
    """Three dimensions and an odd size, forward and backward, against a plain Linear with those weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 17))
    plain = copy.deepcopy(model)
    convert(model, config(mode))
    if mode != "int8-training":
        plain[0].weight.data = float_weight(model[0])
    x = torch.randn(3, 5, 33)
    ins = [x.clone().requires_grad_() for _ in range(2)]
    for net, inputs in zip((model, plain), ins, strict=True):
        net(inputs).square().mean().backward()
    near: Any = {"rtol": 0.02, "atol": 2e-4} if mode == "int8-training" else {"rtol": 1e-4, "atol": 1e-6}
    got, want = model(x), plain(x)
    assert (got - want).norm() <= (0.02 if mode == "int8-training" else 1e-5) * want.norm()
    torch.testing.assert_close(ins[0].grad, ins[1].grad, **near)
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad, **near)
    if mode == "int8-training":
        assert (model[0].weight.grad - plain[0].weight.grad).norm() <= 0.02 * plain[0].weight.grad.norm()
    assert ins[0].grad is not None
    assert ins[0].grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize("engine_mode", MODES)
def test_it_trains(engine_mode: str, build: Build) -> None:
    """In a Trainer: the loss falls, what is quantised stays, all else moves and keeps its dtype."""
    precision = build(config(engine_mode, "head"), strategy="single_device")
    model = Net()
    trainer(precision).fit(model, data())
    assert precision.conversion.converted == ("body.0", "body.3")
    assert precision.conversion.left == {"head": "trainer.precision.ignore_modules"}
    kinds = {"int8": EightBitLinear, "int8-training": EightBitTrainingLinear}
    assert {type(model.body[i]) for i in (0, 3)} == {kinds.get(engine_mode, FourBitLinear)}
    assert type(model.head) is nn.Linear
    assert model.losses[-1] < model.losses[0] / 2
    start = Net()
    convert(start, config(engine_mode, "head"))
    for (name, moved), (_, was) in zip(model.named_parameters(), start.named_parameters(), strict=True):
        frozen = engine_mode != "int8-training" and name in ("body.0.weight", "body.3.weight")
        assert torch.equal(moved, was) is frozen, name
        if not frozen:
            assert moved.dtype == torch.float32


def test_int8_training_computes_with_the_weights_of_now() -> None:
    """bitsandbytes' own layer stays with the first ones in evaluation, and while a gradient of zeros is there."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    model: Any = nn.Sequential(nn.Linear(16, 8))
    theirs: Any = nn.Sequential(bnb.nn.Linear8bitLt(16, 8))
    convert(model, config("int8-training"))
    for net, right in ((model, True), (theirs, False)):
        optimizer = torch.optim.SGD(net.parameters(), lr=30.0)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        fresh = nn.functional.linear(x, net[0].weight, net[0].bias)
        for training in (True, False):
            net.train(training).requires_grad_(training)  # evaluation with a gradient: theirs has no kernel on a CPU
            error = ((net(x) - fresh).norm() / fresh.norm()).item()
            assert (error < 0.02) is right, training


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize(("mode", "kind"), [*((mode, Net) for mode in MODES), ("nf4-dq", Late)])
def test_a_resumed_training_ends_with_the_same_bits(mode: str, kind: Any, tmp_path: Path, build: Build) -> None:
    """The checkpoint has the quantised weights with their scales, and they are read into quantised layers."""

    def train(epochs: int, start: Path | None, seed: int = 0) -> tuple[pl.LightningModule, pl.Trainer]:
        model = kind()
        if seed:  # a checkpoint replaces them
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(generator=torch.Generator().manual_seed(seed))
        to = trainer(build(config(mode), strategy="single_device"), max_epochs=epochs)
        to.fit(model, data(), ckpt_path=start)
        return model, to

    _, first = train(2, None)
    first.save_checkpoint(tmp_path / "half.ckpt")
    whole, _ = train(4, None)
    resumed, _ = train(4, tmp_path / "half.ckpt", seed=7)
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    expected = {"int8": torch.int8, "int8-training": torch.float32}
    assert state["body.0.weight"].dtype == expected.get(mode, torch.uint8)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("mode", FROZEN)
def test_a_float_checkpoint_is_quantised_when_it_is_read(mode: str) -> None:
    model: Any = Net()
    source: Any = Net()
    with torch.no_grad():
        source.body[0].weight.normal_()
    convert(model, config(mode, "head"))
    model(torch.randn(2, 16))  # bitsandbytes moves its scales in the first forward pass
    model.load_state_dict(source.state_dict())
    convert(source, config(mode, "head"))
    x = torch.randn(4, 16)
    assert torch.equal(model(x), source(x))


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    model, other = Net(), Net()
    convert(model, config("nf4"))
    convert(other, config("fp4-dq"))
    with pytest.raises(RuntimeError, match=r"body.0.weight is stored as fp4-dq, not nf4"):
        model.load_state_dict(other.state_dict())


def test_what_is_left_out_is_said() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 16)
            self.attention = nn.MultiheadAttention(16, 2)
            self.body = nn.Linear(16, 16)
            self.again = self.body
            self.out = nn.Linear(16, 8, bias=False)
            self.out.weight = self.embed.weight

    model = Tied()
    conversion = convert(model, config("nf4"))
    assert conversion is not None
    assert conversion.converted == ("body",)
    assert model.again is model.body
    assert conversion.left == {
        "attention.out_proj": "a NonDynamicallyQuantizableLinear, no plain Linear",
        "out": "its weight is also that of embed",
    }
    assert str(conversion).startswith("1 of 3 Linear layers converted; left as they are: attention.out_proj (")
    assert convert(model, config("nf4")) is None
    trained = Tied()
    assert convert(trained, config("int8-training")) is not None
    assert trained.out.weight is trained.embed.weight


@pytest.mark.parametrize(
    ("model", "ignore", "what", "fix"),
    [
        (nn.Sequential(nn.Conv1d(2, 2, 1)), (), "no Linear layer that can be converted", "bf16-mixed"),
        (nn.Sequential(nn.Linear(4, 4)), ("0",), "no Linear layer that can be converted", "bf16-mixed"),
        (nn.ModuleDict({"model": nn.ModuleDict({"lm_head": nn.Linear(4, 4)})}), ("lm_head",), "'lm_head'", "model.lm"),
        (nn.Sequential(nn.Linear(4, 4, device="meta")), (), "no Linear layer that can be converted", "bf16-mixed"),
    ],
)
def test_nothing_to_quantise_is_an_error(model: nn.Module, ignore: tuple[str, ...], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(model, config("nf4", *ignore))
    assert what in caught.value.what
    assert fix in str(caught.value.fix)


def test_torchs_fast_path_does_not_pass_the_layers_by(build: Build) -> None:
    """In evaluation torch's encoder layer would read the bytes of the weight itself."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    before = torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        want = model(x)
    try:
        build(config("int8"), strategy="single_device").convert_module(model)
        with torch.no_grad():
            assert (model(x) - want).norm() < 0.05 * want.norm()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_of_ones_own_trains_with_an_optimizer_made_before(mode: str, build: Build) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[build(config(mode, "head"), "fabric", strategy="ddp")])
    model: Any = Net()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=5e-3)
    module, optimizer = fabric.setup(model, optimizer)
    x, y = next(iter(data()))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    if mode == "int8-training":
        start: Any = Net()
        assert not torch.equal(model.body[0].weight, start.body[0].weight)


def ddp_rank(rank: int, mode: str) -> dict[str, Any]:
    """Each rank has its half of a batch; then one that has other weights."""
    torch.manual_seed(0)
    model = Net().body
    convert(model, config(mode))
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    wrapped(x.chunk(2)[rank]).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.manual_seed(rank)
    try:
        convert(nn.Sequential(nn.Linear(4, 4)), config(mode))
        said = "nothing"
    except ConfigError as error:
        said = error.what
    return {"grads": grads, "said": said}


@pytest.mark.parametrize("mode", ["nf4-dq", "int8-training"])
def test_two_ranks_of_ddp_have_the_gradients_of_one_process(mode: str) -> None:
    alone = Net().body
    convert(alone, config(mode))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    alone(x).square().mean().backward()
    ranks = run_ranks(ddp_rank, 2, mode)
    for name, parameter in alone.named_parameters():
        assert (parameter.grad is None) is (name not in ranks[0]["grads"])
        if parameter.grad is not None:
            assert parameter.grad.abs().sum() > 0
            for found in ranks:
                torch.testing.assert_close(found["grads"][name], parameter.grad, rtol=1e-4, atol=1e-6)
    refused = "rank 1 has other weights than rank 0 before they are quantised"
    assert ranks[0]["said"] == ("nothing" if mode == "int8-training" else refused)
