"""What was resolved and checked before the ranks of a machine are started, for these ranks: they do not do it again."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Mapping
from typing import Any, Final

PLAN: Final = "FAIRLEAD_PLAN"
"""In a rank that Fairlead started: the file descriptor that it has inherited, and what is in the file."""


def plan_to_inherit(plan: object) -> tuple[int, str]:
    """A file descriptor for the ranks to inherit, and their `FAIRLEAD_PLAN`."""
    data = pickle.dumps(plan)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        fd = os.dup(file.fileno())
    return fd, f"{fd}:{hashlib.sha256(data).hexdigest()}"


def inherited_plan(environ: Mapping[str, str]) -> Any:
    """The plan that this rank was started with; None in any other process, also in one that a rank starts."""
    fd, _, digest = environ.get(PLAN, "").partition(":")
    if not fd:
        return None
    try:
        data = os.pread(int(fd), os.fstat(int(fd)).st_size, 0)  # the ranks share one offset
    except OSError:  # a descriptor is not passed on further, the variable is
        return None
    return pickle.loads(data) if hashlib.sha256(data).hexdigest() == digest else None
