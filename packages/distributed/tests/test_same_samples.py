from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fairlead_distributed.run.silent_faults import batch_fingerprint, ranks_with_the_same, workers_read_the_same


def prints(*names: str) -> list[bytes | None]:
    return [batch_fingerprint({"x": torch.full((3,), float(ord(name))), "text": [name]}) for name in names]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        ([torch.arange(1000.0)], [torch.arange(1000.0) + 1]),
        ({"text": ["a", "b"]}, {"text": ["a", "c"]}),
        ((np.zeros(3), 1), (np.ones(3), 1)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ],
)
def test_other_batches_have_other_fingerprints(one: Any, other: Any) -> None:
    assert batch_fingerprint(one) == batch_fingerprint(one) != batch_fingerprint(other)


def test_what_has_no_data_that_is_known_says_nothing() -> None:
    assert batch_fingerprint(object()) is None
    assert ranks_with_the_same({0: [None, None], 1: [None, None]}) == ()
    assert not workers_read_the_same([None] * 4, 2)


def test_ranks_with_the_same_batches() -> None:
    same = {0: prints(*"abcd"), 1: prints(*"efgh"), 2: prints(*"abcd"), 3: prints(*"bcde")}
    assert ranks_with_the_same(same) == (0, 2, 3)  # the last one batch later
    assert ranks_with_the_same({0: prints(*"abcd"), 1: prints(*"efgd")}) == ()  # one that comes twice is no stream
    assert ranks_with_the_same({0: prints(*"aaaa"), 1: prints(*"aaaa")}) == ()  # constant data


def test_workers_with_the_same_batches() -> None:
    assert workers_read_the_same(prints(*"aabb"), 2)
    assert workers_read_the_same(prints(*"aaabbbc"), 3)
    assert not workers_read_the_same(prints(*"abcd"), 2)
    assert not workers_read_the_same(prints(*"aaaa"), 2)
    assert not workers_read_the_same(prints(*"aabb"), 0)
    assert not workers_read_the_same(prints(*"aa"), 2)  # too few to tell
