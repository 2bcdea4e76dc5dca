"""A traced step: its operators and tensors, for other micro-batches, and with activations that are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plan.models import SMALL
from fairlead.errors import ConfigError
from fairlead_distributed.activation_checkpointing import checkpoint_layers
from fairlead_planning.layouts import Layout
from fairlead_planning.memory import memory
from fairlead_planning.profile import Profile
from fairlead_planning.trace import Work, trace, trace_rows
from fairlead_planning.variants import checkpointed, with_rows
from fairlead_strategies.layout import Layout as Mesh


def work(name: str, rows: int, precision: str = "32-true", device: str = "cuda") -> Work:
    build, sample, loss = SMALL[name]
    return Work(build, sample(rows), loss, precision=precision, device=device)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["gpt", "llama", "vit", "resnet", "convolutions"])
def test_one_trace_is_right_for_other_numbers_of_rows(name: str, precision: str) -> None:
    one, two = trace_rows(work(name, 4, precision), 4)
    assert two is not None
    found, real = with_rows(one, two, 6), trace(work(name, 6, precision))
    for a, b in zip(real.storages, found.storages, strict=True):
        assert (a.bytes, a.born, a.died, a.kind) == pytest.approx((b.bytes, b.born, b.died, b.kind))
    for c, d in zip(real.kernels, found.kernels, strict=True):
        assert (c.name, c.shape) == (d.name, d.shape)
        assert (c.flops, c.bytes) == pytest.approx((d.flops, d.bytes))
    assert (real.rows, real.tokens, real.width_bytes) == (found.rows, found.tokens, found.width_bytes)


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_activations_that_are_computed_again_are_those_of_torchs_own_checkpoints(name: str) -> None:
    build, sample, loss = SMALL[name]

    def again() -> nn.Module:
        model = build()
        blocks = next(one for one in model.children() if isinstance(one, nn.ModuleList))
        checkpoint_layers(model, {type(blocks[0])})
        return model

    real = trace(Work(again, sample(4), loss, device="cpu"))
    found = checkpointed(trace(work(name, 4, device="cpu")), "full")
    ddp = Layout("ddp", Mesh(replicate=2))
    assert memory(found, ddp, "cpu")[0].total == pytest.approx(memory(real, ddp, "cpu")[0].total, rel=0.002)


def test_a_product_has_its_shape_and_its_flops() -> None:
    profile = trace(Work(lambda: nn.Linear(32, 64, bias=False), torch.zeros(8, 32), lambda model, x: model(x).sum()))
    products = [(one.phase, one.shape, one.flops) for one in profile.kernels if one.kind == "matmul"]
    assert products == [("forward", (1, 8, 64, 32), 2 * 8 * 64 * 32), ("backward", (1, 64, 32, 8), 2 * 8 * 64 * 32)]
    assert [one.bytes for one in profile.storages if one.kind == "optimizer" and one.bytes > 4] == [8192, 8192]


def test_autocast_computes_as_on_a_gpu() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.layer(x).dtype)
            seen.append(self.norm(self.layer(x)).dtype)
            y = self.layer(x).view(2, 1, 2, 8)
            seen.append(F.scaled_dot_product_attention(y, y, y, dropout_p=0.5).dtype)
            seen.append(self.layer(x).softmax(-1).dtype)
            out: Tensor = self.norm(self.layer(x))
            return out

    seen: list[torch.dtype] = []
    trace(Work(Net, torch.zeros(2, 2, 8), lambda model, x: model(x).sum(), precision="bf16-mixed"))
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]


def test_experts_get_their_part_of_the_tokens() -> None:
    profile = trace(work("mixture", 8))
    rows = [k.shape[1] for k in profile.kernels if k.expert and k.kind == "matmul" and k.phase == "forward" and k.shape]
    assert len(rows) == 3 * 4 * 2
    assert sum(rows) == 3 * 2 * (8 * 64 * 2)  # layers x products x (tokens x experts of each)
    assert max(rows) == min(rows)


def test_memory_is_never_taken_for_the_weights() -> None:
    """A model of 400 billion parameters is traced in this process."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(65536, 65536, bias=False) for _ in range(94))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    profile = trace(Work(Wide, torch.zeros(1, 65536), lambda model, x: model(x).sum(), precision="bf16-true"))
    assert profile.parameters == 94 * 65536**2 > 400e9


def test_a_model_that_exists_is_not_touched() -> None:
    model = SMALL["convolutions"][0]()
    before = {name: (one, one.clone()) for name, one in model.state_dict(keep_vars=True).items()}
    trace(Work(model, SMALL["convolutions"][1](2), SMALL["convolutions"][2]))
    for name, one in model.state_dict(keep_vars=True).items():
        assert one is before[name][0]
        assert torch.equal(one, before[name][1])
        assert one.grad is None


def asks_for_a_count(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    part: Tensor = out[: int((out > 0).sum())].sum()
    return part


def test_what_the_weights_decide_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        trace(Work(lambda: nn.Linear(4, 4), torch.zeros(4, 4), asks_for_a_count))
    assert "cannot be traced without its data" in str(caught.value)
    assert "do:" in str(caught.value)


def test_a_loss_that_is_looked_at_does_not_end_the_trace() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        value: Tensor = model(x).sum()
        if torch.isnan(value) or not torch.isfinite(value).all():
            raise RuntimeError("diverged")
        float(value.detach())
        return value

    assert isinstance(trace(Work(lambda: nn.Linear(4, 4), torch.zeros(4, 4), loss)), Profile)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_what_is_16_bits_throughout_keeps_nothing_in_32(name: str) -> None:
    use = memory(trace(work(name, 2, "bf16-true")), Layout("single_device"), "cpu")[0]
    assert use.optimizer == pytest.approx(2 * use.parameters, rel=1e-3)
    masters = memory(trace(work(name, 2, "bf16-cast")), Layout("single_device"), "cpu")[0]
    assert masters.optimizer == pytest.approx(4 * use.parameters, rel=1e-3)


def test_a_layer_of_an_lstm_has_its_flops_and_what_it_keeps() -> None:
    rows, length, width = 4, 10, 32
    batch = torch.zeros(rows, length, width)
    profile = trace(Work(lambda: nn.LSTM(width, width, batch_first=True), batch, lambda model, x: model(x)[0].sum()))
    products = 2 * rows * length * (4 * width) * (2 * width)
    assert sum(one.flops for one in profile.kernels if one.kind == "matmul") == 3 * products
    assert max(one.bytes for one in profile.storages if one.kind == "activation") == 64 * rows * length * width


def test_sizes_that_follow_from_numbers_are_refused() -> None:
    def packed(model: Any, batch: Any) -> Tensor:
        series, lengths = batch
        out = model(nn.utils.rnn.pack_padded_sequence(series, lengths, batch_first=True))
        loss: Tensor = out[0].data.sum()
        return loss

    with pytest.raises(ConfigError, match="_pack_padded_sequence"):
        trace(Work(lambda: nn.LSTM(8, 8, batch_first=True), (torch.zeros(2, 5, 8), torch.tensor([5, 3])), packed))
