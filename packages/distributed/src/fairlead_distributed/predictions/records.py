"""What `predict_step` returns for a batch, taken apart into columns with a row for each sample, and put together."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fairlead.errors import UserCodeError
from fairlead_distributed.plain_data import ATOMS, from_plain, record_of, to_plain

Column = Tensor | list[Any]
"""A tensor, shape `(samples, ...)`, or a list with one item for each sample, in the form of `to_plain`."""
Structure = int | dict[str, Any]
"""How the columns make a record, as JSON: the number of a column, or a dict or tuple of such."""

_TEXT, _TENSOR, _OTHER = b"s", b"t", b"o"
_RETURNS: Final = (
    "return tensors whose first dimension is the batch, lists with one item for each sample, or a dict, tuple or "
    "dataclass of these"
)


def split(output: Any, samples: int | None) -> tuple[Structure, list[Column]]:
    """The columns of what a batch of so many samples gave; of a sample that is no batch (None) it has one row.

    A tensor has the batch as its first dimension, and a list has one item for each sample, which may be of any shape;
    dicts and tuples hold such columns, and named tuples and dataclasses, which become dicts. The columns are copies in
    the memory of the CPU.

    Raises:
        UserCodeError: It is None, or a part of it does not have one row for each sample.

    Example:
        >>> structure, columns = split({"logits": torch.zeros(2, 3), "texts": ["a", "b"]}, 2)
        >>> build(structure, lambda column: columns[column][1])
        {'logits': tensor([0., 0., 0.]), 'texts': 'b'}
    """
    if output is None:
        raise UserCodeError("predict_step returned None: there is nothing to save", where="predict_step", fix=_RETURNS)
    columns: list[Column] = []
    return _split(output, samples, "what predict_step returned", columns), columns


def _split(value: Any, samples: int | None, where: str, columns: list[Column]) -> Structure:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        columns.append(_rows(value, samples, where))
    elif isinstance(value, list) and samples is not None:
        if len(value) != samples:
            raise _unfit(f"{where} is a list of {len(value)}", samples, "a tuple or a dict where it is no such list")
        columns.append([_plain(item, f"{where}[{number}]") for number, item in enumerate(value)])
    elif isinstance(value, Mapping):
        return {
            "dict": [[_key(key, where), _split(v, samples, f"{where}[{key!r}]", columns)] for key, v in value.items()]
        }
    elif type(value) is tuple:
        return {"tuple": [_split(item, samples, f"{where}[{n}]", columns) for n, item in enumerate(value)]}
    elif not isinstance(value, (*ATOMS, list)) and (record := record_of(value)) is not None:
        return {"dict": [[name, _split(part, samples, f"{where}.{name}", columns)] for name, part in record.items()]}
    elif samples in (None, 1):
        columns.append([_plain(value, where)])
    else:
        raise _unfit(f"{where} is a single {type(value).__name__}", samples, "a list, or leave it out")
    return len(columns) - 1


def _rows(value: Tensor, samples: int | None, where: str) -> Tensor | list[Any]:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        kind = type(value).__name__ if type(value) is not Tensor else str(value.layout)
        raise UserCodeError(f"{where} is a tensor of a special kind, {kind}", where="predict_step", fix="make it dense")
    # A copy: a view would keep all of what it is a part of, and the model may reuse its buffer.
    own = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if samples is None:
        return own.unsqueeze(0)
    if samples == 1 and own.ndim == 0:
        return [own]
    if own.ndim == 0 or own.shape[0] != samples:
        raise _unfit(f"{where} is a tensor of shape {tuple(own.shape)}", samples, "a list of one tensor a sample")
    return own


def _unfit(what: str, samples: int | None, instead: str) -> UserCodeError:
    return UserCodeError(
        f"{what}, of a batch of {samples} samples",
        where="predict_step",
        why="each sample's prediction is saved and looked up by the index of the sample",
        fix=f"{_RETURNS}; here {instead}",
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (str, int, float, bool, type(None)):
        return key
    raise UserCodeError(f"{where} has the key {key!r}", where="predict_step", fix="use text or numbers as keys")


def _plain(value: Any, where: str) -> Any:
    if type(value) is str:
        return value
    try:
        return _to_cpu(to_plain(value, where))
    except TypeError as error:
        raise UserCodeError(
            f"what predict_step returned cannot be saved: {error}", where="predict_step", fix=_RETURNS
        ) from None


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        if value.get("fairlead:kind") == "on":
            return value["state"][1].cpu().contiguous()
        if value.get("fairlead:kind") == "record":  # without its class, which a reader need not have
            return _to_cpu(value["state"][2])
        return {key: _to_cpu(item) for key, item in value.items()}
    return type(value)(map(_to_cpu, value)) if isinstance(value, (list, tuple)) else value


def build(structure: Structure, column: Callable[[int], Any]) -> Any:
    """A record of a structure, of what `column` gives for the number of each column."""
    if isinstance(structure, int):
        return column(structure)
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: build(part, column) for key, part in parts}
    return tuple(build(part, column) for part in parts)


def encoded(value: Any) -> bytes:
    """One item of a list as bytes: a text, a tensor, or what else `to_plain` gives."""
    if type(value) is str:
        return _TEXT + value.encode("utf-8", "surrogatepass")
    if isinstance(value, Tensor):
        head = f"{str(value.dtype).removeprefix('torch.')} {' '.join(map(str, value.shape))}\n"
        return _TENSOR + head.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return _OTHER + buffer.getvalue()


def decoded(data: bytes) -> Any:
    """What `encoded` was given."""
    kind, data = data[:1], data[1:]
    if kind == _TEXT:
        return data.decode("utf-8", "surrogatepass")
    if kind == _TENSOR:
        head, _, content = data.partition(b"\n")
        dtype, *shape = head.decode().split()
        made = torch.empty([*map(int, shape)], dtype=getattr(torch, dtype))
        if content:
            made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return made
    return from_plain(torch.load(io.BytesIO(data), weights_only=True))
