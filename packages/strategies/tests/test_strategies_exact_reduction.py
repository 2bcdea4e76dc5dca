"""DDP's order of reduction on three ranks: the Trainer's, Fabric's, and Lightning's own strategy."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fairlead_distributed import register_exact_reduction
from fairlead_distributed.testing import run_ranks
from fairlead_strategies import DDPStrategyConfig

RANKS = 3
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


class Net(pl.LightningModule):
    """Layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(17, 101), nn.Tanh(), nn.Linear(101, 73), nn.Tanh(), nn.Linear(73, 5))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss: Tensor = (self.layers(x) - y).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Plain(pl.Callback):
    """What the callback of a plain `train.py` does with Lightning's own strategy."""

    def __init__(self) -> None:
        self.registered: list[bool] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model: Any = trainer.strategy.model
        self.registered = [register_exact_reduction(model, auto=True) for _ in range(2)]


def build(engine: str, **fields: Any) -> Any:
    """The strategy of a config, as the core builds it."""
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.insert(0, here)
    config = DDPStrategyConfig(**fields)
    context = importlib.import_module("ranks").context(config, engine)
    return importlib.import_module("fairlead_strategies.ddp_runtime").build(config, context)


def hook(model: DistributedDataParallel) -> str | None:
    log: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return log.get("comm_hook")


def fit(strategy: Any, epochs: int, resumed: Path | None = None, *callbacks: pl.Callback) -> tuple[pl.Trainer, Net]:
    net = Net()
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, plugins=[TorchElasticEnvironment()], max_epochs=epochs,
        callbacks=list(callbacks), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(36, 17, generator=generator), torch.randn(36, 5, generator=generator))
    # One order in all epochs: the sampler that Lightning makes of this shuffles by the epoch alone.
    trainer.fit(net, DataLoader(data, batch_size=4), ckpt_path=resumed)
    return trainer, net


def fitted_hook(strategy: Any) -> str | None:
    seen: list[str | None] = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            model: Any = trainer.strategy.model
            seen.append(hook(model))

    fit(strategy, 1, None, Look())
    return seen[0]


def fabric_hook(**fields: Any) -> str | None:
    strategy = build("fabric", **fields)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=RANKS, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    module: Any = fabric.setup_module(nn.Linear(2, 2))
    return hook(module._forward_module)


def survives(path: Path, **fields: Any) -> bool:
    """Whether two epochs end with the same weights when the second is a resumed run."""
    first, _ = fit(build("trainer", **fields), 1)
    first.save_checkpoint(path)
    straight = fit(build("trainer", **fields), 2)[1].state_dict()
    resumed = fit(build("trainer", **fields), 2, path)[1].state_dict()
    return all(torch.equal(straight[key], resumed[key]) for key in straight)


@dataclass
class Found:
    """What one rank saw: names of hooks, what was registered, and whether a resume was exact."""

    hooks: dict[str, str | None]
    plain: list[bool]
    exact: dict[str, bool]


def scenarios(rank: int, folder: str) -> Found:
    plain = Plain()
    fit(LightningDDPStrategy(process_group_backend="gloo"), 1, None, plain)
    return Found(
        {
            "auto": fitted_hook(build("trainer")),
            "on": fitted_hook(build("trainer", exact_reduction="on", find_unused_parameters=True)),
            "off": fitted_hook(build("trainer", exact_reduction="off")),
            "auto, fp16": fitted_hook(build("trainer", ddp_comm_hook="fp16")),
            "auto, unused parameters": fitted_hook(build("trainer", find_unused_parameters=True)),
            "Fabric, auto": fabric_hook(),
            "Fabric, off": fabric_hook(exact_reduction="off"),
        },
        plain.registered,
        {
            "auto": survives(Path(folder, "auto.ckpt")),
            "off": survives(Path(folder, "off.ckpt"), exact_reduction="off"),
        },
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By rank."""
    return run_ranks(scenarios, RANKS, str(tmp_path_factory.mktemp("ckpt")), env=LAUNCHER, timeout=300)


@pytest.mark.slow
def test_the_field_chooses_the_hook(found: list[Found]) -> None:
    for one in found:
        assert one.hooks == {
            "auto": "exact_reduction_hook",
            "on": "exact_reduction_hook",
            "off": None,
            "auto, fp16": "fp16_compress_hook",
            "auto, unused parameters": None,
            "Fabric, auto": "exact_reduction_hook",
            "Fabric, off": None,
        }


@pytest.mark.slow
def test_a_resumed_fit_ends_with_the_same_bits(found: list[Found]) -> None:
    """Only with the hook: DDP rebuilds its buckets after the first step of every start."""
    for one in found:
        assert one.exact == {"auto": True, "off": False}


@pytest.mark.slow
def test_lightnings_own_strategy_takes_the_hook_once(found: list[Found]) -> None:
    for one in found:
        assert one.plain == [True, False]
