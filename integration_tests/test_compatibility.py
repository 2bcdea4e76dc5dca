"""Every cell of the compatibility table: those that run here are trained, the others say what they need, or why not."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from docs.compatibility import AXES, Cell, cell, cells, choices, settings
from docs.gen_reference import first_party_plugins
from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead.plugins import PluginManager
from fairlead_distributed.testing import run_ranks

STEPS = 2
# Lightning recognises ranks that an elastic agent has started.
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


@cache
def plugins() -> PluginManager:
    return first_party_plugins()


class Block(nn.Module):
    """Two linear layers and a batch normalisation, added to what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Net(L.LightningModule):
    """Blocks in a chain, which says itself how it is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.BatchNorm1d(16)  # no precision stores it in integers
        self.losses: list[float] = []

    def pipeline_layers(self) -> list[nn.Module]:
        return [*self.blocks, self.head]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor]) -> Tensor:
        dtype = next(one.dtype for one in self.parameters() if one.is_floating_point())
        x, y = (part.to(dtype) for part in batch)
        loss = self.pipeline_loss(self(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trained(pair: Cell, folder: str, accelerator: str) -> dict[str, Any]:
    """What became of a short training with the two choices of a cell."""
    fields: dict[str, Any] = {"max_epochs": 10, "enable_progress_bar": False, "enable_model_summary": False}
    fields |= {
        **settings(pair.strategy, pair.axis, pair.choice, plugins()),
        "accelerator": accelerator,
        "max_steps": STEPS,
    }
    fields["log_every_n_steps"] = 1  # Lightning warns of more than there are batches
    if pair.strategy == "tensor_parallel":
        fields["strategy"]["plan"] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    if pair.choice == "remote":
        fields["checkpoint_io"] = {"name": "remote", "url": f"file://{folder}/store"}
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(128, 16, generator=generator), torch.randn(128, 16, generator=generator))
    net = Net()
    name = f"{pair.strategy}-{pair.axis}-{pair.choice}"
    trainer = Trainer(TrainerConfig.model_validate(fields), run=RunConfig(name=name, dir=folder))
    trainer.fit(net, DataLoader(data, batch_size=16))
    return {"losses": net.losses, "steps": trainer.global_step, "strategy": type(trainer.strategy).__name__}


def rank_main(rank: int, mine: list[Cell], folder: str, accelerator: str) -> list[dict[str, Any] | str]:
    """Trains one cell after the other; what one of them raises is told, and the others go on."""
    found: list[dict[str, Any] | str] = []
    warnings.simplefilter("default")  # much is said by rank 0 only: as an error it would leave the others waiting
    for pair in mine:
        try:
            found.append(trained(pair, folder, accelerator))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def takers(accelerator: str) -> list[str]:
    """The strategies that go together with an accelerator."""
    found = [(one, cell(one, "accelerator", accelerator, plugins())) for one in choices("strategy", plugins())]
    return [strategy for strategy, one in found if one.state != "refused"]


def train_all(mine: list[Cell], folder: Path, accelerator: str, *, init: bool) -> None:
    """Trains the cells of one strategy in one start of its ranks: the loss is a number, and it moves."""
    ranks = settings(mine[0].strategy, AXES[0], accelerator, plugins())["devices"]
    several = ranks > 1 and init
    results = run_ranks(rank_main, ranks, mine, str(folder), accelerator, timeout=300, env=LAUNCHER, init=several)
    wrong = []
    for one, *by_rank in zip(mine, *results, strict=True):
        for rank, found in enumerate(by_rank):
            told = found if isinstance(found, str) else str(found["losses"])
            if isinstance(found, str) or found["steps"] != STEPS or not _moves(found["losses"]):
                wrong.append(f"{one.axis} {one.choice}, rank {rank}: {told}")
    assert not wrong, "\n".join(wrong)


def mine(strategy: str) -> list[Cell]:
    """The cells of one strategy."""
    pairs = [(axis, choice) for axis in AXES for choice in choices(axis, plugins())]
    return [cell(strategy, *pair, plugins()) for pair in pairs]


@pytest.mark.full
@pytest.mark.parametrize("strategy", takers("cpu"))
def test_every_cell_that_is_said_to_run_trains_here(strategy: str, tmp_path: Path) -> None:
    train_all([one for one in mine(strategy) if one.state == "runs"], tmp_path, "cpu", init=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("strategy", takers("cuda"))
def test_every_cell_trains_on_cuda(strategy: str, tmp_path: Path) -> None:
    """Those that need CUDA, and those that a CPU runs as well; over nccl where there are several ranks."""
    ranks = settings(strategy, AXES[0], "cuda", plugins())["devices"]
    if ranks > torch.cuda.device_count():
        pytest.skip(f"{strategy} takes {ranks} devices")
    fit = [one for one in mine(strategy) if one.accelerator in ("cpu", "cuda") and one.choice != "cpu"]
    train_all(fit, tmp_path, "cuda", init=False)


def _moves(losses: list[float]) -> bool:
    return len(set(losses)) > 1 and all(abs(loss) < 1e6 for loss in losses)


def test_no_cell_is_left_out_and_each_refusal_has_a_reason_and_an_alternative() -> None:
    """A new strategy, or a new choice of another axis, has its cells by itself; what is refused says what works."""
    found = {(one.strategy, one.axis, one.choice): one for one in cells(plugins())}
    wanted = {(s, axis, c) for s in choices("strategy", plugins()) for axis in AXES for c in choices(axis, plugins())}
    assert found.keys() == wanted
    unexplained = [key for key, one in found.items() if one.state == "refused" and not (one.reason and one.instead)]
    assert not unexplained
    assert {one.strategy for one in found.values() if one.state != "refused"} == set(choices("strategy", plugins()))
