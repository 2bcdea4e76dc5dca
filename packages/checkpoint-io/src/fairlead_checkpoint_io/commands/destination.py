"""Where a command writes: complete and durable under its name, or not there at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_checkpoint_io.checkpoint_format import kind_of_folder, known_formats
from fairlead_checkpoint_io.commands.sources import Source, is_stored, sources
from fairlead_checkpoint_io.files.writing import replace_with
from fairlead_runs.commit import Syscalls
from fairlead_runs.commit.files import disk_error, ensure_dir


@contextmanager
def source_and_target(
    text: str, output: str, session: Session, *, overwrite: bool, where: str
) -> Iterator[tuple[Source, Path]]:
    """The checkpoint to read, and what to write; see `sources` and `prepare_target`."""
    target = Path(session.cwd, output).expanduser()
    if is_stored(text):
        prepare_target(target, session=session, overwrite=overwrite, where=where)  # not only after the download
    with sources((text,), session) as (source,):
        prepare_target(target, source.path, source.content, session=session, overwrite=overwrite, where=where)
        yield source, target


def prepare_target(target: Path, *sources: Path, session: Session, overwrite: bool, where: str) -> None:
    """Refuses a destination before anything is read, as hours may lie between the two."""
    resolved = target.resolve()
    for source in (path.resolve() for path in sources):
        if resolved == source or resolved.is_relative_to(source) or source.is_relative_to(resolved):
            raise ConfigError(
                "the output would overwrite what is read, or lies inside it",
                where=f"{where}: {target}",
                why=f"{source} is read",
                fix="name another one",
            )
    if os.path.lexists(target) and not overwrite:
        raise ConfigError(
            "the destination exists", where=f"{where}: {target}", fix="name another one, or add --overwrite"
        )
    if os.path.isdir(target) and not os.path.islink(target):
        kind = kind_of_folder(target, known_formats(session))
        if os.listdir(target) and kind in ("own", None):
            raise ConfigError(
                "a folder that is no converted checkpoint is never overwritten",
                where=f"{where}: {target}",
                why="it holds " + ("a checkpoint of a run" if kind == "own" else "other files"),
                fix="name another one, or delete the folder yourself",
            )
    holder = next(parent for parent in target.parents if os.path.lexists(parent))
    if not holder.is_dir() or not os.access(holder, os.W_OK | os.X_OK):
        why = "no permission to write there" if holder.is_dir() else f"{holder} is a file"
        raise CheckpointError(
            "the destination cannot be written", where=f"{where}: {target}", why=why, fix="name another one"
        )


def write_at_once(target: Path, write: Callable[[Path], object], *, folder: bool = False) -> None:
    """Has `write` make a file, or fill an empty folder, beside `target`, which is replaced when that is durable."""
    system = Syscalls()
    staged = target.with_name(f".tmp-{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        ensure_dir(target.parent, system)
        if folder:
            system.mkdir(staged)
        write(staged)
        for inside, _, names in os.walk(staged, topdown=False):
            for name in names:
                _sync(Path(inside, name), system)
            system.fsync_dir(Path(inside))
        if not folder:
            _sync(staged, system)
        replace_with(staged, target, system)
    except OSError as error:
        failed = disk_error(error, f"cannot write {target.name}", target)
        if error.errno == errno.ENOENT:  # as in /proc
            failed.fix = "name another folder"
        raise failed from error
    except (FairleadError, MemoryError):
        raise
    except Exception as error:  # torch and safetensors raise their own errors for a full disk
        raise CheckpointError(
            f"cannot write {target.name}", where=str(target), why=f"{type(error).__name__}: {error}"
        ) from error
    finally:
        if os.path.lexists(staged):
            shutil.rmtree(staged, ignore_errors=True) if staged.is_dir() else staged.unlink(missing_ok=True)


def _sync(path: Path, system: Syscalls) -> None:
    fd = system.open(path, os.O_RDONLY)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)
