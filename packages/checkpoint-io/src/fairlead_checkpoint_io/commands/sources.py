"""What a PATH names: a run, a folder of checkpoints or one checkpoint, on disk or on a store. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_checkpoint_io.checkpoint_format import CheckpointFormat, format_of, kind_of_folder, known_formats
from fairlead_checkpoint_io.files.formats import STATE, WEIGHTS_FILE, names_in, names_text, no_such
from fairlead_runs import is_run
from fairlead_runs.commit import Checkpoint, best_or_last, newest_complete
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.manifest import MANIFEST
from fairlead_runs.remote import (
    RemoteCheckpoint,
    RemoteRun,
    Store,
    check_url,
    checkpoint_at,
    download,
    is_url,
    list_run,
    split_checkpoint_url,
)
from fairlead_runs.remote import newest_complete as newest_on_store

_TRIES: Final = 3  # a person is waiting
_OF_A_RUN: Final = frozenset({"fingerprint.json", "owner.json", "latest", "job.yaml"})
_RECORDS: Final = ("job.yaml", "fingerprint.json")  # by which a checkpoint finds the job that it is of
_SHOWN: Final = 8


@dataclass(frozen=True)
class Source:
    """One checkpoint to read, its file or folder with the state, and the `url` of which `path` is a downloaded copy."""

    path: Path
    content: Path
    format: CheckpointFormat
    own: Checkpoint | None = None
    url: str | None = None

    @property
    def location(self) -> str:
        """Its URL or path."""
        return self.url or str(self.path)

    @property
    def name(self) -> str:
        """Names files made of it: `gpt-step-00000200`."""
        folder = self.path.parent
        run = folder.parent.name if folder.name == "checkpoints" else ""
        stem = self.path.stem if self.path.suffix in (".ckpt", ".pt", ".pth", ".safetensors") else self.path.name
        return f"{run}-{stem}" if run else stem


@contextmanager
def sources(texts: Sequence[str], session: Session) -> Iterator[list[Source]]:
    """The checkpoints to read, by paths or URLs (downloaded until the end); of a run, the newest complete one."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(_downloaded(text, session))
            if is_stored(text)
            else _one_checkpoint(existing(text, session), known_formats(session))
            for text in texts
        ]


# -- on disk


def existing(text: str, session: Session) -> Path:
    """The path as it was meant: from the working directory, or the name of a run in `runs/`."""
    given = Path(session.cwd, text.removeprefix("file://")).expanduser()
    for named in (given, session.cwd / "runs" / text):
        path = best_or_last(named)
        if os.path.lexists(path):
            return Path(os.path.abspath(path))
    raise no_such(given)


def checkpoints_folder(path: Path, formats: tuple[CheckpointFormat, ...]) -> Path | None:
    """The folder that holds several checkpoints: of a run directory its `checkpoints`; None: `path` is a single one."""
    if not path.is_dir() or kind_of_folder(path, formats) is not None:
        return None
    if any(NAME.fullmatch(name) or name.endswith(".ckpt") for name in names_in(path)):
        return path  # also a run on a store
    inner = path / "checkpoints"
    return inner if is_run(path) or inner.is_dir() else path


def _one_checkpoint(path: Path, formats: tuple[CheckpointFormat, ...]) -> Source:
    """The checkpoint at `path`; of a run or a folder of checkpoints, the newest complete one."""
    folder = checkpoints_folder(path, formats)
    if folder is not None:
        newest = newest_complete(folder)
        if newest.checkpoint is None:
            damaged = "\n".join(str(damage) for damage in newest.skipped[:_SHOWN])
            raise CheckpointError(
                "there is no complete checkpoint here",
                where=str(folder),
                why=damaged or names_text(folder),
                fix="`fairlead checkpoint ls` shows what is there; name one checkpoint's folder or file",
            )
        path = newest.checkpoint.path
    if path.is_dir() and (path / MANIFEST).is_file() and NAME.fullmatch(path.name):
        return Source(path, path / STATE, format_of(path / STATE, formats), Checkpoint.at(path))
    if (path / WEIGHTS_FILE).is_file():
        return Source(path, path / WEIGHTS_FILE, format_of(path / WEIGHTS_FILE, formats))
    return Source(path, path, format_of(path, formats))


# -- on a store


@dataclass(frozen=True)
class StoredRun:
    """A run on a store, or with a `name` one checkpoint of it."""

    store: Store
    name: str | None
    found: RemoteRun

    @property
    def latest(self) -> str | None:
        """What the object `latest` names."""
        content = self.store.read("latest")
        return content.decode(errors="replace").strip() or None if content is not None else None

    def lacks(self, latest: str | None) -> bool:
        """Whether the checkpoint that `latest` names is missing; unknown, so False, where one was named."""
        return self.name is None and latest is not None and latest not in {item.name for item in self.found.checkpoints}


def is_stored(text: str) -> bool:
    """Whether a PATH is on a store; `file://` is a folder like any other."""
    return is_url(text) and not text.lower().startswith("file://")


def stored_run(url: str) -> StoredRun:
    """What a URL of a run or of one checkpoint names; nothing but listings and manifests is read."""
    store, name = _opened(url)
    found = list_run(store)
    if not found.checkpoints and not found.unfinished and not _OF_A_RUN.intersection(found.others):
        raise ConfigError(
            "there is no such run on the store",
            where=store.url,
            why=f"below it are: {', '.join(found.others[:_SHOWN])}" if found.others else "nothing is stored there",
            fix="name the URL of one run, as s3://bucket/prefix/RUN, or one checkpoint in it",
        )
    if name is not None:
        one = [item for item in found.checkpoints if item.name == name]
        unfinished = [item for item in found.unfinished if item == name]
        if not one and not unfinished:
            checkpoint_at(store, name)  # says what there is instead
        found = RemoteRun(one, unfinished, found.others)
    return StoredRun(store, name, found)


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
            yield replace(_one_checkpoint(local.path, known_formats(session)), url=wanted.url)
        except FairleadError as error:
            if error.where is not None:
                error.where = error.where.replace(str(local.path), wanted.url)
            raise


def _opened(url: str) -> tuple[Store, str | None]:
    try:
        run, name = split_checkpoint_url(url)
    except ConfigError:
        return Store.open(check_url(url), tries=_TRIES), None
    return Store.open(run, tries=_TRIES), name


def _newest(store: Store) -> RemoteCheckpoint:
    newest = newest_on_store(store)
    if newest.checkpoint is None:
        raise CheckpointError(
            "there is no complete checkpoint on the store",
            where=store.url,
            why="\n".join(str(damage) for damage in newest.skipped[:_SHOWN]) or None,
            fix=f"`fairlead checkpoint ls {store.url}` shows what is there",
        )
    return newest.checkpoint


def size_text(size: int | None) -> str:
    """Bytes for people, in powers of 1024: `3.0 MiB`."""
    if size is None:
        return "-"
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
