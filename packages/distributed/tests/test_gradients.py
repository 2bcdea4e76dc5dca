from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError
from fairlead_distributed import NonFiniteGradientError, clip_grad_norm, no_sync
from fairlead_distributed.testing import run_ranks

NORMS = [2.0, 1.0, 3.0, math.inf]
MAX_NORM = 0.1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    # 5 and 3 rows do not divide by 2: shards are uneven, and the last bias has an empty one.
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batches() -> torch.Tensor:
    """Shape (4 micro-batches, 8 samples, 4 features)."""
    return torch.randn(4, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def backward(module: nn.Module, samples: torch.Tensor, scale: float = 1.0) -> None:
    (module(samples).square().mean() * scale).backward()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [full(p.grad) for p in module.parameters()]


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def test_clip_equals_torch_in_one_process() -> None:
    for norm_type in NORMS:
        ours, theirs = model(), model()
        for one in (ours, theirs):
            backward(one, batches()[0])
        norm = clip_grad_norm(ours.parameters(), MAX_NORM, norm_type)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-12, atol=0)


def test_clip_sums_16_bit_gradients_in_32_bits() -> None:
    weight = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 1.0)
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)
    norm = clip_grad_norm([weight, plain], 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.item(), math.sqrt(10_002), rtol=1e-6, atol=0)
    torch.testing.assert_close(plain.grad, torch.full((2,), 1 / math.sqrt(10_002)), rtol=1e-5, atol=0)


def test_clip_leaves_small_gradients_and_takes_none_and_large_ones() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm([weight], 1.0).item() == 0.0
    weight.grad = torch.tensor([0.3, 0.4])
    assert clip_grad_norm(weight, 1.0).item() == pytest.approx(0.5)
    assert weight.grad.tolist() == pytest.approx([0.3, 0.4])
    others = [nn.Parameter(torch.zeros(1)) for _ in range(20)]
    for other in others:
        other.grad = torch.tensor([1e19])  # each square fits into 32 bits, their sum does not
    assert clip_grad_norm(others, 1.0).item() == pytest.approx(1e19 * math.sqrt(20))
    with pytest.raises(ConfigError, match="norm_type"):
        clip_grad_norm(weight, 1.0, norm_type=0)
    with pytest.raises(ConfigError, match="max_norm"):
        clip_grad_norm(weight, math.nan)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_first_bad_parameter_is_named(norm_type: float) -> None:
    broken: Any = model()
    backward(broken, batches()[0])
    broken[2].bias.grad[1] = math.nan
    broken[4].weight.grad[0] = math.inf
    before = gradients(broken)
    with pytest.raises(NonFiniteGradientError, match=r"2\.bias") as caught:
        clip_grad_norm(broken.named_parameters(), 1.0, norm_type, error_if_nonfinite=True)
    assert caught.value.parameter == "2.bias"
    assert "parameter 4 of 6, shape (3,)" in str(caught.value)
    assert "lower the learning rate" in str(caught.value)
    torch.testing.assert_close(gradients(broken), before, equal_nan=True)
    with pytest.raises(NonFiniteGradientError, match="#3"):
        clip_grad_norm(broken.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    assert not torch.isfinite(clip_grad_norm(broken.parameters(), 1.0, norm_type))


def sharded_clip(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    got: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    for norm_type in NORMS:
        sharded: Any = model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        backward(sharded, batches()[rank])
        counted = Counting()
        with counted:
            norm = clip_grad_norm(sharded.named_parameters(), MAX_NORM, norm_type)
        got[f"{norm_type}"] = norm, gradients(sharded), counted.calls

    # One gradient is NaN on one rank's shard only, and the error is on both.
    broken: Any = fully_shard(model(), mesh=mesh)
    backward(broken, batches()[rank])
    local = broken[2].weight.grad.to_local()
    if rank == 1:
        local[0] = math.nan
    for norm_type in (2.0, math.inf):
        with pytest.raises(NonFiniteGradientError) as caught:
            clip_grad_norm(broken.named_parameters(), MAX_NORM, norm_type, error_if_nonfinite=True)
        got[f"bad {norm_type}"] = caught.value.parameter
    for norm_type in (2.0, math.inf):
        got[f"nan {norm_type}"] = clip_grad_norm(broken.parameters(), 1e9, norm_type).isnan().item()

    # Meshes of other shapes, and a plain parameter, in one model.
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    placements: list[tuple[Any, list[Any]]] = [
        (mesh, [Shard(0)]),
        (grid, [Replicate(), Shard(1)]),
        (grid, [Shard(0), Shard(0)]),
        (mesh, [Replicate()]),
        (None, []),
    ]
    mixed = []
    for index, (where, how) in enumerate(placements):
        value = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) - index
        tensor = value if where is None else distribute_tensor(value, where, how)
        parameter = nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor.clone()
        mixed.append(parameter)
    got["mixed"] = clip_grad_norm(mixed, MAX_NORM), [full(p.grad) for p in mixed]
    return got


class Counting:
    """Counts the all-reduces of a block."""

    def __enter__(self) -> Counting:
        self.calls, self.original = 0, dist.all_reduce

        def counted(*args: object, **kwargs: object) -> object:
            self.calls += 1
            return self.original(*args, **kwargs)  # type: ignore[arg-type]

        dist.all_reduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self.original


def test_clip_of_a_sharded_model_equals_one_process() -> None:
    """Norm and clipped gradients of fully_shard on 2 ranks against torch on the whole batch in one process."""
    everyone = run_ranks(sharded_clip, 2)
    for got in everyone:
        for norm_type in NORMS:
            reference = model()
            backward(reference, batches()[0], 0.5)
            backward(reference, batches()[1], 0.5)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM, norm_type)
            norm, clipped, calls = got[f"{norm_type}"]
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(clipped, gradients(reference), rtol=1e-10, atol=1e-16)
            assert calls == 1  # for 6 parameters
        for norm_type in (2.0, math.inf):
            assert got[f"bad {norm_type}"] == "2.weight"
            assert got[f"nan {norm_type}"] is True
        values = [torch.arange(6.0, dtype=torch.float64).reshape(3, 2) - index for index in range(5)]
        whole = torch.linalg.vector_norm(torch.stack(values))
        norm, clipped = got["mixed"]
        torch.testing.assert_close(norm, whole, rtol=1e-12, atol=0)
        torch.testing.assert_close(clipped, [v * MAX_NORM / (whole + 1e-6) for v in values], rtol=1e-12, atol=0)
    assert torch.equal(everyone[0]["2.0"][0], everyone[1]["2.0"][0])


def accumulate(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    hooks = 0

    def counted(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        nonlocal hooks
        hooks += 1
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    mine = batches()[2 * rank : 2 * rank + 2]
    got: dict[str, Any] = {}
    for kind in ("ddp", "inside", "fully_shard"):
        plain: Any = model()
        if kind == "fully_shard":
            fully_shard(plain[0])
            module: Any = fully_shard(plain)
        else:
            ddp = DistributedDataParallel(plain)
            ddp.register_comm_hook(None, counted)
            module = nn.Sequential(ddp) if kind == "inside" else ddp
        hooks = 0
        with no_sync(module):
            with no_sync(module):
                pass  # leaving the inner block does not switch the outer one off
            backward(module, mine[0], 0.5)
            got[f"{kind} quiet"] = hooks
            if kind in ("ddp", "inside"):
                got[f"{kind} local"] = gradients(module)
        backward(module, mine[1], 0.5)
        got[f"{kind} sent"] = hooks
        got[kind] = gradients(module)
    return got


def test_no_sync_communicates_once_and_equals_the_large_batch() -> None:
    """2 ranks x 2 micro-batches against one process on all 4."""
    reference = model()
    for batch in batches():
        backward(reference, batch, 0.25)
    for rank, got in enumerate(run_ranks(accumulate, 2)):
        alone = model()
        backward(alone, batches()[2 * rank], 0.5)
        for kind in ("ddp", "inside"):
            assert got[f"{kind} quiet"] == 0
            assert got[f"{kind} sent"] == 1
            torch.testing.assert_close(got[f"{kind} local"], gradients(alone), rtol=1e-12, atol=1e-15)
        for kind in ("ddp", "inside", "fully_shard"):
            torch.testing.assert_close(got[kind], gradients(reference), rtol=1e-10, atol=1e-15)


def test_no_sync_of_a_plain_module_does_nothing() -> None:
    plain = model()
    with no_sync(plain):
        backward(plain, batches()[0])
    assert all(p.grad is not None for p in plain.parameters())
