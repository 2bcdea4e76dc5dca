"""The batches of the replicas as one: put together along their first dimension, in another order, and their digest."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fairlead_lightning.verify.numbers import bytes_of


class NotOneBatchError(ValueError):
    """Batches that cannot be put together; the text says what and why."""


def detached(batch: Any) -> Any:
    """A copy on the CPU, which what the training does to its batch does not change."""
    return _mapped(batch, lambda tensor: tensor.detach().to("cpu", copy=True), copy.deepcopy)


def joined(batches: Sequence[Any], where: str = "batch", *, dim: int = 0) -> Any:
    """One batch of the samples of all, in their order; nested structures keep their type.

    Tensors are put together along dimension `dim`, those with fewer dimensions along their last; lists of texts or
    numbers behind each other; what all have alike stays as it is.

    Raises:
        NotOneBatchError: Structures, or shapes behind the first dimension, differ, or a value belongs to no sample.

    Example:
        >>> joined([{"x": torch.zeros(2, 3)}, {"x": torch.ones(1, 3)}])["x"].shape
        torch.Size([3, 3])
    """
    first = batches[0]
    if any(type(one) is not type(first) for one in batches):
        raise NotOneBatchError(f"{where} is of another type on each replica")
    if isinstance(first, Tensor):
        if first.ndim == 0:
            return _same(batches, where)
        if any(one.layout != torch.strided or one.is_nested for one in batches):
            raise NotOneBatchError(f"{where} is a sparse or nested tensor")
        at = min(dim, first.ndim - 1)
        others = [one.shape[:at] + one.shape[at + 1 :] for one in batches]
        if any(other != others[0] for other in others) or any(one.dtype != first.dtype for one in batches):
            shapes = ", ".join(str(tuple(one.shape)) for one in batches)
            raise NotOneBatchError(f"{where} has shapes that do not go together: {shapes}")
        return torch.cat(list(batches), at)
    if isinstance(first, PackedSequence):
        raise NotOneBatchError(f"{where} is a PackedSequence")
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        values = {n: joined([getattr(one, n) for one in batches], f"{where}.{n}", dim=dim) for n in names}
        return _replaced(first, values)
    if isinstance(first, Mapping):
        if any(one.keys() != first.keys() for one in batches):
            raise NotOneBatchError(f"{where} has other keys on each replica")
        return _like(first, {k: joined([one[k] for one in batches], f"{where}[{k!r}]", dim=dim) for k in first})
    if isinstance(first, list) and all(not _holds_tensors(item) for one in batches for item in one):
        return [item for one in batches for item in one]
    if isinstance(first, list | tuple):
        if any(len(one) != len(first) for one in batches):
            raise NotOneBatchError(f"{where} is of another length on each replica")
        parts = enumerate(zip(*batches, strict=True))
        return _like(first, [joined(one, f"{where}[{i}]", dim=dim) for i, one in parts])
    return _same(batches, where)


def shuffled(batch: Any, generator: torch.Generator) -> Any:
    """The same samples in another order; None where the tensors have no first dimension in common.

    Example:
        >>> sorted(shuffled(torch.arange(4), torch.Generator().manual_seed(0)).tolist())
        [0, 1, 2, 3]
    """
    size = _samples(batch)
    return None if size is None else _taken(batch, size, torch.randperm(size, generator=generator).tolist())


def rows(batch: Any) -> list[Any]:
    """Its samples one by one; the batch itself where its tensors have no first dimension in common.

    Example:
        >>> [one.tolist() for one in rows(torch.arange(2))]
        [[0], [1]]
    """
    size = _samples(batch)
    return [batch] if size is None else [_taken(batch, size, [at]) for at in range(size)]


def _samples(batch: Any) -> int | None:
    """How many there are: the first dimension, where all tensors have it in common."""
    found = list(tensors(batch))
    sizes = {tensor.shape[0] for tensor in found if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 and all(tensor.layout == torch.strided for tensor in found) else None


def _taken(batch: Any, size: int, numbers: Sequence[int]) -> Any:
    """Some of its samples, in this order; what does not hold one value a sample stays."""

    def of_other(value: Any) -> Any:
        fits = isinstance(value, list) and len(value) == size and not any(map(_holds_tensors, value))
        return [value[number] for number in numbers] if fits else value

    return _mapped(
        batch, lambda tensor: tensor[torch.tensor(list(numbers), dtype=torch.long)] if tensor.ndim else tensor, of_other
    )


def digest(batch: Any) -> str:
    """The same for batches of the same values; what is no tensor counts by its pickle."""
    found = hashlib.sha256()

    def add(tensor: Tensor) -> Tensor:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.is_nested or tensor.layout != torch.strided:
            written = io.BytesIO()
            torch.save(tensor.detach().cpu(), written)
            found.update(written.getvalue())
        else:
            found.update(bytes_of(tensor.detach().cpu()))
        return tensor

    def add_other(value: Any) -> Any:
        found.update(pickle.dumps(value))
        return value

    _mapped(batch, add, add_other)
    return found.hexdigest()


def tensors(batch: Any) -> Iterator[Tensor]:
    """Each tensor of a nested batch."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(batch, add, lambda value: value)
    yield from found


def _mapped(value: Any, of_tensor: Callable[[Tensor], Tensor], of_other: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return _replaced(value, {n: _mapped(getattr(value, n), of_tensor, of_other) for n in names})
    if isinstance(value, Mapping):
        return _like(value, {k: _mapped(one, of_tensor, of_other) for k, one in value.items()})
    if isinstance(value, list | tuple) and any(map(_holds_tensors, value)):
        return _like(value, [_mapped(one, of_tensor, of_other) for one in value])
    return of_other(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_holds_tensors(getattr(value, field.name)) for field in dataclasses.fields(value))
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_holds_tensors, items))


def _like(container: Any, items: Any) -> Any:
    """The items in a container of the same type: a namedtuple, a subclass of dict."""
    if isinstance(container, Mapping):
        if type(container) is dict:
            return items
        made = copy.copy(container)  # a BatchEncoding keeps more than its items
        for key, value in items.items():
            made[key] = value  # type: ignore[index]
        return made
    if hasattr(container, "_fields"):
        return type(container)(*items)
    return type(container)(items)


def _replaced(instance: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values, also where it is frozen or takes other arguments."""
    made = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _same(values: Sequence[Any], where: str) -> Any:
    first = values[0]
    if any(digest(one) != digest(first) for one in values):
        raise NotOneBatchError(f"{where} is one value for a batch, and not the same on all replicas")
    return first
