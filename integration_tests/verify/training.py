"""Small models under a mutation, on ranks and in one process, with the probe of `fairlead verify`."""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fairlead_lightning.verify.plan import Plan
from fairlead_lightning.verify.probe import LayoutProbe
from fairlead_strategies.ddp import DDPStrategyConfig
from fairlead_strategies.ddp_runtime import build as build_ddp
from fairlead_strategies.fsdp import FSDPStrategyConfig
from fairlead_strategies.fsdp2 import FSDP2StrategyConfig
from fairlead_strategies.fsdp_runtime import build as build_fsdp
from fairlead_strategies.hybrid import HybridStrategyConfig
from fairlead_strategies.mesh.build import build as build_mesh
from fairlead_strategies.tensor_parallel import TensorParallelStrategyConfig
from integration_tests.verify import mutations

STEPS = 3


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


class Sequences(Net):
    """Attention over eight tokens, which context parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
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


class Random(Net):
    """Noise that is no layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    one.__name__: one for one in (Net, Dead, Decays, Experts, Masked, Norm, Sequences, Stack, Random)
}


@dataclass(frozen=True)
class Case:
    """One training: a model, a strategy, settings of the Trainer, and what is done to it."""

    mutation: str
    model: str = "Net"
    strategy: str = "ddp"
    fields: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = None

    @property
    def reference(self) -> str:
        """Cases with the same one have the same reference."""
        return f"{self.model} {self.accumulate} {self.clip}"


def data(replica: int, replicas: int, tokens: tuple[int, ...], batch: int = 6) -> DataLoader[Any]:
    """A replica's share of each global batch; the same samples at every call."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(96, *tokens, size, generator=generator) for size in (6, 2))
    mine = torch.arange(96).view(-1, replicas, batch)[:, replica].flatten()
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size=batch)


def train_cases(rank: int, world_size: int, cases: list[Case], folder: str) -> list[str]:
    """On each rank: all cases one after another; what each ended with, an empty text where it did not fail."""
    torch.set_num_threads(1)
    return [_train(rank, world_size, case, Path(folder, str(i))) for i, case in enumerate(cases)]


def _train(rank: int, world_size: int, case: Case, folder: Path) -> str:
    torch.manual_seed(100 + rank)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    folder.mkdir(exist_ok=True)
    with getattr(mutations, case.mutation)():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=_strategy(case, world_size),
            plugins=[TorchElasticEnvironment()],
            enable_checkpointing=False,
            limit_val_batches=0,
            max_epochs=1,
            max_steps=STEPS,
            use_distributed_sampler=False,
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip,
            callbacks=[LayoutProbe(Plan("layout", str(folder)))],
            **quiet,
        )
        together = trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}  # both have every sample
        share = (0, 1) if together else (rank, world_size)
        trainer.fit(MODELS[case.model](), data(*share, (8,) if case.model in ("Stack", "Sequences") else ()))
    return ""


def _strategy(case: Case, world_size: int) -> Any:
    context = _stand_ins().context
    if case.strategy == "ddp":
        config = DDPStrategyConfig(**case.fields)
        return build_ddp(config, context(config, devices=world_size, world_size=world_size))
    if case.strategy == "fsdp":
        flat = FSDPStrategyConfig(**case.fields)
        return build_fsdp(flat, context(flat, devices=world_size, world_size=world_size))
    mesh = _MESH[case.strategy](**case.fields)
    return build_mesh(mesh, context(mesh, devices=world_size, world_size=world_size))


_MESH: dict[str, Any] = {
    "fsdp2": FSDP2StrategyConfig,
    "tensor_parallel": TensorParallelStrategyConfig,
    "hybrid": HybridStrategyConfig,
}


@functools.cache
def _stand_ins() -> ModuleType:
    """What the tests of the strategies build them with."""
    path = Path(__file__).parents[2] / "packages" / "strategies" / "tests" / "ranks.py"
    spec = importlib.util.spec_from_file_location("fairlead_strategies_test_ranks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class CaseBuild:
    """How the reference of a case is made."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def model(self) -> L.LightningModule:
        return MODELS[self._case.model]()

    def data(self) -> None:
        return None

    def trainer(self, precision: Any, accumulate: int, steps: int, callback: L.Callback) -> L.Trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return L.Trainer(
                accelerator="cpu",
                devices=1,
                precision=precision,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                limit_val_batches=0,
                max_epochs=1,
                max_steps=steps,
                accumulate_grad_batches=accumulate,
                gradient_clip_val=self._case.clip,
                callbacks=[callback],
            )
