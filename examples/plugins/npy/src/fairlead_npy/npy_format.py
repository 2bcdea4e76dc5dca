"""The format, as the commands of `fairlead checkpoint` take it; imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fairlead_checkpoint_io import CheckpointFormat, Verified

INDEX = "npy.json"
"""The values that are no tensors, the place of each tensor, and the SHA-256 of each file."""


def verify(path: Path) -> Verified:
    """Compares each file with the index."""
    damage = {}
    for name, expected in json.loads((path / INDEX).read_bytes())["sha256"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            damage[name] = f"cannot be read: {error.strerror}"
            continue
        if hashlib.sha256(content).hexdigest() != expected:
            damage[name] = "it does not match its checksum"
    return Verified(f"the checksums in {INDEX}", damage)


npy = CheckpointFormat(
    "npy",
    fits=lambda path: (path / INDEX).is_file(),
    read="fairlead_npy.npy_runtime:read",
    write="fairlead_npy.npy_runtime:write",
    verify="fairlead_npy.npy_format:verify",
    folder=True,
)
