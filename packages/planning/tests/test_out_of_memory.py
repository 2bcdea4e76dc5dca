"""What helps a job that ran out of memory: each number is that of the plan of the changed job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fairlead import StrategyConfigBase
from fairlead_planning.layouts import Layout
from fairlead_planning.memory import MemoryModel, fullest, memory
from fairlead_planning.out_of_memory import advice, layout_of, remedies
from fairlead_planning.profile import Profile
from fairlead_planning.trace import Work, trace
from fairlead_strategies.ddp import DDPStrategyConfig
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.fsdp import FSDPStrategyConfig
from fairlead_strategies.layout import Layout as Mesh
from fairlead_strategies.mesh.plugins import FSDP2StrategyConfig, HybridStrategyConfig


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def step(rows: int) -> Profile:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return trace(Work(Model, torch.zeros(rows, 256, dtype=torch.long), loss))


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return MemoryModel(step(4), step(8))


DDP = Layout("ddp", Mesh(replicate=4), micro_batch=12)


def test_each_remedy_saves_what_the_plan_of_the_changed_job_says(model: MemoryModel) -> None:
    now = fullest(model.use(DDP)).total
    found = {each.what: each for each in remedies(model, DDP)}
    assert any("a batch of 6 on each rank, with accumulate_grad_batches: 2" in what for what in found)
    for each in found.values():
        assert each.saves == pytest.approx(now - each.bytes)
        assert each.layout.global_batch == DDP.global_batch, "the training stays the same"
        assert each.bytes < now
    half = next(each for what, each in found.items() if what.startswith("a batch of 6"))
    traced = fullest(memory(step(6), replace(DDP, micro_batch=6, accumulation=2))).total
    assert half.bytes == pytest.approx(traced, rel=0.01), "as if the smaller batch itself had been traced"
    together = list(found.values())[-1]
    assert together.what == "together: a smaller batch, activation checkpointing, fsdp2"
    assert together.bytes < min(each.bytes for each in list(found.values())[:-1])


def test_what_cannot_help_is_not_named(model: MemoryModel) -> None:
    alone = Layout("single_device", Mesh(), micro_batch=1, checkpointing="full")
    words = [each.what for each in remedies(MemoryModel(step(2), step(4), "cpu"), alone)]
    assert not any("a batch of" in what or "recomputing" in what for what in words)
    assert "fsdp2 on two ranks" in words


def test_the_lines_say_by_how_much_and_what_fits(model: MemoryModel) -> None:
    sizes = sorted(each.bytes for each in remedies(model, DDP))
    first, *rest = advice(model, DDP, capacity=(sizes[0] + sizes[1]) / 2)
    assert first.startswith("the plan of this job: a rank needs ")
    assert "activations" in first
    assert sum(line.endswith("which fits") for line in rest) == 1
    assert sum(line.endswith("which does not fit yet") for line in rest) == len(sizes) - 1
    assert all("less" in line for line in rest)


@pytest.mark.parametrize(
    ("strategy", "sharding", "mesh"),
    [
        (None, "none", Mesh(replicate=8)),
        (DDPStrategyConfig(), "none", Mesh(replicate=8)),
        (FSDP2StrategyConfig(replicate=2), "full", Mesh(replicate=2, shard=4, auto="shard")),
        (FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP"), "gradients", Mesh(shard=8)),
        (FSDPStrategyConfig(sharding_strategy="NO_SHARD"), "none", Mesh(replicate=8)),
        (DeepSpeedStrategyConfig(stage=1), "optimizer", Mesh(shard=8)),
        (HybridStrategyConfig(tensor=2, pipeline=2), "full", Mesh(pipeline=2, shard=2, tensor=2, auto="shard")),
    ],
)
def test_a_strategy_of_a_job_file_is_a_layout(strategy: StrategyConfigBase | None, sharding: str, mesh: Mesh) -> None:
    found = layout_of(strategy, 8, 4)
    assert (found.sharding, found.mesh, found.devices) == (sharding, mesh, 8)
    assert found.micro_batch * found.accumulation == 4, "the batch of a rank, in micro-batches where there are stages"
    assert found.micro_batch == (1 if mesh.pipeline > 1 else 4)
