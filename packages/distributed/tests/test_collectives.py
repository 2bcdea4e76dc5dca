from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairlead_distributed import (
    CollectiveError,
    NotInitializedError,
    ReduceOp,
    TensorMismatchError,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
)
from fairlead_distributed.testing import run_ranks

WORLD = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int16]


def values(rank: int) -> torch.Tensor:
    """What each rank holds: other numbers on every rank, a length that 3 divides."""
    return torch.arange(12, dtype=torch.float64).reshape(6, 2) * (rank + 1) - 7 * rank


def every_operation(rank: int) -> dict[str, Any]:
    own = values(rank)
    before = own.clone()
    got: dict[str, Any] = {op.name: all_reduce(own, op) for op in ReduceOp}
    got["transposed"] = all_reduce(own.T)
    got["scalar"] = all_reduce(torch.tensor(rank), check=True)
    got["gathered"] = all_gather(own)
    got["broadcast"] = broadcast(own, src=2)
    got["chunks"] = {op.name: reduce_scatter(own, op) for op in ReduceOp}
    got["unchanged"] = torch.equal(own, before)
    got["grad"] = all_reduce(torch.ones(2, requires_grad=True)).requires_grad
    got["by name"] = all_reduce(own, "mean")
    got["uneven"] = all_gather(torch.full((rank * 2, 3), float(rank)))
    got["same shape"] = all_gather(own, same_shape=True)
    got["empty"] = [tuple(t.shape) for t in all_gather(torch.empty(0, 3))]
    got["exact"] = [torch.equal(bits(one), bits(of_dtype(r, d))) for d in DTYPES for r, one in
                    enumerate(all_gather(of_dtype(rank, d)))]  # fmt: skip
    got["exact_broadcast"] = [torch.equal(bits(broadcast(of_dtype(rank, d), 1)), bits(of_dtype(1, d))) for d in DTYPES]
    got["pair"] = subgroup(rank)
    return got


def of_dtype(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[0.0, -0.0, rank], [float("nan"), rank * 3, 1]]).nan_to_num(
        nan=1.0 if dtype in (torch.bool, torch.int16) else float("nan")
    ).to(dtype)  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_operations_equal_a_single_process_reference() -> None:
    """Every operation against the same one on all ranks' values in one process."""
    all_values = torch.stack([values(r) for r in range(WORLD)])
    reference = {
        "SUM": all_values.sum(0),
        "PRODUCT": all_values.prod(0),
        "MIN": all_values.amin(0),
        "MAX": all_values.amax(0),
        "AVERAGE": all_values.sum(0) / WORLD,
    }
    for rank, got in enumerate(run_ranks(every_operation, WORLD)):
        for name, expected in reference.items():
            torch.testing.assert_close(got[name], expected, rtol=1e-14, atol=0)
            torch.testing.assert_close(got["chunks"][name], expected[2 * rank : 2 * rank + 2], rtol=1e-14, atol=0)
        assert torch.equal(got["transposed"], reference["SUM"].T)
        assert got["scalar"].item() == 0 + 1 + 2
        assert len(got["gathered"]) == WORLD
        assert all(torch.equal(one, values(r)) for r, one in enumerate(got["gathered"]))
        assert torch.equal(got["broadcast"], values(2))
        assert torch.equal(got["by name"], got["AVERAGE"])
        assert [one.tolist() for one in got["uneven"]] == [[[r] * 3] * (2 * r) for r in range(WORLD)]
        assert all(torch.equal(a, b) for a, b in zip(got["same shape"], got["gathered"], strict=True))
        assert got["unchanged"] is True
        assert got["grad"] is False
        assert got["empty"] == [(0, 3)] * WORLD
        assert all(got["exact"])
        assert all(got["exact_broadcast"])
        assert got["pair"] == [[], [1.5, 15.0, 2.0, 20.0, 3.0, 2.0], [1.5, 15.0, 2.0, 20.0, 30.0, 2.0]][rank]


def mistakes(rank: int) -> dict[str, str]:
    got = {}
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: all_gather(torch.zeros(2 + (rank == 1)), same_shape=True, check=True),
        "dims": lambda: all_gather(torch.zeros((2,) * (1 + (rank == 2)))),
        "dims unchecked": lambda: all_gather(torch.zeros((2,) * (1 + (rank == 2))), check=False),
        "dtype": lambda: all_reduce(torch.zeros(4, dtype=torch.float64 if rank == 2 else torch.float32), check=True),
        "broadcast": lambda: broadcast(torch.zeros(4 - rank), check=True),
        "scatter": lambda: reduce_scatter(torch.zeros(3 * (rank + 1)), check=True),
        "indivisible": lambda: reduce_scatter(torch.zeros(7, 2)),
        "no dimension": lambda: reduce_scatter(torch.tensor(1.0)),
        "average": lambda: all_reduce(torch.tensor([1, 2]), ReduceOp.AVERAGE),
        "order": lambda: all_reduce(torch.zeros(2, dtype=torch.complex64), ReduceOp.MAX),
        "op": lambda: all_reduce(torch.zeros(2), "min" if rank == 1 else "max"),
        "number": lambda: all_reduce(3.0),  # type: ignore[arg-type]  # what a person may try
        "device": lambda: broadcast(torch.zeros(2, device="meta")),
    }
    for name, call in calls.items():
        try:
            call()
        except TensorMismatchError as error:
            got[name] = str(error)
    try:
        broadcast(torch.zeros(1), src=9)
    except CollectiveError as error:
        got["src"] = str(error)
    # The group still works after every one of them.
    got["after"] = str(all_reduce(torch.tensor(1)).item())
    return got


def test_mistakes_are_errors_on_all_ranks_and_not_hangs() -> None:
    """Indivisible sizes are rejected with the numbers. Mismatches name rank and shape."""
    for got in run_ranks(mistakes, WORLD):
        assert "ranks 0, 2: all_gather torch.float32 (2,) at " in got["shape"]
        assert "rank 1: all_gather torch.float32 (3,) at " in got["shape"]
        assert "rank 2: all_gather torch.float32 with 2 dimensions" in got["dims"]
        assert "rank 2: torch.float32 (2, 2), but rank 0: torch.float32 (2,)" in got["dims unchecked"]
        assert "rank 2: all_reduce SUM of torch.float64 (4,)" in got["dtype"]
        assert "rank 1: broadcast torch.float32 (3,) from rank 0" in got["broadcast"]
        assert "rank 1: reduce_scatter SUM of torch.float32 (6,)" in got["scatter"]
        assert "rank 1: all_reduce MIN of" in got["op"]
        assert "not a float" in got["number"]
        assert "on meta, and the group sends from cpu" in got["device"]
        assert "length 7 in dimension 0 into 3 equal parts" in got["indivisible"]
        assert "no dimension" in got["no dimension"]
        assert "average of torch.int64" in got["average"]
        assert "no order" in got["order"]
        assert "no rank 9" in got["src"]
        assert got["after"] == str(WORLD)


def barriers(rank: int) -> tuple[float, float, str]:
    if rank == 1:
        time.sleep(0.5)
    arrived = time.monotonic()
    barrier()
    passed = time.monotonic()
    said, store = "", dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    else:
        try:
            barrier(timedelta(seconds=0.5))
        except CollectiveError as error:
            said = str(error)
        store.set("given up", "")
    return arrived, passed, said


def test_no_rank_passes_the_barrier_before_the_last_arrives() -> None:
    """A rank that does not come is named, too."""
    got = run_ranks(barriers, 2)
    assert min(passed for _, passed, _ in got) >= max(arrived for arrived, _, _ in got)
    assert "rank 1 did not come to barrier in time" in got[0][2]


def subgroup(rank: int) -> list[float]:
    pair = dist.new_group([1, 2])
    if rank == 0:
        return []
    own = torch.tensor([float(rank), 10.0 * rank])
    return [
        *all_reduce(own, ReduceOp.AVERAGE, group=pair).tolist(),
        *broadcast(own, src=2, group=pair).tolist(),
        *reduce_scatter(own, group=pair).tolist(),
        float(len(all_gather(own, group=pair))),
    ]


def test_one_process_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of one process every operation is that of a group of one."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    own = values(0)
    for op in ReduceOp:
        assert torch.equal(all_reduce(own, op), own)
        assert torch.equal(reduce_scatter(own, op), own)
    assert torch.equal(all_gather(own)[0], own)
    assert torch.equal(broadcast(own), own)
    with pytest.raises(CollectiveError, match="no rank 1"):
        broadcast(own, src=1)
    assert all_reduce(own).data_ptr() != own.data_ptr()
    barrier()


def test_one_of_several_processes_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use before init. A sum over all ranks must not silently be the sum over one."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls: list[Callable[..., object]] = [all_reduce, all_gather, broadcast, reduce_scatter]
    for call in calls:
        with pytest.raises(NotInitializedError, match="before the process group exists") as caught:
            call(torch.ones(2))
        assert "rank 1 of 2" in str(caught.value)
    with pytest.raises(NotInitializedError, match="init_process_group"):
        barrier()
