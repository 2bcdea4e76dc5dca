"""How the ranks talk about a save: over groups of their own, so that nothing of the training comes in between."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.formats import first_line, reason

log = logging.getLogger("fairlead.checkpoint_io")

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """A gloo group of all ranks; nothing where there is one rank, or this one does it all (`single`).

    An error of one rank is raised on all of them, and so is the loss of a rank.  With `overlapping` the thread that
    trains may talk while the one that writes does: each gets a group of its own, at a socket for every other rank.
    """

    def __init__(self, timeout: timedelta, *, single: bool = False, overlapping: bool = False) -> None:
        grouped = not single and dist.is_initialized()
        self._world = dist.group.WORLD if grouped else None
        self.rank = dist.get_rank() if grouped else 0
        self.size = dist.get_world_size() if grouped else 1
        self._timeout = timeout
        self._front = self._back = None
        if self.size > 1:
            self._front = self._back = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        if self.size > 1 and overlapping:
            self._back = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints-writing")

    @property
    def usable(self) -> bool:
        """Whether the ranks are those for which this was made: a process may leave its group and join another."""
        return self._world is (dist.group.WORLD if dist.is_initialized() else None)

    def all_gather(self, mine: Callable[[], T], what: str) -> list[T]:
        """What each rank makes, by rank; in the thread that trains."""
        value = _caught(mine)
        found = [value] * self.size
        if self._front is not None:
            self._talk(lambda: dist.all_gather_object(found, value, group=self._front), what)
        return _checked(found, what)

    def scatter(
        self, mine: Callable[[], T], make: Callable[[Sequence[T]], Sequence[R]], what: str, *, writing: bool = False
    ) -> R:
        """What rank 0 makes for this rank out of what all ranks made; in the thread that trains, or that writes."""
        group = self._back if writing else self._front
        value = _caught(mine)
        made: Any = None
        gathered: list[Any] | None = [value] * self.size if self.rank == 0 else None
        if group is not None:
            self._talk(lambda: dist.gather_object(value, gathered, group=group), what)
        if gathered is not None:  # rank 0
            made = _caught(lambda: list(make(_checked(gathered, what))))
            made = [made] * self.size if isinstance(made, _Failure) else made
        box: list[Any] = list(made) if group is None else [None]
        if group is not None:
            self._talk(lambda: dist.scatter_object_list(box, made, group=group), what)
        found: R = _checked(box, what)[0]
        return found

    def _talk(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo: a peer is gone, or did not answer in time
            waited = f"waited for them longer than {self._timeout}: {first_line(error)}"
            raise CheckpointError(
                what,
                why=f"rank {self.rank} lost the others, or {waited}",
                fix="see what became of the other ranks; with a slow disk, raise checkpoint_io.timeout",
            ) from error


class _Failure:
    """What a rank ran into, on its way to the others."""

    def __init__(self, error: BaseException) -> None:
        # Errors travel as text: another rank may not be able to unpickle an exception of the user's.
        plain = CheckpointError(f"{type(error).__name__}: {error}")
        self.error = error if isinstance(error, FairleadError) else plain


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # sent to the other ranks and raised there
        log.debug("a save failed on this rank", exc_info=True)
        return _Failure(error)


def _checked(values: list[Any], what: str) -> list[Any]:
    """The values, unless some ranks failed: that is raised as one error, with their numbers."""
    failures = {rank: value.error for rank, value in enumerate(values) if isinstance(value, _Failure)}
    if not failures:
        return values
    for error in failures.values():
        if isinstance(error, CheckpointError) and error.what == what:  # rank 0 has put it together already
            raise error
    lines = [
        f"rank {rank}: {reason(error)}{f' ({error.where})' if error.where else ''}" for rank, error in failures.items()
    ]
    raise CheckpointError(what, why="\n".join(lines), fix=failures[min(failures)].fix)


@contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of each error which checkpoint it is about."""
    try:
        yield
    except CheckpointError as error:
        error.where = os.fspath(path)
        raise
