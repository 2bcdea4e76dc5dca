"""A checkpoint of another model, said in the user's terms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairlead.errors import CheckpointError

_HEAD = re.compile(r"Error\(s\) in loading state_dict for (?P<model>\w+):")


@contextmanager
def readable_load_errors(checkpoint: Path | None) -> Iterator[None]:
    """Has torch's report of keys and shapes that do not fit the model be a `CheckpointError` with the file."""
    try:
        yield
    except RuntimeError as error:
        head = _HEAD.match(str(error))
        if checkpoint is None or head is None:
            raise
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        shown = [line if len(line) <= 160 else f"{line[:157]}..." for line in lines[:5]]
        if len(lines) > 5:
            shown.append(f"and {len(lines) - 5} more")
        raise CheckpointError(
            f"the checkpoint is of another model than {head['model']}",
            where=str(checkpoint),
            why="\n".join(shown),
            fix="use the model that it was written with, or start anew with --resume never",
        ) from error
