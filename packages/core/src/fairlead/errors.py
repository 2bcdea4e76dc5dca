"""Every error a user may meet: what happened, where, why, and what to do. Commands print its block, no traceback."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FairleadError",
    "FingerprintError",
    "MissingDependencyError",
    "PluginError",
    "RunDirectoryError",
    "RunFailedError",
    "RunLockedError",
    "UserCodeError",
    "did_you_mean",
    "names_in",
]


class FairleadError(Exception):
    """The base of all errors that Fairlead raises on purpose; `exit_code` is what a command ends with.

    Args:
        what: What went wrong, one sentence, no full stop needed.
        where: The location: a config path and line (`job.yaml:7, trainer.strategy.stage`), a file.
        why: The reason, as far as it is known.
        fix: What the user can do; a command line where there is one.

    Example:
        >>> print(ConfigError("unknown field 'layres'", where="model.args", fix="write 'layers'"))
        unknown field 'layres'
          where: model.args
          do:    write 'layers'
    """

    exit_code = 2
    code: ClassVar[str | None] = None
    """The code of the finding that a check makes of it, where that is always the same."""

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return self.block()

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between processes, and a subclass may have another constructor: without it.
        return Exception.__new__, (type(self), self.what), self.__dict__

    def block(self) -> str:
        """The error as one block of text, without a trailing newline."""
        lines = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("do", self.fix)):
            if text:
                head, *more = text.splitlines()
                lines.append(f"  {label + ':':<7}{head}")
                lines.extend(" " * 9 + line for line in more)
        return "\n".join(lines)


class ConfigError(FairleadError):
    """A config or a call is wrong. Nothing was started or written."""


class PluginError(FairleadError):
    """A selected plugin is broken, of another contract version, or there are two of its name."""

    code = "plugin-broken"


class MissingDependencyError(PluginError):
    """A selected plugin, or its engine, is not installed; `fix` is the exact pip line."""

    code = "plugin-missing"


class UserCodeError(FairleadError):
    """The user's own module or class was not found, or raised; their frames are in `why`."""


class RunDirectoryError(FairleadError):
    """The run directory cannot be used: not writable, damaged, or of something else."""


class RunLockedError(RunDirectoryError):
    """Another live process owns the run directory."""


class FingerprintError(RunDirectoryError):
    """The run directory holds a run of another model, data, seed or trainer."""


class CheckpointError(FairleadError):
    """A checkpoint is damaged, incomplete, or does not fit this model."""


class RunFailedError(FairleadError):
    """The run itself failed: a rank died or the user's code raised while it ran."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to a misspelt one, or None when none is near."""
    known = list(known)
    lowered = {k.lower(): k for k in reversed(known)}
    close = difflib.get_close_matches(word.lower(), lowered, n=1)
    return lowered[close[0]] if close else None


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """The names in a folder, to propose one of them; none where it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
