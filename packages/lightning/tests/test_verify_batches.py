"""The batches of replicas as one."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fairlead_lightning.verify.batches import NotOneBatchError, detached, digest, joined, shuffled


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Item:
    x: Tensor
    names: list[str]
    scale: float = 2.0


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a mapping with attributes of its own."""

    kept = 7


def item(start: int, count: int = 2) -> Item:
    return Item(torch.arange(start, start + count), [f"n{i}" for i in range(start, start + count)])


def test_nested_batches_are_put_together_and_keep_their_types() -> None:
    pair = joined([Pair(torch.zeros(1, 3), torch.zeros(1)), Pair(torch.ones(2, 3), torch.ones(2))])
    assert isinstance(pair, Pair)
    assert pair.x.shape == (3, 3)
    assert pair.y.tolist() == [0, 1, 1]
    both = joined([item(0), item(5, 1)])
    assert both.x.tolist() == [0, 1, 5]
    assert both.names == ["n0", "n1", "n5"]
    assert both.scale == 2.0
    nested = joined([{"a": [torch.tensor([i]), {"b": torch.tensor([[i]])}], "n": 3} for i in range(2)])
    assert nested["a"][1]["b"].tolist() == [[0], [1]]
    encoding = joined([Encoding(ids=torch.tensor([1])), Encoding(ids=torch.tensor([2]))])
    assert isinstance(encoding, Encoding)
    assert encoding["ids"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"shapes that do not go together: \(2, 3\), \(2, 4\)"),
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "other keys"),
        ([[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]], "another length"),
        ([{"n": 1}, {"n": 2}], r"batch\['n'\] is one value"),
        ([torch.zeros(1), [1]], "another type"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "one value for a batch"),
    ],
)
def test_what_cannot_be_put_together_is_named(batches: list[Any], why: str) -> None:
    with pytest.raises(NotOneBatchError, match=why):
        joined(batches)


def test_samples_stay_together_in_another_order() -> None:
    batch = Item(torch.arange(8), [f"n{i}" for i in range(8)])
    other = shuffled(batch, torch.Generator().manual_seed(3))
    assert other.x.tolist() != batch.x.tolist()
    assert other.names == [f"n{i}" for i in other.x.tolist()]
    assert shuffled([torch.zeros(2), torch.zeros(3)], torch.Generator()) is None


def test_a_digest_sees_each_value() -> None:
    assert digest(item(0)) == digest(item(0))
    assert digest(item(0)) != digest(item(1))
    assert digest({"x": torch.zeros(2)}) != digest({"x": torch.zeros(2, dtype=torch.long)})
    assert digest(["a"]) != digest(["b"])


def test_a_copy_is_not_changed_by_the_training() -> None:
    x, names = torch.zeros(2), ["a"]
    copied = detached({"x": x, "names": names})
    x.add_(1)
    names.append("b")
    assert copied["x"].tolist() == [0, 0]
    assert copied["names"] == ["a"]
