"""A PATH of `fairlead checkpoint` that is a URL: the run on a store, and a copy for what must have files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_checkpoint_io.commands.places import Source, existing, one_checkpoint
from fairlead_checkpoint_io.commands.rows import size_text
from fairlead_runs.remote import (
    RemoteCheckpoint,
    RemoteRun,
    Retries,
    Store,
    check_url,
    checkpoint_at,
    download,
    is_url,
    list_run,
    newest_complete,
    split_checkpoint_url,
)

__all__ = ["StoredRun", "is_stored", "sources", "stored_run"]

_PATIENCE: Final = Retries(4, longest_s=4.0)  # a person is waiting
_OF_A_RUN: Final = frozenset({"fingerprint.json", "owner.json", "latest", "job.yaml"})
_RECORDS: Final = ("job.yaml", "fingerprint.json")  # by which a checkpoint finds the job that it is of
_SHOWN: Final = 8


@dataclass(frozen=True)
class StoredRun:
    """A run on a store, or one checkpoint of it.

    Attributes:
        store: The run's place.
        name: The checkpoint that was named; None: all.
        found: What is there; of one checkpoint, that one only.
    """

    store: Store
    name: str | None
    found: RemoteRun

    @property
    def latest(self) -> str | None:
        """What the object `latest` names."""
        content = self.store.read("latest")
        return content.decode(errors="replace").strip() or None if content is not None else None


def is_stored(text: str) -> bool:
    """Whether a PATH is on a store; `file://` is a folder like any other.

    Example:
        >>> [is_stored(text) for text in ("s3://bucket/gpt", "file:///runs/gpt", "runs/gpt")]
        [True, False, False]
    """
    return is_url(text) and not text.lower().startswith("file://")


def stored_run(url: str) -> StoredRun:
    """What a URL of a run or of one checkpoint names; nothing but listings and manifests is read.

    Raises:
        ConfigError: There is no run at this place.
        CheckpointError: There is no such checkpoint in it; the store refuses, or does not answer.
        MissingDependencyError: The store's library is not installed.
    """
    store, name = _opened(url)
    found = list_run(store)
    if not found.checkpoints and not found.unfinished and not _OF_A_RUN.intersection(found.others):
        there = f"below it are: {', '.join(found.others[:_SHOWN])}" if found.others else "nothing is stored there"
        raise ConfigError(
            "there is no such run on the store",
            where=store.url,
            why=there,
            fix="name the place of one run, as s3://bucket/prefix/RUN, or one checkpoint in it",
        )
    if name is not None:
        one = [item for item in found.checkpoints if item.name == name]
        unfinished = [item for item in found.unfinished if item == name]
        if not one and not unfinished:
            checkpoint_at(store, name)  # says what there is instead
        found = RemoteRun(one, unfinished, found.others)
    return StoredRun(store, name, found)


@contextmanager
def sources(texts: Sequence[str], session: Session) -> Iterator[list[Source]]:
    """The checkpoints to read, by paths or URLs; of a run, the newest complete one.

    What is on a store is downloaded into a temporary folder, which is deleted at the end.

    Raises:
        FairleadError: There is no such checkpoint; it is damaged; the store does not answer.
    """
    with ExitStack() as stack:
        yield [
            stack.enter_context(_downloaded(text, session))
            if is_stored(text)
            else one_checkpoint(existing(text, session))
            for text in texts
        ]


@contextmanager
def _downloaded(url: str, session: Session) -> Iterator[Source]:
    store, name = _opened(url)
    wanted = checkpoint_at(store, name) if name is not None else _newest(store)
    with tempfile.TemporaryDirectory(prefix="fairlead-") as folder:
        size = size_text(wanted.manifest.size) if wanted.manifest is not None else "damaged"
        session.warn(f"downloading {wanted.url} ({size}) to {folder}, which is deleted at the end")
        run = Path(folder, store.url.rpartition("/")[2] or "run")
        local = download(store, wanted, run / "checkpoints")
        for record in _RECORDS:
            content = store.read(record)
            if content is not None:
                (run / record).write_bytes(content)
        try:
            yield replace(one_checkpoint(local.path), url=wanted.url)
        except FairleadError as error:
            if error.where is not None:
                error.where = error.where.replace(str(local.path), wanted.url)
            raise


def _opened(url: str) -> tuple[Store, str | None]:
    try:
        place, name = split_checkpoint_url(url)
    except ConfigError:
        return Store.open(check_url(url), retries=_PATIENCE), None
    return Store.open(place, retries=_PATIENCE), name


def _newest(store: Store) -> RemoteCheckpoint:
    newest = newest_complete(store)
    if newest.checkpoint is None:
        raise CheckpointError(
            "there is no complete checkpoint on the store",
            where=store.url,
            why="\n".join(str(damage) for damage in newest.skipped[:_SHOWN]) or None,
            fix=f"`fairlead checkpoint ls {store.url}` shows what is there",
        )
    return newest.checkpoint
