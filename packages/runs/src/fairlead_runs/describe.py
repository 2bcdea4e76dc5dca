"""A model or datamodule as plain data: for the record of a run that was started from Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["described"]


def described(thing: object) -> dict[str, Any]:
    """The class and the saved hyperparameters of a LightningModule or DataModule.

    Values that are not plain data are given by their type, so that the description is the same in
    every process and at every start.

    Example:
        >>> described(object())
        {'class': 'builtins:object', 'args': {}}
    """
    kind = type(thing)
    hparams = getattr(thing, "hparams_initial", None)
    args = {str(k): _plain(v) for k, v in hparams.items()} if isinstance(hparams, Mapping) else {}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "args": args}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
