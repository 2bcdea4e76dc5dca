"""The small models that are verified."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor, nn


class Net(L.LightningModule):
    """A residual network with dropout; Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + self.dropout(block(x))
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.forward(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Decays(Net):
    """Weight decay on matrices, told by their shape."""

    def configure_optimizers(self) -> Any:
        every = list(self.parameters())
        groups = [
            {"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.02)


class FlatDecays(Decays):
    """Made where parameters are partitioned at once (DeepSpeed's stage 3): on several ranks all have one dimension."""

    def configure_optimizers(self) -> Any:
        if not dist.is_initialized():
            return super().configure_optimizers()
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.0)


class Sequences(Net):
    """Attention over eight tokens, which context parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def embedded(self, x: Tensor) -> Tensor:
        out: Tensor = self.inlet(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        for block in self.blocks:
            x = x + block(x)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 6).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.head(x + y.transpose(1, 2).reshape(x.shape))
        return out.clone()  # torch warns of an output that is a view

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss: Tensor = nn.functional.mse_loss(self(x), y)  # the module's own call is what is divided
        return loss


class Counted(Sequences):
    """Adds to each token what it has learned of its position, in ways that are right where a sequence is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(9, 12)

    def embedded(self, x: Tensor) -> Tensor:
        places: Tensor = self.places(self.numbers(x.shape[1]))
        return super().embedded(x) + places

    def numbers(self, length: int) -> Tensor:
        return torch.arange(length)


class CountedFromOne(Counted):
    def numbers(self, length: int) -> Tensor:
        return torch.arange(1, length + 1)


class Dead(Net):
    """Its loss is a number that no parameter has a part in, as the logarithm of a vocabulary's size."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * super().forward(x)


class Masked(Net):
    """A mean over the samples that are not masked, of which the replicas have different numbers."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        off = (self(x) - y).square().mean(dim=1)
        kept = x[:, 0] > 0.2
        mean: Tensor = off[kept].sum() / kept.sum().clamp(min=1)
        return mean


class Norm(Net):
    """Batch norm over the batch of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.inlet(x)))
        for block in self.blocks:  # used, and without an effect
            out = out + 0.0 * block(self.inlet(x)).sum()
        return out


class Block(nn.Module):
    """Two layers that are split as one, on each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return out


class Stack(Net):
    """Sequences of four tokens, through blocks whose layers can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


SPLIT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SEQUENCE = {**SPLIT, "blocks.*.norm": "sequence", "blocks.0": "sequence_begin", "norm": "sequence_end"}


class Random(Net):
    """Noise that is no layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Outlet(nn.Module):
    """The way back to the width of the input, by the weights of the inlet."""

    def __init__(self, inlet: nn.Linear) -> None:
        super().__init__()
        self.inlet = inlet

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inlet.weight.T)


class Stages(Net):
    """A network that says what its layers are; the first and the last but one share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 12, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 2)
        self.outlet = Outlet(self.inlet)

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.inlet, *self.blocks, self.outlet, self.head]

    def pipeline_loss(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, y)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return self.pipeline_loss(self(x), y)


class MaskedStages(Stages):
    """A mean over the samples that are not masked, without a word of how many of a micro-batch those are."""

    def pipeline_loss(self, output: Tensor, y: Tensor) -> Tensor:
        kept = y[:, 0] > -0.7
        mean: Tensor = (output - y).square().mean(dim=1)[kept].sum() / kept.sum().clamp(min=1)
        return mean


class Mixture(nn.Module):
    """Of four experts each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(4))
        self.top_k = 2

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        out = 0 * x
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return out


class Experts(Net):
    """A mixture of experts as its block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixture()])


class Mixed(Stages):
    """Layers with a block that can be split and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Mixture()


class Attention(nn.Module):
    """Causal attention of two heads, added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 6).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).reshape(x.shape)


class SequenceStages(Stages):
    """Layers with attention over eight tokens in both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Block(), Attention()])


class Averaging(L.LightningModule):
    """Keeps a moving average of its inputs, of which each rank has other ones: a hook reduces it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.average.lerp_(self.reduced(batch[0].flatten(0, -2).mean(0)).to(self.average), 0.1)
        loss: Any = super().training_step(batch, index)
        found: Tensor = loss
        return found

    def reduced(self, mean: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean = mean / torch.distributed.get_world_size()
        return mean


class Averaged(Averaging, Net):
    """The smallest one of these."""


class Scheduled(L.LightningModule):
    """Its learning rate rises from step to step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ScheduledNet(Scheduled, Net):
    """The smallest one of these."""


class ScaledRate(Net):
    """Its learning rate is that of one process times the ranks: the linear scaling rule."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.005 * self.trainer.world_size)


class RootOfRanks(Net):
    """One group alone has a rate by the root of the ranks, which it has asked for when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def configure_optimizers(self) -> Any:
        head = {"params": self.head.parameters(), "lr": 0.01 * self.ranks**0.5}
        rest = [p for name, p in self.named_parameters() if not name.startswith("head")]
        return torch.optim.Adam([{"params": rest}, head], lr=0.01)


class GradualWarmup(Net):
    """From the rate of one process to that of all ranks (arXiv:1706.02677, section 2.2)."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.005)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + (ranks - 1) * min(1.0, step / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rising, "interval": "step"}}


class WarmingUp(Net):
    """Its first steps are so small that float32 hardly shows them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-9)


class LaterRandom(L.LightningModule):
    """Draws random numbers from its second step on."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x + (0.1 * torch.randn_like(x) if self.global_step else 0.0))
        return out


class LaterRandomNet(LaterRandom, Net):
    """The smallest one of these."""


class OwnGenerator(Net):
    """Noise by a generator of its own, which is seeded the same in each training."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.drawn)
        return super().forward(x + 0.1 * noise.to(x))


class Complex(Net):
    """A part of the weights is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x * self.phases).abs().sum(-1, keepdim=True)


class Normalized(Net):
    """Convolutions whose bias a norm takes away again: its gradient is zero, and Adam moves it by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.InstanceNorm1d(4), nn.Tanh())
        self.inlet = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.convolution(x.unsqueeze(1)).flatten(1))


class WholeBatch(Net):
    """A loss that looks at all samples of a replica's batch: joined batches are another loss."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        out = self(x)
        return nn.functional.mse_loss((out - out.mean(0)) / (out.std(0) + 0.1), y)


class Counting(Norm):
    """Batch norm, and a weight of the loss that is made of the number of the batch; it counts its steps."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, index) * (1 + 0.1 * index)


class HeadAlone(Net):
    """Gradients reach all of it, and the optimizer has the head alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.02)


_ALL = (
    Averaged,
    Complex,
    Counted,
    CountedFromOne,
    Counting,
    GradualWarmup,
    HeadAlone,
    LaterRandomNet,
    Normalized,
    OwnGenerator,
    RootOfRanks,
    ScaledRate,
    ScheduledNet,
    WarmingUp,
    WholeBatch,
    Net,
    Dead,
    Decays,
    FlatDecays,
    Experts,
    Masked,
    MaskedStages,
    Mixed,
    Norm,
    Random,
    Sequences,
    SequenceStages,
    Stack,
    Stages,
)
_KINDS = (Averaging, LaterRandom, Scheduled)
"""What is added to a model: `Averaging of Stack`."""


def _both(kind: type[L.LightningModule], base: type[L.LightningModule]) -> type[L.LightningModule]:
    return type(f"{kind.__name__}{base.__name__}", (kind, base), {})


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    **{one.__name__: one for one in _ALL},
    **{
        f"{kind.__name__} of {base.__name__}": _both(kind, base)
        for kind in _KINDS
        for base in (Net, Stack, Sequences, Experts, Stages)
    },
}
