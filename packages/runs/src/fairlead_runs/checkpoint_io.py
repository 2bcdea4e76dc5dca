"""What a backend for checkpoints can be besides a Lightning `CheckpointIO`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fairlead_runs import Fingerprint
    from fairlead_runs.commit import Checkpoint, Fence, FileHash, RetentionPolicy

PlaceTensor = Callable[[tuple[str | int, ...], Any, Any], Any | None]
"""Called with a tensor's path in the checkpoint (`("state_dict", "layer.weight")`), its full size and its dtype;
gives the tensor to read into, a DTensor for this rank's part, or None for a new one."""


@runtime_checkable
class DurableSaves(Protocol):
    """A Lightning `CheckpointIO` that says when a checkpoint is durable.

    A manifest, `latest` and retention may only follow bytes that survive a power cut: with these methods they go into
    `then`; without, they follow `save_checkpoint`, which then must not return before the file is complete.
    """

    def submit(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], then: Callable[[FileHash | None], None]
    ) -> None:
        """Saves as `save_checkpoint` does and calls `then` once the file is durable.

        `then` takes the file's checksum, or None where it was not computed in passing.  It runs in the calling thread
        before this returns (synchronous backends) or later in the thread that writes; it must not call this object.
        It is not called when the save fails; when it raises, that counts as a failure of this save.

        Raises:
            FairleadError: This save failed (`where` is this path), or an earlier one did (`where`
                is that path): then this one was accepted all the same.
        """

    def wait(self) -> None:
        """Returns when everything submitted is durable and every `then` has run.

        Raises:
            FairleadError: A save failed that was not reported yet; each is reported once.
        """


@runtime_checkable
class ShardedSaves(Protocol):
    """A Lightning `CheckpointIO` that saves on all ranks together, each its own part.

    Lightning calls a CheckpointIO on rank 0 only, so whoever saves hands this one the checkpoint of every rank.  All of
    these are called on all ranks, in the same order, in the thread that trains.
    """

    def meet(self) -> None:
        """Makes what the ranks need to talk to each other, once; `submit_shards` does so too."""

    def submit_shards(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        then: Callable[[Mapping[str, FileHash]], None],
        *,
        names: Sequence[Sequence[str | None]],
    ) -> None:
        """Saves into the new directory `path`, and calls `then` on rank 0 once the files of all ranks are durable.

        Args:
            checkpoint: As Lightning dumps it; tensors may be DTensors.  Ranks that hold no part of it give less.
            path: The directory, the same on all ranks.
            then: Takes the checksum of each file by its name in the directory; otherwise as in `DurableSaves.submit`.
            names: For each optimizer the names of its parameters, in the order of its groups; None: not of the module.

        Raises:
            FairleadError: As `DurableSaves.submit`, on all ranks.
        """

    def wait(self) -> None:
        """As `DurableSaves.wait`."""


@runtime_checkable
class ShardedLoads(Protocol):
    """A Lightning `CheckpointIO` that reads directories of shards: each rank what it needs, into its own tensors."""

    def load_shards(
        self, path: str | os.PathLike[str], place: PlaceTensor, weights_only: bool | None = None
    ) -> dict[str, Any] | None:
        """The checkpoint as Lightning dumped it, with integers for the optimizers' parameters; None: not readable here.

        Args:
            path: The directory.
            place: Says for each tensor where it goes.
            weights_only: As in Lightning.

        Raises:
            FairleadError: It is damaged, or holds pickled objects.
        """


@runtime_checkable
class CheckpointCopies(Protocol):
    """Keeps copies of a run's checkpoints elsewhere, as a Lightning `CheckpointIO` may; rank 0 alone calls these.

    `open`, `fetch` and `begin` in this order at a start; `committed` after each commit; `wait_uploaded` at the end.
    """

    @property
    def stop_wait_s(self) -> float:
        """For how many seconds after its signal a stop may wait for the copies."""

    def open(self, name: str, fingerprint: Fingerprint, *, new: bool = False) -> int:
        """Looks at the copy of the run directory `name`; nothing is written.  A `new` run must find nothing there.

        Returns:
            The number of the start that owned the copy last; 0: none.

        Raises:
            FingerprintError: The location belongs to another run, or holds one already.
            FairleadError: It cannot be reached.
        """

    def fetch(self, run: Path) -> list[str]:
        """Publishes the newest sound copy in the run directory, if that has nothing as new; what to tell the user.

        Raises:
            FairleadError: The copies cannot be reached, or the disk refuses.
        """

    def begin(self, run: Path, start: int, event: Callable[..., None], fence: Fence) -> None:
        """A start of the run writes from now on, and earlier ones that still live no longer.

        `event` adds a line to the run's history, from any thread.  The `fence` is the run's: it is checked before
        anything is deleted here, and raises if a later start owns the copy.

        Raises:
            FairleadError: The location cannot be written.
        """

    def committed(self, checkpoint: Checkpoint, policy: RetentionPolicy) -> None:
        """Copies a published checkpoint in the background, and does the retention, here and there.

        Raises:
            FairleadError: An old checkpoint cannot be deleted here.
        """

    def wait_uploaded(self, timeout_s: float | None = None) -> str | None:
        """Waits until all copies are complete, at most so many seconds; what is lacking and why, or None."""

    def close(self) -> None:
        """Ends the uploads; what is still being uploaded gets a last `stop_wait_s`."""
