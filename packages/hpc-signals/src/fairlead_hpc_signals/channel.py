"""Waiting and meeting on a store of torch's, in words that say what happened.

Works with any `torch.distributed.Store` and imports no torch. A store gives one thread at a time a connection: each
thread needs a clone of its own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from fairlead.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["LONG", "Channel", "clone"]

LONG: Final = 20 * 86400.0
"""Seconds of a wait that has no end: torch counts milliseconds in 32 bits."""


class Channel:
    """One thread's view of the store of a group of ranks.

    Args:
        store: A clone for this thread alone.
        rank: This rank.
        world_size: The number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def wait(self, key: str, seconds: float) -> bool:
        """Whether a key came within so many seconds.

        Raises:
            RuntimeError: The store went away.
        """
        deadline = time.monotonic() + seconds
        try:
            self.store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            # torch says "timed out" in other words, and with another class, for each kind of store.
            if time.monotonic() < deadline - 0.05:
                raise
            return self.store.check([key])
        return True

    def arrive(self, name: str, text: str) -> bool:
        """Tells something under a name; whether this rank was the last to do so."""
        self.store.set(f"{name}/{self.rank}", text)
        if self.store.add(f"{name}/count", 1) != self.world_size:
            return False
        self.store.set(f"{name}/all", "")
        return True

    def arrived(self, name: str) -> list[str]:
        """What each rank told under a name, once all have."""
        values = self.store.multi_get([f"{name}/{rank}" for rank in range(self.world_size)])
        return [value.decode() for value in values]

    def missing(self, name: str) -> tuple[int, ...]:
        """The ranks that have told nothing under a name yet. One question a rank: for a failure only."""
        return tuple(rank for rank in range(self.world_size) if not self.store.check([f"{name}/{rank}"]))

    def set_all(self, keys: list[str]) -> None:
        """Sets many keys in one message."""
        self.store.multi_set(keys, [""] * len(keys))  # type: ignore[attr-defined]  # not in torch's stubs


def clone(store: dist.Store) -> dist.Store:
    """The same store with a connection of its own, for another thread.

    Raises:
        ConfigError: This kind of store has no such thing.
    """
    try:
        cloned: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    except RuntimeError as error:
        raise ConfigError(
            f"a {type(store).__name__} cannot be shared between threads",
            why=str(error).splitlines()[0],
            fix="use a TCPStore, or the store of the process group",
        ) from error
    return cloned
