"""What loading may build besides tensors and plain data: the classes that the user has named."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fairlead.errors import ConfigError

__all__ = ["allowed"]


def allowed(names: Sequence[str], *, where: str = "trainer.checkpoint_io.safe_globals") -> AbstractContextManager[Any]:
    """Inside it `torch.load(weights_only=True)` takes these classes and functions too.

    Args:
        names: As `package.module.Name`; each is imported.
        where: Where the user has named them.

    Raises:
        ConfigError: One does not exist.
    """
    found: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    for name in names:
        try:
            found.append((pkgutil.resolve_name(name), name))
        except Exception as error:  # importing a module runs it
            raise ConfigError(
                f"{name!r} was not found",
                where=where,
                why=f"{type(error).__name__}: {error}",
                fix="write it as package.module.Name",
            ) from error
    return torch.serialization.safe_globals(found)
