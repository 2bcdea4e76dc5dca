"""What an exported module takes and gives: tensors in a fixed order, with names, shapes, dtypes and a sample."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from fairlead.errors import CheckpointError, ConfigError
from fairlead.user_code import CodeRoot, user_error
from fairlead_checkpoint_io.export.model import Built, is_lightning, silent

Call = tuple[tuple[Any, ...], dict[str, Any]]
_OTHERWISE: Final = "give a sample input: --sample FILE, a tensor, a tuple of arguments or a dict of named ones"


@dataclass(frozen=True)
class Value:
    """An input or output; a size is `batch` where it is the batch's, None where it changes with that otherwise."""

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} [{', '.join('?' if size is None else str(size) for size in self.shape)}] {self.dtype}"


class Flat(nn.Module):
    """A module that takes tensors only, in order, and gives one tensor or a tuple of them.

    Whatever else the sample call has, such as a flag or None, is a constant of the exported model.
    """

    def __init__(self, model: nn.Module, call: inspect.BoundArguments, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._signature = call.signature
        leaves, self._spec = tree_flatten_with_path(dict(call.arguments))
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for _, leaf in leaves]

        def forward(*tensors: Tensor) -> Any:
            found = tuple(leaf for leaf in tree_leaves(self.original(*tensors)) if isinstance(leaf, Tensor))
            return found[0] if len(found) == 1 else found

        # By names: the guards of torch.export 2.9 cannot be evaluated for a `*tensors`.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(f"{re.sub(r'[^0-9a-zA-Z]', '_', n)}_{i}", kind) for i, n in enumerate(names)]
        forward.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        self.forward = forward

    def original(self, *tensors: Tensor) -> Any:
        """What the model itself gives."""
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant[0] for constant in self._constants]
        call = inspect.BoundArguments(self._signature, tree_unflatten(leaves, self._spec))
        return self.model(*call.args, **call.kwargs)


@dataclass(frozen=True)
class Interface:
    """A module that takes and gives tensors, the user's `part` or a wrapper of it, with a sample input."""

    part: nn.Module
    module: nn.Module
    sample: list[Tensor]
    inputs: list[Value]
    outputs: list[Value]
    left_out: Sequence[str] = ()
    """What else the model gives, a sentence for each."""

    @property
    def batched(self) -> list[bool]:
        """Which inputs have the batch as their first dimension; none where its size is a constant."""
        return [value.shape[:1] == ("batch",) for value in self.inputs]

    def sample_of(self, rows: int) -> list[Tensor]:
        """The sample input with another number of rows."""
        return [_resized(one, rows) if has else one for one, has in zip(self.sample, self.batched, strict=True)]

    def others(self) -> Iterator[tuple[str, list[Tensor]]]:
        """The sample with other values, which may take another branch."""
        yield "the sample negated", [-one if one.is_floating_point() else one for one in self.sample]
        pairs = zip(self.sample, self.batched, strict=True)
        yield "the sample's rows reversed", [one.flip(0) if has else one for one, has in pairs]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the module gives, in Python."""
        with torch.no_grad():
            return listed(self.module(*inputs))


def listed(outputs: Any) -> list[Tensor]:
    """The outputs of an exported module, of which a single one is no tuple."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def interface_of(
    part: nn.Module, call: inspect.BoundArguments, root: CodeRoot, fixed: bool, names: Mapping[str, str | None]
) -> Interface:
    """The module as exporters need it, for any batch size or, where `fixed`, that of the sample `call`.

    torch.export takes a size of 1 for a constant, so the sample is given two rows.  `names` has those that are given
    for, separated by commas.  `ConfigError`: it takes or gives no tensor, or the names are not right; `UserCodeError`:
    it cannot run the sample, or another batch size.
    """
    leaves = tree_flatten_with_path(dict(call.arguments))[0]
    tensors = {_name(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    if not tensors:
        raise ConfigError("the sample has no tensor", where="--sample", fix="give a tensor, a tuple or a dict of them")
    double = {one.dtype for one in part.parameters() if one.is_floating_point()} == {torch.float64}
    sample = [one.double() if double and one.is_floating_point() else one for one in tensors.values()]
    rows = 0 if fixed else next((one.shape[0] for one in sample if one.dim()), 0)
    batched = [rows > 0 and one.dim() > 0 and one.shape[0] == rows for one in sample]
    sample = [_resized(one, 2) if has else one for one, has in zip(sample, batched, strict=True)]
    flat = Flat(part, call, list(tensors))
    given = _called(flat.original, sample, root, "the sample")
    outputs = {_name(path, "output"): leaf for path, leaf in tree_flatten_with_path(given)[0]}
    found = {name: leaf for name, leaf in outputs.items() if isinstance(leaf, Tensor)}
    if not found:
        what = f"forward gives a {type(given).__name__}, in which torch knows of no tensor"
        raise ConfigError(what, where=type(part).__name__, fix="have it return tensors, in a tuple, list or dict")
    of_inputs, of_outputs = _named("inputs", names, list(tensors)), _named("outputs", names, list(found))
    if both := set(of_inputs) & set(of_outputs):
        what = f"an input and an output are both named {min(both)!r}"
        raise ConfigError(what, fix="name the outputs: --outputs NAMES")
    takes = [
        Value(name, ("batch", *one.shape[1:]) if has else tuple(one.shape), _dtype(one))
        for name, one, has in zip(of_inputs, sample, batched, strict=True)
    ]
    # One that takes and gives what exporters do is left alone: its weights keep their names.
    plain = isinstance(given, Tensor) and len(call.args) == len(leaves) == len(tensors) and not call.kwargs
    others = {name: type(one).__name__ for name, one in outputs.items() if name not in found and one is not None}
    left_out = [f"{name} is a {kind}, not a tensor: the file does not return it" for name, kind in others.items()]
    made = Interface(part, part if plain else flat, sample, takes, [], left_out)
    larger = listed(_called(made.module, made.sample_of(3), root, "a batch of 3"))
    three = zip(of_outputs, found.values(), larger, strict=True)
    return replace(made, outputs=[Value(name, _sizes(two, more), _dtype(two)) for name, two, more in three])


def _called(module: Callable[..., Any], inputs: list[Tensor], root: CodeRoot, what: str) -> Any:
    try:
        with torch.no_grad(), silent():
            return module(*inputs)
    except Exception as error:
        fix = "--fixed-batch, if the batch size is a constant of your code or, by chance, a size of another input"
        raise user_error(f"the model cannot run {what}", error, root, where="forward", fix=fix) from error


def _resized(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor, repeated where there are fewer."""
    return tensor[torch.arange(rows) % tensor.shape[0]]


def _name(path: Sequence[Any], otherwise: str = "") -> str:
    """`batch.image`, `hidden.0`; of what is in no mapping `output`, `output.0`."""
    parts = (a.key if isinstance(a, MappingKey) else a.name if isinstance(a, GetAttrKey) else a.idx for a in path)
    keys = list(map(str, parts))
    return ".".join(keys if keys and not keys[0].isdecimal() else [otherwise, *keys])


def _named(kind: str, given: Mapping[str, str | None], own: list[str]) -> list[str]:
    text = given[kind]
    if text is None:
        return own
    names = [name.strip() for name in text.split(",")]
    if len(names) != len(own) or len(set(names)) < len(names) or not all(names):
        few = f"1 name: the model's only {kind[:-1]} is {own[0]}"
        need = few if len(own) == 1 else f"{len(own)} different names, for {', '.join(own)}"
        raise ConfigError(f"--{kind} needs {need}", where=f"--{kind} {text}")
    return names


def _sizes(two: Tensor, three: Tensor) -> tuple[int | str | None, ...]:
    """The shape of an output, from those of two and of three rows."""
    pairs = zip(two.shape, three.shape, strict=True)
    return tuple(a if a == b else "batch" if (a, b) == (2, 3) else None for a, b in pairs)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- the sample


def sample_of(built: Built, part: nn.Module, file: Path | None) -> inspect.BoundArguments:
    """The arguments of a call of the module's `forward`: of a file, else those of the first batch of validation.

    `ConfigError`: there are no validation data, or validating does not call the module.  `UserCodeError`: validating
    failed before that.
    """
    if file is None and not is_lightning(built.model):
        why = "it is no LightningModule, which has validation data"
        raise ConfigError(f"nothing says what {built.name} takes", where="--model", why=why, fix=_OTHERWISE)
    args, kwargs = _read(file) if file is not None else _validated(built, part)
    signature = inspect.signature(part.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        what = f"forward{signature} does not take this sample"
        raise ConfigError(what, where=f"--sample {file}", why=str(error), fix=_OTHERWISE) from error


def _read(file: Path) -> Call:
    try:
        return _call(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # pickle, zip, OS: torch.load raises whatever it meets
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError("the sample cannot be read", where=f"--sample {file}", why=why, fix=_OTHERWISE) from error


def _call(sample: Any) -> Call:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


def _validated(built: Built, part: nn.Module) -> Call:
    """What the module is called with first, when Lightning validates one batch."""
    model: Any = built.model
    calls: list[Call] = []
    forward = part.forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            calls.append(tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else one, (args, kwargs)))
        return forward(*args, **kwargs)

    try:
        with silent(), patch.object(part, "forward", recorded):  # also of `self.forward(x)`, which calls no hook
            model.trainer.validate(model, datamodule=built.data, verbose=False)
    except Exception as error:
        if not calls:  # what fails behind it is of no matter here
            what = "validating one batch failed, from which the sample input is taken"
            raise user_error(what, error, built.root, where="data", fix=_OTHERWISE) from error
    if calls:
        return calls[0]
    if part is model and model.example_input_array is not None:
        return _call(model.example_input_array)
    inner = next((name for name, _ in model.named_children()), "NAME")
    what = "there is no sample input: validation_step does not call " + ("self(...)" if part is model else "this part")
    raise ConfigError(what, where=built.name, fix=f"export the part that it calls: --part {inner}; or {_OTHERWISE}")
