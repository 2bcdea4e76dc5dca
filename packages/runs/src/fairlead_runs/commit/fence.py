"""The fence around a run: a start that was replaced while it was frozen changes nothing any more.

A lock that is only taken keeps nobody out: its owner may be suspended, or cut off with its node, for so long that
another start takes the run over, and then go on. So the owner looks at the lock immediately before each change; and as
it may be frozen between that look and the change, too, no change of the checkpoints can come later than a takeover:

- each is one rename, of a stage or temporary file, or into a folder of trash. The next owner takes all of these away
  before it looks at what is there (`discard_incomplete`), so that a rename which comes too late finds nothing;
- each line of the history names its start, whose number rises with each owner: readers do not believe one that stands
  behind a later start. Manifests have the number as well, and order checkpoints by it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from fairlead.errors import FairleadError, RunFailedError, RunLockedError
from fairlead_runs.commit.owner import LockOwner


class Fence:
    """Tells whether a start still owns its run; whoever changes the run calls `check` immediately before.

    Args:
        path: The lock file.
        nonce: That of the owner.

    Attributes:
        lost: Why the start owns the run no longer, once that is known; it does not change back.
    """

    def __init__(self, path: Path, nonce: str) -> None:
        self.path = path
        self.nonce = nonce
        self.lost: FairleadError | None = None

    def check(self) -> None:
        """Returns if the lock file names this owner.

        Raises:
            RunLockedError: Another start has taken the run over, or somebody deleted the file.
            OSError: The file cannot be read.
        """
        if self.lost is None:
            self._read()
        if self.lost is not None:
            raise self.lost

    def why_lost(self) -> FairleadError | None:
        """Why the start owns the run no longer; None as long as it does, and where the file cannot be read.

        For who has failed to write: the next owner has deleted what this start was writing.
        """
        with contextlib.suppress(OSError):
            if self.lost is None:
                self._read()
        return self.lost

    def _read(self) -> None:
        try:
            owner = LockOwner.load(self.path.read_bytes())  # opening has a network file system ask its server
        except (FileNotFoundError, NotADirectoryError):
            self.lost = self._replaced("its lock file is gone: deleted, or the start that took it over has ended")
        else:
            if owner is None or owner.nonce != self.nonce:
                self.lost = self._replaced(f"it is held by {owner or 'another process'}")

    def _replaced(self, why: str) -> RunLockedError:
        error = RunLockedError(
            "this start was replaced: another one has taken the run over while it gave no sign of life",
            where=str(self.path.parent),
            why=why,
            fix="nothing: this start ends here, and has written nothing since; the other one continues from the newest "
            "checkpoint",
        )
        error.exit_code = RunFailedError.exit_code  # 2 says that nothing was started
        return error
