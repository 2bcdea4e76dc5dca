"""What loading may build besides tensors and plain data: the classes and functions that the user trusts by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from fairlead.errors import CheckpointError, ConfigError


def allowed(names: Sequence[str], *, where: str = "trainer.checkpoint_io.safe_globals") -> AbstractContextManager[Any]:
    """Inside it `torch.load(weights_only=True)` takes these classes and functions too; each is imported."""
    found: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    for name in names:
        try:
            if "." not in name:
                raise ValueError("it has no module")
            found.append((pkgutil.resolve_name(name), name))
        except Exception as error:  # importing a module runs it
            raise ConfigError(
                f"{name!r} was not found",
                where=where,
                why=f"{type(error).__name__}: {error}",
                fix="write it as package.module.Name",
            ) from error
    return torch.serialization.safe_globals(found)


def unsafe_globals(path: Path, allowed_names: Sequence[str] = ()) -> list[str]:
    """The classes and functions in a file of torch.save that `weights_only=True` will not load, sorted.

    Only its table of contents is read; [] where it has none (torch before 1.6) or is damaged: loading says which.
    """
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return []
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # damaged bytes raise anything
        return []
    return sorted(name for name in found if name not in allowed_names)


def holds_objects(where: Path, why: str, fix: str, kind: str = "the checkpoint") -> CheckpointError:
    """The error of a file that loading would run code of."""
    what = f"{kind} holds pickled objects, which could run any code on loading"
    return CheckpointError(what, where=str(where), why=why, fix=fix)


def refuse_unsafe(where: Path, found: Sequence[str], *, kind: str = "the checkpoint") -> None:
    """For the commands: raises when there are any, with the words to add to the command."""
    if found:
        why = f"besides tensors and plain data it holds: {', '.join(found)}"
        more = " ".join(f"--trust {name}" for name in found)
        raise holds_objects(where, why, f"if you trust the file, add: {more}", kind)
