"""How the ranks talk about a save: over groups of their own, so that nothing of the training comes in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fairlead.errors import CheckpointError, FairleadError

log = logging.getLogger("fairlead.checkpoint_io")

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """A gloo group of all ranks; nothing where there is one rank only.

    An error of one rank is raised on all of them, and so is the loss of a rank.

    Args:
        timeout: How long one rank waits for another.
        single: This rank does it all, whatever other ranks there are.
        overlapping: The thread that trains may talk while the one that writes does: each gets a group of its own.  It
            costs a socket for every other rank, so it is made only where it is needed.
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
        """What each rank makes, by rank; in the thread that trains.

        Raises:
            CheckpointError: A rank could not make it, or is gone.
        """
        value = _caught(mine)
        found = [value] * self.size
        if self._front is not None:
            self._talk(lambda: dist.all_gather_object(found, value, group=self._front), what)
        _raise(found, what)
        return found

    def scatter(self, mine: Callable[[], T], make: Callable[[Sequence[T]], Sequence[R]], what: str) -> R:
        """What rank 0 makes for this rank out of what all ranks made; in the thread that trains.

        Raises:
            CheckpointError: A rank could not make its part, or is gone.
        """
        return self._scattered(mine, make, what, self._front)

    def report(self, mine: Callable[[], T], finish: Callable[[Sequence[T]], None], what: str) -> None:
        """Rank 0 finishes what all ranks have done, and all hear how it went; in the thread that writes.

        Raises:
            CheckpointError: A rank failed, or is gone.
        """

        def once(values: Sequence[T]) -> list[None]:
            finish(values)
            return [None] * self.size

        self._scattered(mine, once, what, self._back)

    def _scattered(
        self,
        mine: Callable[[], T],
        make: Callable[[Sequence[T]], Sequence[R]],
        what: str,
        group: dist.ProcessGroup | None,
    ) -> R:
        value = _caught(mine)
        made: Any = None
        gathered: list[Any] | None = [value] * self.size if self.rank == 0 else None
        if group is not None:
            self._talk(lambda: dist.gather_object(value, gathered, group=group), what)
        if gathered is not None:  # rank 0
            problem = _first(gathered, what)
            made = _Failure(problem) if problem is not None else _caught(lambda: list(make(gathered)))
            made = [made] * self.size if isinstance(made, _Failure) else made
        box: list[Any] = list(made) if group is None else [None]
        if group is not None:
            self._talk(lambda: dist.scatter_object_list(box, made, group=group), what)
        _raise(box, what)
        found: R = box[0]
        return found

    def _talk(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo: a peer is gone, or did not answer in time
            first = next(iter(str(error).splitlines()), "")
            raise CheckpointError(
                what,
                why=f"rank {self.rank} lost the others, or waited for them longer than {self._timeout}: {first}",
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


def _raise(values: Sequence[Any], what: str) -> None:
    problem = _first(values, what)
    if problem is not None:
        raise problem


def _first(values: Sequence[Any], what: str) -> CheckpointError | None:
    """One error for what went wrong on some ranks, with their numbers."""
    failures = {rank: value.error for rank, value in enumerate(values) if isinstance(value, _Failure)}
    combined = next(
        (error for error in failures.values() if isinstance(error, CheckpointError) and error.what == what), None
    )
    if combined is not None:  # rank 0 has put it together already
        return combined
    if not failures:
        return None
    lines = [f"rank {rank}: {_text(error)}" for rank, error in sorted(failures.items())]
    return CheckpointError(what, why="\n".join(lines), fix=failures[min(failures)].fix)


def _text(error: FairleadError) -> str:
    text = f"{error.what}: {error.why}" if error.why else error.what
    return f"{text} ({error.where})" if error.where else text
