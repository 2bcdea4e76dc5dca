"""What the strategies say of an exact resume, and FSDP2's word kept on three ranks."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fairlead.exactness import Verdict, device_reasons, verdict
from fairlead.plugins import PluginManager
from fairlead.testing import minimal_resolution
from fairlead_distributed.testing import run_ranks
from fairlead_strategies import FSDP2StrategyConfig, FSDPStrategyConfig

RANKS = 3
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("ranks", "strategy", "expected"),
    [
        (1, "single_device", "exact"),
        (2, "ddp", "exact"),
        (4, "ddp", "exact"),
        (4, "ddp_find_unused_parameters_true", "exact"),
        (4, {"name": "ddp", "exact_reduction": "off"}, "not exact"),
        (4, {"name": "ddp", "ddp_comm_hook": "powersgd"}, "not exact"),
        (4, "fsdp2", "exact"),
        (4, {"name": "fsdp2", "state_dict_type": "sharded"}, "not known"),
        (4, "fsdp", "exact"),
        (4, {"name": "fsdp2", "tensor": 2}, "exact"),
        (4, {"name": "fsdp2", "process_group_backend": "nccl"}, "not known"),
        (2, {"name": "fsdp2", "process_group_backend": "nccl"}, "exact"),
        (4, "deepspeed_stage_2", "exact"),
        (4, "deepspeed_stage_3_offload", "exact"),
        (4, "deepspeed_stage_3_offload_nvme", "not known"),
        (2, {"name": "deepspeed", "process_group_backend": "nccl"}, "not known"),
        (2, {"name": "deepspeed", "stage": 3, "load_full_weights": True}, "not exact"),
        (2, {"name": "deepspeed", "config": {"zero_optimization": {"stage": 2}}}, "exact"),
        (2, {"name": "deepspeed", "config": {"optimizer": {"type": "OneBitAdam"}}}, "not known"),
    ],
)
def test_what_strategies_say(ranks: int, strategy: Any, expected: Verdict) -> None:
    """What nobody has shown is not called exact; DDP's and FSDP2's words are shown below and in their own tests."""
    plugins = PluginManager()
    resolution = minimal_resolution(plugins, devices=ranks, strategy=strategy, accelerator="cpu")
    assert verdict(device_reasons(resolution, plugins)) == expected


@pytest.mark.parametrize(
    ("ranks", "backend", "strategy", "expected"),
    [
        (2, "gloo", {"exact_reduction": "off"}, "exact"),  # a + b = b + a
        (3, "gloo", {}, "exact"),
        (3, "gloo", {"exact_reduction": "off"}, "not exact"),
        (3, "gloo", {"exact_reduction": "off", "find_unused_parameters": True}, "exact"),
        (3, "gloo", {"exact_reduction": "off", "find_unused_parameters": True, "static_graph": True}, "not exact"),
        (3, "gloo", {"ddp_comm_hook": "fp16"}, "not exact"),
        (3, "gloo", {"ddp_comm_hook": "fp16", "find_unused_parameters": True}, "exact"),
        (3, "gloo", {"process_group_backend": "mpi"}, "not exact"),
        (2, "gloo", {"ddp_comm_hook": "powersgd"}, "not exact"),
        (2, "nccl", {}, "exact"),
        (3, "nccl", {}, "not exact"),
        (3, "nccl", {"exact_reduction": "on"}, "exact"),
        (3, "nccl", {"process_group_backend": "gloo"}, "exact"),
    ],
)
def test_what_ddp_says(ranks: int, backend: str, strategy: dict[str, Any], expected: Verdict) -> None:
    """More than two ranks add in one order only where something keeps it."""
    plugins = PluginManager()
    resolution = minimal_resolution(plugins, devices=ranks, strategy={"name": "ddp", **strategy}, accelerator="cpu")
    resolution = dataclasses.replace(resolution, backend=strategy.get("process_group_backend", backend))
    reasons = [one for one in device_reasons(resolution, plugins) if "strategy" in one.what]
    assert verdict(reasons) == expected, reasons


def test_shared_batch_statistics_are_exact() -> None:
    plugins = PluginManager()
    resolution = minimal_resolution(
        plugins, devices=2, strategy="ddp", accelerator="cpu", layer_sync="torch_sync_batchnorm"
    )
    assert device_reasons(resolution, plugins) == []


class Net(pl.LightningModule):
    """Layers of odd sizes, two of which are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(33, 77), nn.Tanh(), nn.Linear(77, 33)) for _ in range(2))
        self.out = nn.Linear(33, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = (self.out(x) - y).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(epochs: int, kind: str, clip: float | None, resumed: Path | None = None) -> tuple[pl.Trainer, list[Tensor]]:
    """A fit on a mesh, and this rank's shards."""
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.insert(0, here)
    config = FSDP2StrategyConfig() if kind == "fsdp2" else FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP")
    context = importlib.import_module("ranks").context(config, "trainer", devices=RANKS, world_size=RANKS)
    net = Net()
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, plugins=[TorchElasticEnvironment()], max_epochs=epochs, logger=False,
        strategy=importlib.import_module("fairlead_strategies.mesh_build").build(config, context),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=clip,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 33, generator=generator), torch.randn(48, 1, generator=generator))
    trainer.fit(net, DataLoader(data, batch_size=4), ckpt_path=resumed)
    parameters: list[Any] = list(net.parameters())
    return trainer, [parameter.to_local().detach().clone() for parameter in parameters]


def survives(rank: int, folder: str, kind: str, clip: float | None) -> bool:
    """Whether two epochs end with the same shards when the second is a resumed run."""
    path = Path(folder, "first.ckpt")
    straight = fit(2, kind, clip)[1]
    first, early = fit(1, kind, clip)
    first.save_checkpoint(path)
    resumed = fit(2, kind, clip, path)[1]
    assert not all(map(torch.equal, early, straight)), "the second epoch changed nothing"
    return all(map(torch.equal, resumed, straight))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "clip"), [("fsdp2", None), ("fsdp", 0.5)])
def test_shards_are_exact_on_a_cpu(tmp_path: Path, kind: str, clip: float | None) -> None:
    """The checkpoint holds weights and moments as they are, and units reduce alike whenever a run was started."""
    assert run_ranks(survives, RANKS, str(tmp_path), kind, clip, env=LAUNCHER, timeout=300) == [True] * RANKS
