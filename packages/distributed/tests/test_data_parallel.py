from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairlead.errors import ConfigError
from fairlead_distributed import (
    DistributedDataParallel,
    DistributedSampler,
    ResumableDistributedSampler,
    join,
    no_sync,
    register_exact_reduction,
)
from fairlead_distributed.testing import run_ranks

STEPS = (4, 2, 1)
"""How many batches each of three ranks has."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    """Shape (8 samples, 4 features)."""
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    """A step of a loop that knows nothing of ranks."""
    wrapped(samples).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def reference(steps: int, world_size: int, sizes: tuple[int, ...] | None = None) -> list[torch.Tensor]:
    """What one process makes of the batches that the ranks have in each step, as one batch."""
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        there = [rank for rank in range(world_size) if sizes is None or step < sizes[rank]]
        train(alone, optimizer, torch.cat([batch(rank, step) for rank in there]))
    return [p.detach() for p in alone.parameters()]


def on_ranks(rank: int) -> dict[str, Any]:
    got: dict[str, Any] = {}
    net: Any = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # made before the model is wrapped: it stays valid
    wrapped = DistributedDataParallel(net, device_ids=[rank])  # of a script for GPUs; here there are none
    for step in range(3):
        train(wrapped, optimizer, batch(rank, step))
    got["weights"] = [p.detach() for p in net.parameters()]
    got["names"] = list(wrapped.state_dict())

    got["buckets"] = [buckets(DistributedDataParallel(model(), bucket_size_mb=size)) for size in (25, 1e-4)]
    got["torch's name"] = buckets(DistributedDataParallel(model(), bucket_cap_mb=1e-4))

    got["order"] = events(DistributedDataParallel(model(), bucket_size_mb=1e-4))

    net.zero_grad()
    with no_sync():  # means the wrapped ones
        wrapped(batch(rank, 0)).square().mean().backward()
        got["own"] = net[0].weight.grad.clone()
    wrapped(batch(rank, 1)).square().mean().backward()
    got["sent"] = net[0].weight.grad.clone()

    uneven = model()
    joined = DistributedDataParallel(uneven)
    optimizer = torch.optim.SGD(joined.parameters(), lr=0.1)
    with join(nn.ModuleDict({"as Fabric": joined})):
        for step in range(STEPS[rank]):
            train(joined, optimizer, batch(rank, step))
    got["joined"] = [p.detach() for p in uneven.parameters()]
    calls: dict[str, Any] = {"join": lambda: join(net).__enter__(), "sync": lambda: bare(wrapped, joined)}
    for name, call in calls.items():
        with pytest.raises(ConfigError) as caught:
            call()
        got[name] = str(caught.value)
    return got


def buckets(wrapped: nn.Module) -> int:
    """How many all-reduces a backward pass makes."""
    return events(wrapped).count("sent")


def events(wrapped: Any) -> list[str]:
    """What happens in a backward pass, once DDP knows the order of the gradients."""
    calls: list[str] = []

    def count(state: None, bucket: dist.GradBucket) -> Any:
        calls.append("sent")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    count.__annotations__ = {}  # torch takes no text for a class
    wrapped.register_comm_hook(None, count)
    wrapped.module[1].register_full_backward_hook(lambda *_: calls.append("half way"))
    for _ in range(2):
        calls.clear()
        wrapped(batch(0, 0)).sum().backward()
    return calls


def bare(*wrapped: nn.Module) -> None:
    """`no_sync()` where no model is wrapped any more."""
    from fairlead_distributed import data_parallel

    for one in wrapped:
        data_parallel._wrapped.discard(one)  # type: ignore[arg-type]
    with no_sync():
        pass


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, len(STEPS))


def test_a_loop_for_one_process_trains_on_several_with_one_more_line(found: list[dict[str, Any]]) -> None:
    """Three ranks with a third of each batch end with the weights of one process with all of it."""
    for got in found:
        torch.testing.assert_close(got["weights"], reference(3, 3), rtol=1e-12, atol=1e-14)
        assert got["names"] == [f"module.{name}" for name in model().state_dict()]


def test_the_bucket_size_changes_the_number_of_all_reduces(found: list[dict[str, Any]]) -> None:
    for got in found:
        assert got["buckets"][0] == 1
        assert got["buckets"][1] == got["torch's name"] > 1


def test_gradients_are_sent_while_the_backward_pass_goes_on(found: list[dict[str, Any]]) -> None:
    for got in found:
        assert got["order"].index("sent") < got["order"].index("half way")


def test_bare_no_sync_means_the_wrapped_models(found: list[dict[str, Any]]) -> None:
    mean = sum(got["own"] for got in found) / len(found)
    for got in found:
        assert not torch.allclose(got["own"], mean)  # nothing was sent
        assert torch.equal(got["sent"], found[0]["sent"])
        assert "no_sync(model)" in got["sync"]


def test_ranks_that_run_out_of_batches_join_and_the_rest_is_as_in_one_process(found: list[dict[str, Any]]) -> None:
    for got in found:
        torch.testing.assert_close(got["joined"], reference(max(STEPS), 3, STEPS), rtol=1e-12, atol=1e-14)
        assert "join got a Sequential" in got["join"]


def test_in_one_process_it_is_the_model_alone() -> None:
    net = model()
    wrapped: Any = DistributedDataParallel(net, bucket_size_mb=10, find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with join(wrapped), no_sync(), no_sync(wrapped):
        for step in range(3):
            train(wrapped.train(), optimizer, batch(0, step))
    assert all(map(torch.equal, wrapped.parameters(), reference(3, 1)))
    assert next(iter(wrapped.state_dict())) == "module.0.weight"
    assert not register_exact_reduction(wrapped)
    again = copy.deepcopy(wrapped)
    assert torch.equal(again(batch(0, 9)), net(batch(0, 9)))


def test_what_cannot_be_wrapped_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(ConfigError, match="given twice"):
        DistributedDataParallel(model(), bucket_size_mb=1, bucket_cap_mb=2)
    with pytest.raises(ConfigError, match="0 MiB"):
        DistributedDataParallel(model(), bucket_size_mb=0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="before the process group exists"):
        DistributedDataParallel(model())


@pytest.mark.parametrize("device_ids", [[9], [0, 1]])
def test_a_gpu_of_another_node_or_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, device_ids: list[int]) -> None:
    """The number of the rank in the whole job, given for that on its node; the two GPUs are a fake."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"not this rank's GPU(.|\n)*counted on each node") as error:
        DistributedDataParallel(model(), device_ids=device_ids)
    assert "device_ids=[get_local_rank()]" in error.value.block()


def test_a_device_that_is_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the device is given twice"):
        DistributedDataParallel(model(), device="cpu", device_ids=[0])


def test_the_sampler_is_there_under_torchs_name_and_takes_torchs_arguments() -> None:
    data = list(range(10))
    shards = [list(DistributedSampler(data, 2, rank, True, 3)) for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == data
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1]
    assert isinstance(sampler, ResumableDistributedSampler)
