from __future__ import annotations

import contextlib
import io
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairlead.errors import ConfigError
from fairlead_distributed import (
    CollectiveError,
    CollectiveMismatchError,
    TensorMismatchError,
    alarms,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
)
from fairlead_distributed._environ import checked_calls
from fairlead_distributed.testing import run_ranks

WORLD = 3


def answer(call: Any) -> tuple[type | None, str, tuple[int, ...], float]:
    """The error of a call: its class, its text, whom it misses, and the seconds that it took."""
    start = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return type(error), error.block(), error.missing, time.monotonic() - start
    return None, "", (), time.monotonic() - start


def step() -> torch.Tensor:
    return all_reduce(torch.ones(2))


def evaluate() -> torch.Tensor:
    return broadcast(torch.ones(2))


def different_calls(rank: int) -> dict[str, Any]:
    got: dict[str, Any] = {"kinds": answer(step if rank != 1 else evaluate)}
    got["after"] = step().tolist()  # the group goes on where it was
    pair = dist.new_group([0, 2])
    if rank != 1:  # a group that is a part of the ranks counts by itself
        got["pair"] = answer(lambda: all_gather(torch.ones(2), group=pair) if rank else barrier(group=pair))
    return got


def test_different_collectives_are_told_with_every_line_at_once() -> None:
    for rank, got in enumerate(run_ranks(different_calls, WORLD)):
        kind, text, _, seconds = got["kinds"]
        assert kind is CollectiveMismatchError
        assert seconds < 20  # not a time-out of the group
        assert "different collectives: all_reduce, broadcast" in text
        assert "ranks 0, 2: all_reduce SUM of torch.float32 (2,) at " in text
        assert "in step" in text
        assert "rank 1: broadcast torch.float32 (2,) from rank 0 at " in text
        assert "in evaluate" in text
        assert "test_call_check.py:" in text
        assert got["after"] == [WORLD, WORLD]
        if rank != 1:
            assert got["pair"][0] is CollectiveMismatchError
            assert "rank 0: barrier at" in got["pair"][1]


def later_than_the_others(late: int, rank: int, world: int) -> tuple[type | None, str, tuple[int, ...], float]:
    """The answer of a barrier of 0.8 s, to which a rank comes once the others have given up."""
    store = dist.distributed_c10d._get_default_store()
    if rank == late:
        store.wait([f"given up {other}" for other in range(world) if other != late])
    found = answer(lambda: barrier(timedelta(seconds=0.8)))
    store.set(f"given up {rank}", "")
    return found


def missing_rank(rank: int) -> tuple[Any, str, list[float]]:
    alarms._SAY_S = 0.3  # type: ignore[misc]  # ten seconds are long for a test
    step()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        late = later_than_the_others(2, rank, WORLD)
    return late, said.getvalue(), step().tolist()


def test_a_rank_that_does_not_come_is_named_with_where_it_was_last() -> None:
    got = run_ranks(missing_rank, WORLD)
    for (kind, text, missing, seconds), _, after in got[:2]:
        assert (kind, missing) == (CollectiveError, (2,))
        assert seconds < 20
        assert "rank 2 did not come to barrier in time" in text
        assert "rank 2: all_reduce SUM of torch.float32 (2,) at " in text
        assert after == [WORLD, WORLD]  # also the rank that came late learnt of it, and all go on together
    assert "came too late to barrier: the others have given up" in got[2][0][1]
    # Before that, one of those that wait says so.
    assert "rank 0 has waited 0 s in a collective" in got[0][1]
    assert "rank 2: all_reduce" in got[0][1]
    assert got[1][1] == ""


def count_unchecked(rank: int, values: list[str]) -> list[int]:
    """Of 30 calls with other ops on each rank, those that nobody objects to: gloo does not notice."""
    counts = []
    for value in values:
        os.environ["FAIRLEAD_CHECK_COLLECTIVES"] = value
        group, unchecked = dist.new_group(), 0
        for _ in range(30):
            with contextlib.suppress(TensorMismatchError):
                all_reduce(torch.ones(1), "max" if rank else "min", group=group)
                unchecked += 1
        counts.append(unchecked)
    return counts


def test_the_first_calls_of_a_group_are_checked_or_as_many_as_the_variable_says() -> None:
    assert run_ranks(count_unchecked, 2, ["", "off", "all", "25"]) == [[10, 30, 0, 5]] * 2


def test_a_wrong_value_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="FAIRLEAD_CHECK_COLLECTIVES") as caught:
        checked_calls({"FAIRLEAD_CHECK_COLLECTIVES": "yes"})
    assert "all, to off, or to the number" in str(caught.value)
