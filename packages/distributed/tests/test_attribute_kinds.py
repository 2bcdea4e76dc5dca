"""Objects as people write them: each that has changed is put back in another process, or is named."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from fairlead_distributed import marks
from fairlead_distributed.attributes import Attributes

T = TypeVar("T")


class Slotted:
    __slots__ = ("__hidden", "total")

    def __init__(self) -> None:
        self.total, self.__hidden = 0.0, 0

    def move(self) -> None:
        self.total, self.__hidden = self.total + 1.5, self.__hidden + 1

    def values(self) -> Any:
        return self.total, self.__hidden


class Typed(Generic[T]):
    """`Generic` has slots, and none of them are its own."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def move(self) -> None:
        self.seen.append(len(self.seen))

    def values(self) -> Any:
        return list(self.seen)


class Mapped(MutableMapping[str, int]):
    """A mapping, and no dict."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def __getitem__(self, key: str) -> int:
        return self.held[key]

    def __setitem__(self, key: str, value: int) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def move(self) -> None:
        self[f"{len(self)}"] = len(self)

    def values(self) -> Any:
        return dict(self.held)


class Buffer(deque[int]):
    """A deque with an attribute beside what it holds."""

    def __init__(self) -> None:
        super().__init__(maxlen=2)
        self.added = 0

    def move(self) -> None:
        self.append(self.added)
        self.added += 1

    def values(self) -> Any:
        return list(self), self.added


class Written:
    """A tensor that is written through `.data`, and one through an array."""

    def __init__(self) -> None:
        self.one, self.other = torch.zeros(3), torch.zeros(3)

    def move(self) -> None:
        self.one.data.add_(1)
        self.other.numpy()[:] += 2

    def values(self) -> Any:
        return self.one.tolist(), self.other.tolist()


class Averaged:
    """A module that nobody knows, its weights and what it counts."""

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        self.net.weight.data.fill_(0)
        self.parts: list[Any] = [nn.Dropout(0.1), Counting()]

    def move(self) -> None:
        self.net.weight.data.add_(1)
        self.parts[0].p += 0.1
        self.parts[1].seen += 1

    def values(self) -> Any:
        return self.net.weight.tolist(), self.parts[0].p, self.parts[1].seen


class Counting(nn.Module):
    seen = 0


class Enclosed:
    """A function that counts in a variable of its own."""

    def __init__(self) -> None:
        self.call = counting()

    def move(self) -> None:
        self.call()

    def values(self) -> Any:
        return copy.copy(self.call.__closure__[0].cell_contents)


def counting() -> Any:
    seen = 0

    def call() -> None:
        nonlocal seen
        seen += 1

    return call


KINDS: tuple[Callable[[], Any], ...] = (Slotted, Typed, Mapped, Buffer, Written, Averaged, Enclosed)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def gone_on(make: Callable[[], Any], hold: Callable[[Any], Any]) -> Any:
    """What it is in a process that goes on from behind two moves."""
    one, other = make(), make()
    first, second = Attributes(), Attributes()
    first.watch("it", Holder(hold(one)))
    second.watch("it", Holder(hold(other)))
    for _ in range(2):
        one.move()
    state = first.state()
    assert first.left == {}
    assert state
    second.restore(copy.deepcopy(state))
    assert second.left == {}
    assert other.values() == one.values()


@pytest.mark.parametrize("make", KINDS)
def test_an_object_in_an_attribute(make: Callable[[], Any]) -> None:
    gone_on(make, lambda one: one)


@pytest.mark.parametrize("make", [Slotted, Typed, Mapped, Written, Averaged])
def test_an_object_in_a_container(make: Callable[[], Any]) -> None:
    gone_on(make, lambda one: {"of": [one, (one,)]})


def test_an_object_that_is_made_while_training() -> None:
    holder: Any = Holder(None)
    kept, again = Attributes(), Attributes()
    kept.watch("it", holder)
    holder.held = Slotted()
    holder.held.move()
    state = kept.state()
    other: Any = Holder(Typed())
    again.watch("it", other)
    again.restore(state)
    assert type(other.held) is Slotted
    assert other.held.values() == holder.held.values()


class Shared:
    """It counts for all objects of its class."""

    seen: ClassVar[int] = 0
    history: ClassVar[list[int]] = []


def test_what_a_class_holds_for_all_its_objects() -> None:
    kept = Attributes()
    kept.watch("it", Holder(Shared()))
    Shared.seen = 3
    Shared.history.append(4)
    state = copy.deepcopy(kept.state())
    Shared.seen = 0
    Shared.history.clear()
    kept.restore(state)
    assert (Shared.seen, Shared.history) == (3, [4])
    Shared.seen = 0
    Shared.history.clear()


def test_an_array_that_is_too_large_to_be_kept_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_LOOKED_AT", 1 << 10)
    holder: Any = Holder(np.zeros(1 << 20))
    kept = Attributes()
    kept.watch("it", holder)
    assert kept.state() == {}
    holder.held[0] = 1
    assert list(kept.state()) == ["it"]


def test_another_function_in_an_attribute_is_named() -> None:
    holder: Any = Holder(len)
    kept = Attributes()
    kept.watch("it", holder)
    assert kept.state() == {}
    assert kept.left == {}
    holder.held = sum
    assert kept.state() == {}
    assert list(kept.left) == ["it.held"]


def test_an_array_of_objects_is_named_where_one_changes() -> None:
    holder: Any = Holder(np.array([None, [1]], dtype=object))
    kept = Attributes()
    kept.watch("it", holder)
    assert kept.state() == {}
    assert kept.left == {}
    holder.held[1].append(2)
    assert kept.state() == {}
    assert list(kept.left) == ["it.held"]
