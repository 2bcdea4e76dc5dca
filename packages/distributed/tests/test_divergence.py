from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fairlead_distributed import Divergence, first_divergence, replicated_tensors
from fairlead_distributed.testing import run_ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


class Statistics(nn.Module):
    """Buffers that differ over the ranks on purpose: running statistics, a cache, a queue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(2)
        self.net: Any = nn.Sequential(nn.Linear(3, 2), norm)
        rank = float(torch.distributed.get_rank())
        for one in (self.net, self):
            one.register_buffer("queue", torch.full((2,), rank))
            one.register_buffer("cache", torch.full((2,), rank), persistent=False)
        norm.running_var = torch.full((2,), rank)


def compare(rank: int) -> dict[str, Divergence | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    got = {"equal": first_divergence(model())}
    one_bit: Any = model()
    two: Any = model()
    with torch.no_grad():
        if rank == 2:
            one_bit[1].weight[0, 1] = torch.nextafter(one_bit[1].weight[0, 1], torch.tensor(9.0))
        two[0].bias.mul_(0.0)
        if rank == 1:
            two[0].bias.neg_()  # -0.0 == 0.0, but the bits differ
        two[1].bias.add_(rank)
    got["one bit"] = first_divergence(one_bit)
    got["two"] = first_divergence(two)
    got["nan"] = first_divergence([("nan", torch.tensor([float("nan")]))])
    got["none"] = first_divergence([("a", None), ("b", None if rank == 0 else torch.ones(1))])
    got["shape"] = first_divergence([("a", torch.zeros(1 + (rank == 1)))])
    got["names"] = first_divergence([("a", torch.zeros(1))] + [("b", torch.zeros(1))] * (rank == 0))

    # Shards differ by nature. Replicas of one shard must not.
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    value = torch.arange(8.0)
    cut = distribute_tensor(value, line, [Shard(0)])
    replicated = distribute_tensor(value, grid, [Replicate(), Shard(0)])
    tensors = [("plain", value), ("cut", cut), ("replicated", replicated)]
    got["sharded"] = first_divergence(tensors)
    large: Any = nn.Linear(700, 100)  # read by itself, and no multiple of the words that are added up
    nn.init.ones_(large.weight)
    got["large"] = first_divergence(large.requires_grad_(False).half())
    if rank == 1:
        large.weight[7, 5:7] = torch.tensor([2.0, 0.0])
    else:
        large.weight[7, 5:7] = torch.tensor([0.0, 2.0])
    got["two places"] = first_divergence(large)
    model_of_all = Statistics()
    optimizer = torch.optim.Adam(model_of_all.net.parameters(), lr=0.1)
    model_of_all.net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    got["statistics"] = first_divergence(replicated_tensors(model_of_all, [optimizer], local_buffers=["*.queue"]))
    if rank == 0:
        optimizer.state[model_of_all.net[0].weight]["exp_avg"].add_(1)
    got["optimizer"] = first_divergence(replicated_tensors(model_of_all, [optimizer], local_buffers=["*.queue"]))
    got["queue"] = first_divergence(replicated_tensors(model_of_all, parameters=False))
    if rank == 3:
        replicated.to_local()[0] = -1
    got["replica"] = first_divergence(tensors)
    return got


def test_the_first_differing_parameter_and_rank_are_named() -> None:
    everyone = run_ranks(compare, 4)
    for got in everyone:
        assert got["equal"] is None
        assert got["one bit"] == Divergence("1.weight", (2,), ((0, 1, 3), (2,)), 1)
        assert str(got["one bit"]) == "1.weight differs on rank 2"
        assert got["two"] == Divergence("0.bias", (1,), ((0, 2, 3), (1,)), 2)
        assert str(got["two"]) == "0.bias differs on rank 1 (2 tensors differ)"
        assert got["nan"] is None
        assert got["none"] == Divergence("b", (0,), ((1, 2, 3), (0,)), 1)
        assert got["shape"] == Divergence("a", (1,), ((0, 2, 3), (1,)), 1)
        assert got["names"] == Divergence("b", (0,), ((1, 2, 3), (0,)), 1)
        assert got["sharded"] is None
        assert got["large"] is None
        assert got["two places"] == Divergence("weight", (1,), ((0, 2, 3), (1,)), 1)
        assert str(got["statistics"]) == "queue differs on ranks 1-3"  # `*.queue` is that of a part
        assert str(got["optimizer"]).startswith("queue differs on ranks 1-3 (2 tensors differ)")
        assert str(got["queue"]) == "queue differs on ranks 1-3 (2 tensors differ)"
        # Ranks 1 and 3 hold the same half.
        assert got["replica"] == Divergence("replicated", (3,), ((1,), (3,)), 1)


def test_one_process_cannot_diverge() -> None:
    assert first_divergence(model()) is None
