"""Copies of a run's checkpoints on an object store, for every engine; without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fairlead_checkpoint_io.remote import RemoteCheckpointIOConfig
from fairlead_checkpoint_io.remote.mirror import Mirror
from fairlead_runs import Fingerprint
from fairlead_runs.commit import Checkpoint, Fence, RetentionPolicy
from fairlead_runs.remote import Store

_TRIES_AT_START: Final = 3  # a person may be waiting


class StoreCopies:
    """The `CheckpointCopies` of the backend `remote`, whose docstring says what each method is for."""

    def __init__(self, config: RemoteCheckpointIOConfig) -> None:
        super().__init__()
        self._config = config
        self._mirror: Mirror | None = None

    def __getstate__(self) -> dict[str, Any]:
        """To another process (`ddp_spawn`) go the settings, not threads."""
        return {**self.__dict__, "_mirror": None}

    @property
    def stop_wait_s(self) -> float:
        """For how long a stop waits."""
        return self._config.stop_wait_s

    def open(self, name: str, fingerprint: Fingerprint, *, new: bool = False) -> int:
        """Looks at the run's URL; see the protocol."""
        url = f"{self._config.url.rstrip('/')}/{name}"
        mirror = Mirror(self._config, self.store(url), self.store(url, at_most=_TRIES_AT_START))
        mirror.remote.check(fingerprint, new=new)
        self._mirror = mirror
        return mirror.remote.last_start()

    def fetch(self, run: Path) -> list[str]:
        """Brings what the run directory lacks; see the protocol."""
        assert self._mirror is not None, "call open() first"
        return self._mirror.remote.fetch(run)

    def begin(self, run: Path, start: int, event: Callable[..., None], fence: Fence) -> None:
        """This start uploads from now on; see the protocol."""
        assert self._mirror is not None, "call open() first"
        self._mirror.begin(run, start, event, fence)

    def committed(self, checkpoint: Checkpoint, policy: RetentionPolicy) -> None:
        """Has a published checkpoint uploaded; see the protocol."""
        if self._mirror is not None:
            self._mirror.committed(checkpoint, policy)

    def wait_uploaded(self, timeout_s: float | None = None) -> str | None:
        """Waits for the uploads; see the protocol."""
        return self._mirror.wait_uploaded(timeout_s) if self._mirror is not None else None

    def close(self) -> None:
        """Ends the uploads; what is still being uploaded gets a last `stop_wait_s`."""
        if self._mirror is not None:
            self._mirror.close()

    def store(self, url: str, *, at_most: int | None = None) -> Store:
        """The store at a URL, with the config's settings."""
        tries = self._config.retries if at_most is None else min(at_most, self._config.retries)
        return Store.open(url, self._config.storage_options, tries=tries, part_mib=self._config.part_mib)
