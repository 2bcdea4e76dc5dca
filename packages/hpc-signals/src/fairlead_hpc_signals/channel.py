"""Messages between ranks, over a store of torch's; and of a single process with itself.

Works with any `torch.distributed.Store` and imports no torch. A message has a key, and each key is used once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from fairlead.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["LONG", "Channel", "StoreChannel"]

LONG: Final = 20 * 86400.0
"""Seconds of a wait that has no end: torch counts milliseconds in 32 bits."""


class Channel:
    """What one thread of a rank puts, waits for and gets. This one is for a single process: messages stay in it.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    Example:
        >>> channel = Channel()
        >>> channel.arrive("saved", "at step 7"), channel.get("saved/0", 1.0)
        (True, 'at step 7')
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._messages: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    # -- what a channel over a store does in another way

    def put(self, key: str, text: str = "") -> None:
        """Makes a message known to all ranks."""
        self._messages[key] = text

    def has(self, key: str) -> bool:
        """Whether a message is there."""
        return key in self._messages

    def wait(self, key: str, seconds: float) -> bool:
        """Whether a message came within so many seconds.

        Raises:
            RuntimeError: The store went away.
        """
        return self.has(key)  # there is nobody else to wait for

    def read(self, keys: Sequence[str]) -> list[str]:
        """The texts of messages that are there."""
        return [self._messages[key] for key in keys]

    def count(self, key: str, by: int = 1) -> int:
        """Adds to a number that starts at 0, and returns what it is now."""
        self._counts[key] = self._counts.get(key, 0) + by
        return self._counts[key]

    # -- what follows from it

    def get(self, key: str, seconds: float) -> str | None:
        """The text of a message; None when it did not come within so many seconds."""
        return self.read([key])[0] if self.wait(key, seconds) else None

    def arrive(self, name: str, text: str = "") -> bool:
        """Puts this rank's message under a name that all ranks use; whether it was the last to do so.

        Once all have, `name/all` is there.
        """
        self.put(f"{name}/{self.rank}", text)
        if self.count(f"{name}/count") != self.world_size:
            return False
        self.put(f"{name}/all")
        return True

    def arrived(self, name: str) -> list[str]:
        """What each rank put under a name, once all have."""
        return self.read([f"{name}/{rank}" for rank in range(self.world_size)])

    def missing(self, name: str) -> tuple[int, ...]:
        """The ranks that put nothing under a name yet. One question a rank: for a failure only."""
        return tuple(rank for rank in range(self.world_size) if not self.has(f"{name}/{rank}"))


class StoreChannel(Channel):
    """One thread's channel over a store that all ranks share.

    Args:
        store: It gives one thread at a time a connection, so a channel makes one of its own.
        rank: This rank.
        world_size: The number of ranks.

    Raises:
        ConfigError: This kind of store has one connection only.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        try:
            self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        except RuntimeError as error:
            raise ConfigError(
                f"a {type(store).__name__} cannot be shared between threads",
                why=str(error).splitlines()[0],
                fix="use a TCPStore, or the store of the process group",
            ) from error

    def put(self, key: str, text: str = "") -> None:
        """Sets a key."""
        self._store.set(key, text)

    def put_all(self, keys: Sequence[str]) -> None:
        """Puts many empty messages at once."""
        self._store.multi_set(list(keys), [""] * len(keys))  # type: ignore[attr-defined]  # not in torch's stubs

    def put_first(self, key: str, text: str) -> None:
        """Puts a message unless another rank was quicker: then that one stays."""
        self._store.compare_set(key, "", text)

    def has(self, key: str) -> bool:
        """Whether a key is set."""
        return self._store.check([key])

    def wait(self, key: str, seconds: float) -> bool:
        """Whether a key was set within so many seconds."""
        deadline = time.monotonic() + seconds
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            # torch says "timed out" in other words, and with another class, for each kind of store.
            if time.monotonic() < deadline - 0.05:
                raise
            return self.has(key)
        return True

    def read(self, keys: Sequence[str]) -> list[str]:
        """The values of keys, in one question."""
        return [value.decode() for value in self._store.multi_get(list(keys))]

    def count(self, key: str, by: int = 1) -> int:
        """Adds to a number in the store."""
        return self._store.add(key, by)
