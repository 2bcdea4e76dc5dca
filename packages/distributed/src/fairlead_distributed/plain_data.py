"""States of a user's own objects as plain data and tensors, which can be loaded without running code from the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

_ARRAY: Final = "fairlead:array"


def to_plain(value: Any, where: str = "state") -> Any:
    """The value with NumPy arrays as tensors, mappings as dicts, and everything else as it is.

    Args:
        value: Nested data.
        where: How to call it in an error.

    Raises:
        TypeError: It holds something else; the message names the place and the type.

    Example:
        >>> to_plain({"epoch": np.int64(3)})
        {'epoch': 3}
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        # torch has no arithmetic on some unsigned types, but bytes are bytes.
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else None
        return {_ARRAY: str(value.dtype), "shape": list(value.shape), "data": data}
    if isinstance(value, Mapping):
        return {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(to_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}, which is no plain data")


def from_plain(value: Any) -> Any:
    """What `to_plain` was given: mappings come back as dicts."""
    if isinstance(value, dict):
        if _ARRAY in value:
            data = value["data"].numpy().tobytes() if value["data"] is not None else b""
            return np.frombuffer(data, dtype=value[_ARRAY]).reshape(value["shape"]).copy()
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    return value
