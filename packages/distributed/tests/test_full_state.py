"""Whole parameters and gradients of modules that are split over real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError
from fairlead_distributed import get_rank
from fairlead_distributed.full_state import full_buffers, full_gradients, full_parameters, placements
from fairlead_distributed.testing import run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    # 5 outputs: the last rank's shard is smaller.
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5)).double()


def trained(module: nn.Module) -> nn.Module:
    module(torch.arange(12.0, dtype=torch.float64).view(3, 4)).square().sum().backward()
    return module


def split(rank: int, how: str) -> dict[str, Any]:
    module = net()
    if how == "ddp":
        module = DistributedDataParallel(module)
    elif how == "fully_shard":
        fully_shard(module[0])  # type: ignore[index]
        fully_shard(module)
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trained(module)
    found = {"weights": full_parameters(module), "gradients": full_gradients(module)}
    return {**found, "buffers": full_buffers(module), "placements": placements(module)}


@pytest.mark.parametrize("how", ["ddp", "fully_shard", "tensor"])
def test_a_split_module_is_put_together(how: str) -> None:
    """Names, values and gradients are those of the plain module, on each rank."""
    plain = trained(net())
    for found in run_ranks(split, 2, how):
        for what, wanted in (("weights", full_parameters(plain)), ("gradients", full_gradients(plain))):
            assert list(found[what]) == list(wanted)
            assert sum(float(one.abs().sum()) for one in wanted.values()) > 1
            for name, tensor in wanted.items():
                torch.testing.assert_close(found[what][name], tensor, rtol=1e-8, atol=1e-10)
        assert set(found["buffers"]) == set(full_buffers(plain))
        shards = {"ddp": {}, "fully_shard": 6, "tensor": 4}[how]
        assert found["placements"] == {} if how == "ddp" else len(found["placements"]) == shards
    if how == "tensor":
        assert found["placements"]["0.weight"] == "Shard(dim=0) over tensor"
        assert found["placements"]["2.bias"] == "Replicate() over tensor"


def on_one_rank(rank: int) -> dict[str, torch.Tensor]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(module)
    if get_rank() == 0:
        weight = module.get_parameter("0.weight")
        weight.grad = torch.zeros_like(weight)
    return full_gradients(module)


def test_a_gradient_that_one_rank_has_is_no_deadlock() -> None:
    """The others take part with zeros; what no rank has is left out."""
    for found in run_ranks(on_one_rank, 2):
        assert list(found) == ["0.weight"]


def of_fsdp1(rank: int) -> str:
    module = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    try:
        full_parameters(module)
    except ConfigError as error:
        return str(error)
    return ""


def test_flat_parameters_are_refused() -> None:
    assert "FullyShardedDataParallel cannot be put together" in run_ranks(of_fsdp1, 2)[0]


def test_wrappers_do_not_change_names() -> None:
    """Compiled and checkpointed layers are wrapped."""
    inner = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(2, 1)})
    assert list(full_parameters(nn.ModuleDict({"up": inner}))) == ["up.weight", "up.bias"]
