"""A failure of a rank, as it is shown: the user's own frames, and the exit code it means."""

from __future__ import annotations

import os
import site
import traceback
from collections.abc import Sequence

from lightning.pytorch.utilities.exceptions import SIGTERMException

import fairlead
from fairlead.errors import FairleadError
from fairlead.modules import CodeRoot

__all__ = ["described_failure"]


def described_failure(error: BaseException, root: CodeRoot) -> tuple[str, int]:
    """The text to show for an error, and the exit code.

    A mistake in the config has no traceback.  An error of the user's own code has one, cut to
    their frames, with the innermost frame of the library that raised.

    Args:
        error: What was raised.
        root: Where the user's code is.
    """
    if isinstance(error, FairleadError):
        return f"error: {error.block()}", error.exit_code
    if isinstance(error, SIGTERMException):
        return "stopped by SIGTERM; the checkpoint of the last step is saved", 143
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return "stopped by the keyboard; the run goes on from its last checkpoint when it is started again", 130
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return f"the job ended itself with exit code {code}", code or 1
    return _traceback(error, root), 1


def _traceback(error: BaseException, root: CodeRoot) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    users = _of_user(frames, root)
    shown = list(users)
    if frames and (not users or frames[-1] is not users[-1]):
        shown.append(frames[-1])
    lines = ["Traceback (your code):\n" if users else "Traceback:\n", *traceback.format_list(shown)]
    lines += traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _of_user(frames: Sequence[traceback.FrameSummary], root: CodeRoot) -> list[traceback.FrameSummary]:
    folders = tuple(f"{folder}{os.sep}" for folder in root.folders)
    # In a checkout of Fairlead its own sources lie under the user's root as well.
    others = (*site.getsitepackages(), os.path.dirname(fairlead.__file__), os.path.dirname(__file__))
    return [f for f in frames if f.filename.startswith(folders) and not f.filename.startswith(others)]
