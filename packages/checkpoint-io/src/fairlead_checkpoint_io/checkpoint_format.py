"""What `fairlead checkpoint` knows of a format; a plugin of the axis `checkpoint_io` names its own. No torch here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, FairleadError
from fairlead.install import first_party
from fairlead.plugin_classes import CheckpointIOPlugin
from fairlead_checkpoint_io.files.formats import (
    CONTENTS,
    LEGACY_MAGIC,
    TRAINER_STATE,
    WEIGHTS_FILE,
    first_line,
    is_deepspeed,
    names_in,
    names_text,
    unreadable,
)
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.manifest import MANIFEST

_AXIS: Final = CheckpointIOPlugin.axis


class Verified(NamedTuple):
    """What reading every byte of a checkpoint has shown."""

    note: str
    """What was compared with what: `the checksums inside the file`."""
    damage: dict[str, str]
    """What is wrong, by the name of a file."""


@dataclass(frozen=True)
class CheckpointFormat:
    """How a checkpoint lies in a file or folder, so that the commands of `fairlead checkpoint` can take it.

    A folder may have any names but `manifest.json`, which is of a checkpoint that Fairlead has committed.

    A plugin names it in `CheckpointIOPlugin.formats`. The module that has it imports no torch; what its other texts
    name, as `module:callable`, is imported when it is needed.

    Args:
        name: What `--to` and the commands call it.
        fits: Whether a file or folder is one, by names and first bytes.
        read: Called with `(path, trust)`; gives the state as plain Lightning has it (`state_dict`, ...). Only the
            classes that `trust` names may be made of pickled objects.
        write: Called with `(state, path, origin)`; writes a new file, or fills an empty folder, from a state that
            was read at `origin`, and returns the names of what it left out. None: it is read only.
        verify: Called with `(path,)`; returns `Verified`. It should need no torch. None: there is nothing to compare
            with.
        entries: As `read`, but tensors may be mapped or be `LazyTensor`s, for `diff`. None: `read`.
        folder: Whether it is a folder.
        weights_only: Whether it holds the weights and nothing else.

    Example:
        >>> from pathlib import Path
        >>> npy = CheckpointFormat("npy", lambda path: (path / "npy.json").is_file(), read="my.npy:read", folder=True)
        >>> npy.fits(Path("nowhere"))
        False
    """

    name: str
    fits: Callable[[Path], bool]
    read: str
    write: str | None = None
    verify: str | None = None
    entries: str | None = None
    folder: bool = False
    weights_only: bool = False

    def __str__(self) -> str:
        return self.name

    def call(self, reference: str, path: Path, *more: object) -> Any:
        """What one of its functions that read gives; an error of any kind is one of this checkpoint."""
        try:
            return pkgutil.resolve_name(reference)(path, *more)
        except (FairleadError, MemoryError):
            raise
        except Exception as error:  # a third party's reader, on a file that may hold anything
            raise unreadable(path, error) from error


def known_formats(session: Session) -> tuple[CheckpointFormat, ...]:
    """Those of all installed plugins, in the order in which they are tried.

    The names of ours are ours. Others are tried before, as theirs may be files of zip or torch with more in them.

    One that cannot be loaded is a warning, and does not stop the others.
    """
    found: dict[str, CheckpointFormat] = {}
    tags = sorted(session.plugins.names(_AXIS), key=lambda tag: f"{_AXIS}.{tag}" not in first_party())
    for tag in tags:
        plugin = session.plugins.loaded_one(_AXIS, tag)
        for reference in plugin.formats if isinstance(plugin, CheckpointIOPlugin) else ():
            wrong = _add(found, reference)
            if wrong is not None:
                session.warn(f"{_AXIS}.{tag}: its format {reference} cannot be used: {wrong}")
    return tuple(reversed(found.values()))


def _add(found: dict[str, CheckpointFormat], reference: str) -> str | None:
    """Adds the format that a plugin names; what is wrong with it, or None."""
    try:
        made = pkgutil.resolve_name(reference)
    except Exception as error:  # a third party's module may do anything
        return first_line(error)
    if not isinstance(made, CheckpointFormat):
        return f"it is a {type(made).__name__}, not a CheckpointFormat"
    return None if found.setdefault(made.name, made) is made else f"another plugin has one called {made.name!r}"


def format_of(path: Path, formats: tuple[CheckpointFormat, ...]) -> CheckpointFormat:
    """How a file or folder is written; raises when it is no checkpoint."""
    try:
        size = path.stat().st_size
        found = next((one for one in formats if one.fits(path)), None)
    except FileNotFoundError:
        raise CheckpointError("the checkpoint has no state", where=str(path), why=names_text(path.parent)) from None
    except OSError as error:
        raise disk_error(error, "cannot read a checkpoint", path) from error
    if found is not None:
        return found
    known = f"it begins or is laid out as none of: {', '.join(sorted(one.name for one in formats))}"
    raise CheckpointError(
        "this folder is not a checkpoint" if path.is_dir() else "this is not a checkpoint",
        where=str(path),
        why=names_text(path) if path.is_dir() else known if size else "the file is empty",
        fix="name a checkpoint's folder or file; a format of a plugin needs that plugin",
    )


def kind_of_folder(path: Path, formats: tuple[CheckpointFormat, ...]) -> str | None:
    """What kind of one checkpoint a folder is: `own`, `exported`, or the name of its format; None: it is none."""
    names = names_in(path)
    if NAME.fullmatch(path.name):
        return "own"  # also a damaged one, without a manifest
    if MANIFEST in names:
        return "exported" if WEIGHTS_FILE in names else "own"
    return next((one.name for one in formats if one.fits(path)), None)


_COMMANDS = "fairlead_checkpoint_io.commands"


def _head(path: Path) -> bytes:
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        return file.read(len(LEGACY_MAGIC))


def _is_torch(path: Path) -> bool:
    return _head(path).startswith((b"PK", LEGACY_MAGIC))


def _is_safetensors(path: Path) -> bool:
    head = _head(path)
    size = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and (size <= path.stat().st_size or path.suffix == ".safetensors")


def _is_distributed(path: Path) -> bool:
    return (path / CONTENTS).exists()


torch_file = CheckpointFormat(
    "torch",
    _is_torch,
    read=f"{_COMMANDS}.states:read_file",
    write=f"{_COMMANDS}.states:write_file",
    verify=f"{_COMMANDS}.verify:verify_archive",
    entries=f"{_COMMANDS}.diff:entries_of_file",
)
distributed = CheckpointFormat(
    "distributed",
    _is_distributed,
    read=f"{_COMMANDS}.states:read_distributed",
    write=f"{_COMMANDS}.states:write_distributed",
    verify=f"{_COMMANDS}.verify:verify_shards",
    entries=f"{_COMMANDS}.diff:entries_of_shards",
    folder=True,
)
deepspeed = CheckpointFormat("deepspeed", is_deepspeed, read=f"{_COMMANDS}.other_tools:read_deepspeed", folder=True)
safetensors = CheckpointFormat(
    "safetensors",
    _is_safetensors,
    read=f"{_COMMANDS}.states:read_safetensors",
    write=f"{_COMMANDS}.states:write_safetensors",
    verify=f"{_COMMANDS}.verify:verify_safetensors",
    weights_only=True,
)
transformers = CheckpointFormat(
    "transformers",
    lambda path: (path / TRAINER_STATE).is_file(),
    read=f"{_COMMANDS}.other_tools:read_transformers",
    folder=True,
)
