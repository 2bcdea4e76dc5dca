"""Messages between the ranks of a run, over a `torch.distributed.Store`, or of a single process; imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from fairlead.errors import ConfigError

LONG: Final = 20 * 86400.0
"""Seconds of a wait that has no end: torch counts milliseconds in 32 bits."""


class Mailbox:
    """What a rank puts under keys, each used once, waits for and reads. This one is for a single process."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._messages: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    # -- what a mailbox over a store does in another way

    def put(self, key: str, text: str = "") -> None:
        """Makes a message known to all ranks."""
        self._messages[key] = text

    def has(self, *keys: str) -> bool:
        """Whether messages are there, in one question."""
        return all(key in self._messages for key in keys)

    def wait(self, key: str, seconds: float) -> bool:
        """Whether a message came within so many seconds; `RuntimeError` where the store went away."""
        return self.has(key)  # there is no other rank

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
        """Puts this rank's message under a name; whether it was the last to do so: then `name/all` is there."""
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


class StoreMailbox(Mailbox):
    """The mailbox of one rank, over a `torch.distributed.Store` that all ranks share; `prefix` goes before every key.

    A store serves one thread at a time; see `reconnect`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, prefix: str = "") -> None:
        super().__init__(rank, world_size)
        self._store = store
        self._prefix = prefix

    def under(self, prefix: str) -> StoreMailbox:
        """The same connection, with a prefix of its own for the messages."""
        return StoreMailbox(self._store, self.rank, self.world_size, f"{self._prefix}{prefix}/")

    def reconnect(self) -> StoreMailbox:
        """The same messages over another connection, for another thread; `ConfigError` where the store has but one."""
        try:
            store = self._store.clone()
        except RuntimeError as error:
            raise ConfigError(
                f"a {type(self._store).__name__} cannot be shared between threads",
                why=str(error).splitlines()[0],
                fix="use a TCPStore, or the store of the process group",
            ) from error
        return StoreMailbox(store, self.rank, self.world_size, self._prefix)

    def over(self, other: StoreMailbox) -> StoreMailbox:
        """The same messages over the connection of another mailbox of this store."""
        return StoreMailbox(other._store, self.rank, self.world_size, self._prefix)

    def ring(self, ranks: Sequence[int] | None = None) -> None:
        """Wakes those who wait for their bell; None: all ranks. There is one bell a rank, whatever the prefix."""
        bells = [f"bell/{rank}" for rank in (range(self.world_size) if ranks is None else ranks)]
        self._store.multi_set(bells, [""] * len(bells))

    def await_bell(self, seconds: float) -> None:
        """Waits for this rank's bell, at most so many seconds; look for what has come after it."""
        bell = StoreMailbox(self._store, self.rank, self.world_size)
        if bell.wait(f"bell/{self.rank}", seconds):
            self._store.delete_key(f"bell/{self.rank}")

    def put(self, key: str, text: str = "") -> None:
        """Sets a key."""
        self._store.set(self._prefix + key, text)

    def put_all(self, keys: Sequence[str], text: str = "") -> None:
        """Puts one text under many keys at once."""
        keys = self._full(keys)
        self._store.multi_set(keys, [text] * len(keys))

    def put_first(self, key: str, text: str) -> str:
        """Puts a message unless another rank was quicker: then that one stays, and is returned."""
        return str(self._store.compare_set(self._prefix + key, "", text).decode())

    def forget(self, *keys: str) -> None:
        """Deletes keys that are no longer read, so that the store does not grow."""
        for key in self._full(keys):
            self._store.delete_key(key)

    def has(self, *keys: str) -> bool:
        """Whether keys are set, in one question."""
        return bool(self._store.check(self._full(keys)))

    def wait(self, key: str, seconds: float) -> bool:
        """Whether a key was set within so many seconds."""
        if seconds <= 0:  # a wait that cannot succeed has torch warn, and look up names of addresses for it
            return self.has(key)
        deadline = time.monotonic() + seconds
        try:
            self._store.wait([self._prefix + key], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            # torch says "timed out" in other words, and with another class, for each kind of store.
            if time.monotonic() < deadline - 0.05:
                raise
            return self.has(key)
        return True

    def read(self, keys: Sequence[str]) -> list[str]:
        """The values of keys, in one question."""
        return [value.decode() for value in self._store.multi_get(self._full(keys))]

    def count(self, key: str, by: int = 1) -> int:
        """Adds to a number in the store."""
        return int(self._store.add(self._prefix + key, by))

    def _full(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]
