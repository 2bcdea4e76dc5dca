"""Objects as people write them, with what is not kept: where it has changed, it is named, and never passed over."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from fairlead_distributed import object_fingerprint
from fairlead_distributed.attributes import Attributes


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("__hidden", "total")

    def __init__(self) -> None:
        self.total, self.__hidden = 0.0, 0

    def move(self) -> None:
        self.__hidden += 1


class Meter:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def move(self) -> None:
        self.seen.append(len(self.seen))


class Below:
    """An object in an object in the attribute."""

    def __init__(self) -> None:
        self.held = Holder(Holder(0))

    def move(self) -> None:
        self.held.held.held += 1


class Mapped(MutableMapping[str, int]):
    """A mapping, and no dict."""

    def __init__(self) -> None:
        self.inner = Meter()

    def __getitem__(self, key: str) -> int:
        return self.inner.seen[int(key)]

    def __setitem__(self, key: str, value: int) -> None: ...

    def __delitem__(self, key: str) -> None: ...

    def __iter__(self) -> Iterator[str]:
        return map(str, self.inner.seen)

    def __len__(self) -> int:
        return len(self.inner.seen)

    def move(self) -> None:
        self.inner.move()


class Buffer(deque[int]):
    """A deque with an attribute beside what it holds."""

    added = 0

    def move(self) -> None:
        self.added += 1


class Enclosed:
    """A function that counts in a variable of its own."""

    def __init__(self) -> None:
        seen = 0

        def call() -> None:
            nonlocal seen
            seen += 1

        self.move = call

    def __call__(self) -> Any:
        return self.move


class Partial:
    def __init__(self) -> None:
        self.inner = Meter()

    def __call__(self) -> Any:
        return functools.partial(print, self.inner)

    def move(self) -> None:
        self.inner.move()


class ByData:
    """An array of objects, one of which changes."""

    def __init__(self) -> None:
        self.array = np.array([None, [1]], dtype=object)

    def __call__(self) -> Any:
        return self.array

    def move(self) -> None:
        self.array[1].append(2)


class Shared:
    """It counts for all objects of its class."""

    seen: ClassVar[int] = 0

    def move(self) -> None:
        Shared.seen += 1


def listed(make: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        one = make()
        return one, {"of": [one, (one,)]}

    return made


def itself(make: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        one = make()
        return one, one() if callable(one) else one

    return made


@pytest.mark.parametrize(
    "make",
    [
        *(itself(one) for one in (Slotted, Below, Mapped, Buffer, Enclosed, Partial, ByData, Shared)),
        *(listed(one) for one in (Slotted, Meter, Mapped, Buffer)),
    ],
)
def test_what_is_not_kept_is_named_where_it_changes(make: Callable[[], tuple[Any, Any]]) -> None:
    one, held = make()
    kept = Attributes()
    kept.watch("it", Holder(held))
    kept.mark()
    assert (kept.state(), kept.unsaved) == ({}, {})
    one.move()
    assert (kept.state(), len(kept.unsaved)) == ({}, 1)


class Written:
    """A tensor that is written through `.data`, and one through an array."""

    def __init__(self) -> None:
        self.one, self.other = torch.zeros(3), torch.zeros(3)


def test_what_is_written_past_torch_is_seen() -> None:
    one, kept = Written(), Attributes()
    kept.watch("it", one)
    assert kept.state() == {}
    one.one.data.add_(1)
    one.other.numpy()[:] += 2
    assert [name for (_, name), _ in kept.state()["it"]] == ["one", "other"]


class Curriculum(Dataset[int]):
    def __init__(self) -> None:
        self.level = 1


def test_a_dataset_in_one_of_torchs_is_kept() -> None:
    first, second, kept, again = Curriculum(), Curriculum(), Attributes(), Attributes()
    kept.watch("loader 0 dataset", Subset(first, [0]))
    again.watch("loader 0 dataset", Subset(second, [0]))
    first.level = 3
    again.restore(kept.state())
    assert (second.level, kept.unsaved) == (3, {})


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = 0


def test_what_a_module_that_nobody_registers_keeps_beside_its_weights_is_restored() -> None:
    first, second, kept, again = Counting(), Counting(), Attributes(), Attributes()
    kept.watch("callback Ema", Holder(first))
    again.watch("callback Ema", Holder(second))
    first.weight.data.add_(1)
    first.seen = 1
    again.restore(kept.state())
    assert (second.weight.item(), second.seen, kept.unsaved) == (1.0, 1, {})


@pytest.mark.parametrize("made", [Meter, lambda: nn.Linear(1, 1)], ids=["meter", "module"])
def test_an_object_that_is_made_while_training_is_named(made: Callable[[], Any]) -> None:
    """A resumed run has none to put its state into; one that is made by `on_fit_start` is there in both."""
    holder: Any = Holder(None)
    holder.late = None
    kept = Attributes()
    kept.watch("it", holder)
    holder.held = made()
    kept.begun()
    holder.late = made()
    assert {path.partition(".")[0] or name for (path, name), _ in kept.state()["it"]} == {"held"}
    (name, why), *others = kept.unsaved.items()
    assert (name, others) == ("it.late", [])
    assert "that training has made: make it before the training begins, as in __init__" in why


def test_an_array_that_is_too_large_to_be_read_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_fingerprint, "_READ", 1 << 10)
    holder: Any = Holder([np.zeros(1 << 20)])
    kept = Attributes()
    kept.watch("it", holder)
    assert kept.state() == {}
    holder.held[0][0] = 1
    assert list(kept.state()) == ["it"]


def test_another_function_in_an_attribute_is_named() -> None:
    holder: Any = Holder(len)
    kept = Attributes()
    kept.watch("it", holder)
    assert kept.state() == {}
    assert kept.unsaved == {}
    holder.held = sum
    assert kept.state() == {}
    assert list(kept.unsaved) == ["it.held"]


def test_an_engines_object_in_a_list_is_named_where_it_changes() -> None:
    weight, dataset = nn.Parameter(torch.ones(2)), Curriculum()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    kept = Attributes()
    kept.watch("optimizers", Holder([optimizer]))
    kept.watch("datasets", Holder([Subset(dataset, [0])]))
    kept.begun()
    assert (kept.state(), kept.unsaved) == ({}, {})
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    dataset.level = 3
    kept.state()
    assert set(kept.unsaved) == {"optimizers.held", "datasets.held"}
