"""Integers and masks that a traced step computes from its batch, in numbers: how many tokens an expert gets.

A traced tensor has no data. What code asks of some of them decides its shapes all the same: which tokens chose an
expert, how long a sequence is. So small tensors that come from the batch or from constants are computed beside the
trace; what a model's weights would decide is taken as evenly spread (the experts that a router chooses).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
_MOST: Final = 1 << 22
"""Elements of integers and masks that are computed; of other numbers a hundredth."""
_CHOOSE: Final = (aten.topk.default, aten.sort.default, aten.sort.stable)
_BY_DATA: Final = (
    aten.nonzero.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
)
"""Whose results have as many elements as the data say."""


class Finite(TorchFunctionMode):
    """Within it all numbers of a step are finite, which code checks before it continues."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function, or answers it."""
        name = getattr(func, "__name__", "")
        if name in ("isfinite", "isnan", "isinf") and args and isinstance(args[0], Tensor) and args[0].numel() <= _MOST:
            return torch.full(args[0].shape, name == "isfinite", dtype=torch.bool, device=args[0].device)
        return func(*args, **(kwargs or {}))


class UnknownValueError(Exception):
    """The step asks for a number that depends on the model's weights."""


class KnownValues:
    """The tensors of a trace whose numbers are known.

    Args:
        mode: The trace's.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: Any = WeakTensorKeyDictionary()
        self.decided = False
        """Whether sizes followed from them."""
        self._random = torch.Generator().manual_seed(0)

    def remember(self, fake: Tensor, value: Tensor) -> Tensor:
        """Notes a tensor's numbers."""
        self._known[fake] = value
        return fake

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Takes these as not known: weights, whose first numbers are not those of a training."""
        for one in tensors:
            self._known.pop(one, None)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives, with its numbers where they are known.

        Raises:
            UnknownValueError: Shapes follow from numbers that are not.
        """
        if func is aten._local_scalar_dense.default:
            return self._number(args[0])
        if func in _BY_DATA or (func is aten.index.Tensor and _masks(args[1])):
            return self._by_data(func, args, kwargs)
        out = func(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        tensors = [one for one in flat if isinstance(one, Tensor)]
        values = [self._known.get(one) for one in tensors]
        results = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        if func in _CHOOSE and _small(results[1]):
            self.remember(results[1], self._spread(results[1], tensors[0].shape[_dim(func, args, kwargs)]))
        elif func is aten.argmax.default and _small(results[0]):
            dim = args[1] if len(args) > 1 and args[1] is not None else -1
            self.remember(results[0], self._spread(results[0], tensors[0].shape[dim]))
        if results and all(map(_small, results)) and all(one is not None for one in values):
            numbers = iter(values)
            real = [next(numbers) if isinstance(one, Tensor) else one for one in flat]
            self._compute(func, tree_unflatten(real, spec), results)
        elif func._schema.is_mutable:
            self._forget_changed(args)
        return out

    def _compute(self, func: Any, arguments: Any, results: list[Tensor]) -> None:
        args, kwargs = arguments
        with unset_fake_temporarily():
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if func._schema.is_mutable and args and isinstance(args[0], Tensor):
                args = (args[0].clone(), *args[1:])
            real = [one for one in tree_flatten(func(*args, **kwargs))[0] if isinstance(one, Tensor)]
        for fake, value in zip(results, real, strict=True):
            self.remember(fake, value)

    def _by_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.decided = True

        def value(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            known = self._known.get(one)
            if known is None:
                name = func._schema.name.removeprefix("aten::")
                raise UnknownValueError(f"{name} of numbers that the weights decide")
            return known

        if func is aten.index.Tensor:
            arguments: list[Any] = []
            for one in args[1]:
                if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8):
                    with unset_fake_temporarily():
                        found = value(one).nonzero(as_tuple=True)
                    arguments += [self._fake(argument) for argument in found]
                else:
                    arguments.append(one)
            return func(args[0], arguments)
        if func is aten.masked_select.default:
            with unset_fake_temporarily():
                count = int(value(args[1]).broadcast_to(args[0].shape).sum())
            return args[0].new_empty(count)
        real_args, real_kwargs = tree_map(value, (args, kwargs))
        with unset_fake_temporarily():
            out = func(*real_args, **real_kwargs)
        return tree_map(lambda one: self._fake(one) if isinstance(one, Tensor) else one, out)

    def _fake(self, value: Tensor) -> Tensor:
        return self.remember(self._mode.from_tensor(value), value)

    def _number(self, tensor: Tensor) -> Any:
        value = self._known.get(tensor)
        if value is not None:
            self.decided = self.decided or not tensor.dtype.is_floating_point
            with unset_fake_temporarily():
                return value.item()
        # A loss that is logged, a check for NaN: neither changes what a step does. A count would.
        if tensor.dtype is torch.bool:
            return False
        if tensor.dtype.is_floating_point:
            return 1.0
        raise UnknownValueError("an integer that the weights decide was read (`.item()`, `.tolist()`)")

    def _spread(self, like: Tensor, size: int) -> Tensor:
        with unset_fake_temporarily():
            if like.ndim and like.shape[-1] <= size and like.numel():
                # Distinct in each row, and each number equally often over the rows.
                rows = like.numel() // like.shape[-1]
                first = torch.arange(rows).unsqueeze(-1) * like.shape[-1] + torch.arange(like.shape[-1])
                return (first % size).reshape(like.shape)
            return torch.randint(size, like.shape, generator=self._random)

    def _forget_changed(self, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            self._known.pop(args[0], None)


def _dim(func: Any, args: Any, kwargs: Any) -> int:
    position = {aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 2}[func]
    dim: int = args[position] if len(args) > position else kwargs.get("dim", -1)
    return dim


def _masks(indices: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _small(tensor: Tensor) -> bool:
    exact = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return tensor.numel() <= (_MOST if exact else _MOST // 100)
