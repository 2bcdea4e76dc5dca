"""`last` and `best`, symbolic links beside the checkpoints: for people and scripts; nothing here trusts them."""

from __future__ import annotations

import errno
import secrets
from pathlib import Path
from typing import Final

from fairlead_runs.commit.checkpoints import TEMPORARY, Checkpoint
from fairlead_runs.commit.syscalls import Syscalls

BEST: Final = "best"
LAST: Final = "last"
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""What file systems without symbolic links answer (FAT, some FUSE and SMB mounts); `latest` is a file for them."""


def point(root: Path, name: str, checkpoint: Checkpoint, system: Syscalls) -> None:
    """Makes a link name a checkpoint, at once; what is there and is no link stays.

    Args:
        root: The `checkpoints` directory.
        name: `best` or `last`.
        checkpoint: Where it is to lead.
        system: The system calls.

    Raises:
        OSError: The file system refused, though it has links.
    """
    link = root / name
    if link.is_symlink():
        if str(link.readlink()) == checkpoint.name:
            return
    elif link.exists():
        return
    temporary = root / f"{TEMPORARY}{secrets.token_hex(6)}"
    try:
        system.symlink(checkpoint.name, temporary)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return
        raise
    system.rename(temporary, link)
