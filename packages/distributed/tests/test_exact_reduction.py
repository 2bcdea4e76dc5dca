from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError
from fairlead_distributed import destroy_process_group, init_process_group, no_sync, register_exact_reduction
from fairlead_distributed.testing import run_ranks

STEPS, SAVED = 6, 3
BATCH = 24  # samples of all ranks: divisible by 2, 3 and 4


# --- A run that is resumed ends like one that was not ---------------------------------------------------------------


@dataclass
class Trained:
    """What one rank brings back.

    Attributes:
        weights: All parameters, one after the other.
        buckets: The sizes of the buckets that DDP built after the first step.
        hook: The name of the communication hook.
    """

    weights: Tensor
    buckets: str
    hook: str | None


def network() -> nn.Sequential:
    """1.9 MiB of parameters in layers whose sizes divide by nothing."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(37, 301), nn.Tanh(), nn.LayerNorm(301), nn.Linear(301, 501), nn.Tanh(), nn.Linear(501, 401),
        nn.Tanh(), nn.Linear(401, 303), nn.Tanh(), nn.Linear(303, 7),
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 37, generator=generator), torch.randn(BATCH, 7, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rows: slice) -> None:
    for step in steps:
        x, y = (part[rows] for part in batch(step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(rank: int, world_size: int, checkpoint: str, exact: bool, first: int, **settings: Any) -> Trained:
    """Trains from step `first` to the end; saves on the way, or resumes from what was saved."""
    rows = slice(rank, None, world_size)
    network_ = network()
    model = DistributedDataParallel(network_, **{"bucket_cap_mb": 0.5, **settings})
    if exact:
        register_exact_reduction(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if first:
        saved = torch.load(checkpoint, weights_only=True)
        network_.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        train(model, optimizer, range(SAVED), rows)
        if rank == 0:
            torch.save({"model": network_.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    train(model, optimizer, range(SAVED, STEPS), rows)
    log: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return Trained(weights(model), log.get("rebuilt_bucket_sizes", ""), log.get("comm_hook"))


CASES: dict[str, dict[str, Any]] = {
    "plain": {"exact": False},
    "exact": {"exact": True},
    "exact, another bucket size": {"exact": True, "bucket_cap_mb": 1},
    "exact, static graph": {"exact": True, "static_graph": True},
    "plain, static graph": {"exact": False, "static_graph": True},
    "plain, unused parameters": {"exact": False, "find_unused_parameters": True},
}


def all_runs(rank: int, world_size: int, folder: str) -> tuple[dict[str, Trained], dict[str, Trained]]:
    """Undisturbed, and resumed in a new process group."""
    undisturbed = {name: run(rank, world_size, f"{folder}/{name}", first=0, **given) for name, given in CASES.items()}
    destroy_process_group()
    init_process_group("gloo", timeout=timedelta(seconds=300), device="cpu")
    resumed = {name: run(rank, world_size, f"{folder}/{name}", first=SAVED, **given) for name, given in CASES.items()}
    return undisturbed, resumed


Runs = tuple[int, dict[str, Trained], dict[str, Trained]]


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The number of ranks, what they trained undisturbed, and what they trained when resumed."""
    world_size: int = request.param
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    by_rank = run_ranks(all_runs, world_size, world_size, folder, timeout=300)
    for one in by_rank[1:]:
        for ours, first in zip(one, by_rank[0], strict=True):
            assert all(torch.equal(ours[name].weights, first[name].weights) for name in CASES), "ranks differ"
    return world_size, *by_rank[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("exact")])
def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(runs: Runs, name: str) -> None:
    """Bit for bit, from a checkpoint, with a new process group and a new reducer."""
    world_size, undisturbed, resumed = runs
    assert len(undisturbed[name].buckets.split(",")) > 1, "DDP has not rebuilt its buckets, or there is only one"
    assert undisturbed[name].hook == resumed[name].hook == (None if world_size == 2 else "exact_reduction_hook")
    assert torch.equal(undisturbed[name].weights, resumed[name].weights)


@pytest.mark.slow
def test_with_the_hook_the_size_of_the_buckets_does_not_matter(runs: Runs) -> None:
    _, undisturbed, resumed = runs
    small, large = "exact", "exact, another bucket size"
    assert undisturbed[small].buckets != undisturbed[large].buckets
    assert torch.equal(undisturbed[small].weights, undisturbed[large].weights)
    assert torch.equal(undisturbed[small].weights, resumed[large].weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "plain, static graph"])
def test_without_the_hook_more_than_two_ranks_end_with_other_weights(runs: Runs, name: str) -> None:
    """Why there is a hook, and why two ranks get none: their sum is the same in either order."""
    world_size, undisturbed, resumed = runs
    assert undisturbed[name].hook is None
    assert torch.equal(undisturbed[name].weights, resumed[name].weights) == (world_size == 2)


@pytest.mark.slow
def test_buckets_that_are_not_rebuilt_need_no_hook(runs: Runs) -> None:
    """Why `auto` leaves out models with `find_unused_parameters`."""
    _, undisturbed, resumed = runs
    name = "plain, unused parameters"
    assert undisturbed[name].buckets == ""
    assert torch.equal(undisturbed[name].weights, resumed[name].weights)


@pytest.mark.slow
def test_the_weights_are_those_of_one_process(runs: Runs) -> None:
    """As near as plain DDP's: six steps of Adam at 0.01 move a weight by 0.06 at most; they agree to 1e-4 of that."""
    _, undisturbed, _ = runs
    alone = network()
    start = weights(alone)
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), range(STEPS), slice(None))
    moved = float((weights(alone) - start).abs().max())
    assert moved > 0.03
    for name in ("plain", "exact"):
        assert float((undisturbed[name].weights - weights(alone)).norm()) < 1e-4 * float(
            (weights(alone) - start).norm()
        )


# --- What the hook makes of the gradients ---------------------------------------------------------------------------


class Model(nn.Module):
    """Layers of odd sizes, and one that no step uses."""

    def __init__(self, dtype: torch.dtype, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Linear(9, 5, dtype=dtype) if unused else None  # the first layer is in the last bucket
        self.inlet = nn.Linear(5, 11, dtype=dtype)
        self.outlet = nn.Linear(11, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outlet(self.inlet(x))
        return out


class Pair(nn.Module):
    """Two elements: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.weight


class Embedding(nn.Module):
    """A sparse gradient beside dense ones; every rank has rows of its own, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(13, 5, sparse=True)
        self.outlet = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outlet(self.table(x[:, 0].abs().mul(4).long() % 13) + x)
        return out


def samples(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    """Shape (4, 5), of very different sizes over the ranks, so that another order gives another sum."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(4, 5, generator=generator, dtype=torch.float64) * 10.0 ** (1 - rank)).to(dtype)


def backward(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    model(samples(rank, step, dtype)).abs().sum().backward()


def in_order_of_ranks(gradients: list[Tensor]) -> Tensor:
    """The sum from rank 0 on, divided; 16 bits are added in 32."""
    if gradients[0].is_complex():  # DDP takes them for pairs of real numbers
        return torch.view_as_complex(in_order_of_ranks([torch.view_as_real(gradient) for gradient in gradients]))
    total = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
    for gradient in gradients[1:]:
        total = total + gradient
    return (total / len(gradients)).to(gradients[0].dtype)


def reduced(
    rank: int,
    world_size: int,
    make: Callable[[], nn.Module],
    dtype: torch.dtype = torch.float32,
    accumulate: bool = False,
    **settings: Any,
) -> dict[str, bool]:
    """By parameter: whether DDP's gradient is the sum in the order of the ranks, in each of three steps."""
    model = DistributedDataParallel(make(), **settings)
    assert register_exact_reduction(model)
    found: dict[str, bool] = {}
    for step in range(3):
        model.zero_grad()
        if accumulate:
            with no_sync(model):
                backward(model, rank, 10 + step, dtype)
        backward(model, rank, step, dtype)
        alone = [make() for _ in range(world_size)]
        for other, one in enumerate(alone):
            if accumulate:
                backward(one, other, 10 + step, dtype)
            backward(one, other, step, dtype)
        for name, parameter in model.module.named_parameters():
            locals_ = [one.get_parameter(name).grad for one in alone]
            if locals_[0] is None:
                same = parameter.grad is None or not parameter.grad.any()
            else:
                gradients = [g.to_dense() for g in locals_ if g is not None]
                assert parameter.grad is not None
                same = torch.equal(parameter.grad.to_dense(), in_order_of_ranks(gradients))
            found[name] = found.get(name, True) and same
    return found


def dense(dtype: torch.dtype = torch.float32, unused: bool = False) -> Callable[[], nn.Module]:
    return lambda: Model(dtype, unused)


TINY = 1e-4  # MiB: a bucket for every layer
REDUCED: dict[str, Callable[[int, int], dict[str, bool]]] = {
    **{
        str(dtype): partial(reduced, make=dense(dtype), dtype=dtype, bucket_cap_mb=TINY)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    },
    "one bucket": partial(reduced, make=dense()),
    "view": partial(reduced, make=dense(), bucket_cap_mb=TINY, gradient_as_bucket_view=True),
    "static": partial(reduced, make=dense(), bucket_cap_mb=TINY, static_graph=True),
    "smaller than the world": partial(reduced, make=Pair),
    "unused": partial(reduced, make=dense(unused=True), bucket_cap_mb=TINY, find_unused_parameters=True),
    "unused and skipped": partial(
        reduced,
        make=dense(unused=True),
        bucket_cap_mb=TINY,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    ),
    "no_sync": partial(reduced, make=dense(), accumulate=True, bucket_cap_mb=TINY),
}


def sparse(rank: int, world_size: int) -> list[Tensor]:
    """Three times the gradients of one batch: before and after DDP rebuilds its buckets, and on one process."""
    model = DistributedDataParallel(Embedding(), bucket_cap_mb=TINY)
    assert register_exact_reduction(model)
    found = []
    for _ in range(2):
        model.zero_grad()
        backward(model, rank, 0, torch.float32)
        found.append(torch.cat([p.grad.to_dense().flatten() for p in model.parameters() if p.grad is not None]))
    alone = Embedding()
    for other in range(world_size):
        backward(alone, other, 0, torch.float32)
    mean = [p.grad.to_dense().flatten() / world_size for p in alone.parameters() if p.grad is not None]
    return [*found, torch.cat(mean)]


# --- Where a hook is registered, and what happens when things go wrong ----------------------------------------------


def my_hook(state: object, bucket: dist.GradBucket) -> Any:
    """A hook of the user's, without annotations that torch would look at."""
    raise NotImplementedError


my_hook.__annotations__ = {}


def registered(rank: int) -> dict[str, bool]:
    def wrapped(ranks: list[int] | None = None, **settings: Any) -> DistributedDataParallel:
        group = None if ranks is None else dist.new_group(ranks, use_local_synchronization=True)
        return DistributedDataParallel(nn.Linear(2, 2), process_group=group, **settings)

    found: dict[str, bool] = {}
    once = wrapped()
    found["three ranks"] = register_exact_reduction(once)
    found["a second time"] = register_exact_reduction(once)
    found["three ranks, auto"] = register_exact_reduction(wrapped(), auto=True)
    found["one rank"] = register_exact_reduction(wrapped([rank]))
    if rank < 2:
        found["two ranks"] = register_exact_reduction(wrapped([0, 1]))
    with_hook = wrapped()
    with_hook.register_comm_hook(None, my_hook)
    found["a hook of the user"] = register_exact_reduction(with_hook)
    built_in = wrapped()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[no-untyped-call]
    found["a hook of torch"] = register_exact_reduction(built_in)
    unused = wrapped(find_unused_parameters=True)
    found["unused parameters, auto"] = register_exact_reduction(unused, auto=True)
    found["unused parameters"] = register_exact_reduction(unused)
    found["static graph, auto"] = register_exact_reduction(wrapped(static_graph=True), auto=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: the static graph finds unused parameters by itself
        both = wrapped(static_graph=True, find_unused_parameters=True)
    found["both, auto"] = register_exact_reduction(both, auto=True)
    # There is no device and so no NCCL here: what is looked at is which backend the group has for the device.
    for config in ("cpu:nccl,cuda:nccl", "cpu:gloo,cuda:nccl"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group, config=config: config)
            found[f"{config}, auto"] = register_exact_reduction(wrapped(), auto=True)
            found[config] = register_exact_reduction(wrapped())
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        found["torch.compile instead of buckets"] = register_exact_reduction(wrapped())
    return found


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Linear is no DistributedDataParallel"):
        register_exact_reduction(model)


def uneven(rank: int, exact: bool) -> Tensor:
    """Rank r has 2 + r batches; `join` lets the others take part in its steps with zeros."""
    model = DistributedDataParallel(dense()(), bucket_cap_mb=TINY)
    if exact:
        assert register_exact_reduction(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with model.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            backward(model, rank, step, torch.float32)
            optimizer.step()
    return weights(model)


# --- All of that on three ranks -------------------------------------------------------------------------------------


@dataclass
class Found:
    """What one of three ranks brings back."""

    reduced: dict[str, dict[str, bool]]
    sparse: list[Tensor]
    registered: dict[str, bool]
    uneven: list[Tensor]


def find(rank: int) -> Found:
    return Found(
        {name: scenario(rank, 3) for name, scenario in REDUCED.items()},
        sparse(rank, 3),
        registered(rank),
        [uneven(rank, exact) for exact in (False, True)],
    )


@pytest.fixture(scope="module")
def found() -> list[Found]:
    """By rank; one start of Python serves all of it."""
    return run_ranks(find, 3, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCED)
def test_gradients_are_added_in_the_order_of_the_ranks(found: list[Found], name: str) -> None:
    """Bit for bit what one process makes of all ranks' gradients, in steps before and after DDP rebuilds buckets."""
    for rank, one in enumerate(found):
        assert one.reduced[name]
        assert all(one.reduced[name].values()), f"rank {rank}: {one.reduced[name]}"


@pytest.mark.slow
def test_sparse_gradients_do_not_depend_on_the_buckets(found: list[Found]) -> None:
    """Rows that a rank has twice are added one by one, so the order is another than for dense gradients."""
    for one in found:
        before, after, alone = one.sparse
        assert torch.equal(before, after)
        assert torch.equal(before, found[0].sparse[0])
        torch.testing.assert_close(before, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_hook_is_registered_where_it_is_needed_and_never_twice(found: list[Found]) -> None:
    by_rank = [one.registered for one in found]
    assert by_rank[0] == by_rank[1] == {**by_rank[2], "two ranks": False}
    assert by_rank[0] == {
        "three ranks": True,
        "a second time": False,
        "three ranks, auto": True,
        "one rank": False,
        "two ranks": False,
        "a hook of the user": False,
        "a hook of torch": False,
        "unused parameters, auto": False,
        "unused parameters": True,
        "static graph, auto": True,
        "both, auto": True,
        "cpu:nccl,cuda:nccl, auto": False,
        "cpu:nccl,cuda:nccl": True,
        "cpu:gloo,cuda:nccl, auto": True,
        "cpu:gloo,cuda:nccl": True,
        "torch.compile instead of buckets": False,
    }


@pytest.mark.slow
def test_ranks_with_different_numbers_of_batches_can_be_joined(found: list[Found]) -> None:
    """As with plain DDP, up to the order of two additions in each of four steps."""
    for one in found:
        plain, exact = one.uneven
        torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-6)
        assert torch.equal(exact, found[0].uneven[1])
    assert not torch.allclose(found[0].uneven[1], weights(dense()()), rtol=1e-3)


class GoneError(Exception):
    """Raised by a rank that leaves in the middle of a reduction."""


def abandoned(rank: int) -> str:
    """Rank 2 sends its parts and goes; the others wait for the averages that it was to send."""
    init_process_group("gloo", timeout=timedelta(seconds=100), device="cpu")
    model = DistributedDataParallel(dense()())
    assert register_exact_reduction(model)
    real, calls = dist.all_to_all_single, []

    def leave(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if rank == 2 and len(calls) == 2:
            raise GoneError("rank 2 leaves")
        return real(*args, **kwargs)

    dist.all_to_all_single = leave
    try:
        backward(model, rank, 0, torch.float32)
    except (RuntimeError, GoneError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
def test_a_rank_that_leaves_is_an_error_on_the_others_and_no_hang() -> None:
    """Its error arrives in the Future of the second collective; DDP would wait for that for ever."""
    found = run_ranks(abandoned, 3, init=False, timeout=60)
    assert "rank 2 leaves" in found[2]
    for one in found[:2]:
        assert "no error" not in one
        assert "by peer" in one, one
        assert "Unable to cast" not in one, "an error that hides in a value"
