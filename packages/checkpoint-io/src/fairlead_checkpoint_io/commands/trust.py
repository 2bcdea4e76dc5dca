"""What may be in a checkpoint besides tensors and plain data: only what was named with `--trust`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io.base import FileCheckpointIOConfig
from fairlead_checkpoint_io.files.safe import allowed
from fairlead_checkpoint_io.files.writing import unsafe_globals

__all__ = ["foreign", "refuse_foreign", "trusted"]


def trusted(names: Sequence[str]) -> AbstractContextManager[Any]:
    """While it lasts, `torch.load(weights_only=True)` also loads what these names stand for.

    Raises:
        ConfigError: There is nothing of such a name.
    """
    try:
        FileCheckpointIOConfig.model_validate({"name": "torch", "safe_globals": tuple(names)})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(said, where="--trust", fix="write it as package.module.Name") from None
    return allowed(names, where="--trust")


def foreign(path: Path, names: Sequence[str]) -> list[str]:
    """The classes and functions in a file of torch.save that neither torch nor the user calls safe; [] if unreadable.

    Only a table of contents is read.  A damaged file is reported when it is loaded.
    """
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return []  # a file of torch before 1.6 has no table of contents: loading it says what is in it
    try:
        return [name for name in unsafe_globals(path) if name not in names]
    except Exception:  # damaged bytes raise anything, and say more where they are loaded
        return []


def refuse_foreign(where: Path, found: Sequence[str], *, kind: str = "the checkpoint") -> None:
    """Raises when there are any.

    Raises:
        CheckpointError: With the words to add to the command.
    """
    if found:
        more = " ".join(f"--trust {name}" for name in found)
        raise CheckpointError(
            f"{kind} holds pickled objects, which could run any code on loading",
            where=str(where),
            why=f"besides tensors and plain data it holds: {', '.join(found)}",
            fix=f"if you trust the file, add: {more}",
        )
