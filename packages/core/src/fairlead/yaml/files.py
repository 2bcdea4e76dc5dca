"""Reading a YAML file, with an answer for every way in which a file can be the wrong one."""

from __future__ import annotations

import os
from pathlib import Path

from fairlead.errors import ConfigError, did_you_mean, names_in
from fairlead.yaml.reader import Document, load

MAX_BYTES = 10 * 1024 * 1024
_SUFFIXES = (".yaml", ".yml")


def load_file(path: str | os.PathLike[str]) -> Document:
    """Reads a YAML file of at most 10 MiB in UTF-8; its `ConfigError`s name the file as it was given."""
    source = os.fspath(path)
    return load(_text(_read(Path(path), source), source), source=source)


def _read(path: Path, source: str) -> bytes:
    try:
        with path.open("rb") as file:
            # Not the size of the file: a pipe (`fairlead check <(make-job)`) has none.
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _missing(path, source) from None
    except IsADirectoryError:
        inside = [name for name in names_in(path) if name.endswith(_SUFFIXES)]
        fix = f"name the file: {path / inside[0]}" if inside else "name a YAML file"
        raise ConfigError("this is a folder, not a file", where=source, fix=fix) from None
    except PermissionError:
        fix = f"chmod u+r {source}, or ask its owner"
        raise ConfigError("no permission to read this file", where=source, fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError("this file cannot be read", where=source, why=str(error)) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError("this file is larger than 10 MiB", where=source, why="a job file is a few kilobytes")
    return raw


def _missing(path: Path, source: str) -> ConfigError:
    folder = path.parent
    if not folder.exists():
        return ConfigError("there is no such file", where=source, why=f"the folder {folder} does not exist")
    names = names_in(folder)
    # A job file is most often meant: prefer those, and a name without its suffix.
    yamls = [name for name in names if name.endswith(_SUFFIXES)]
    stems = {Path(name).stem: name for name in yamls}
    near = stems.get(path.name) or did_you_mean(path.name, yamls) or did_you_mean(path.name, names)
    why = None if path.is_absolute() else f"looked in {folder.absolute()}"
    return ConfigError("there is no such file", where=source, why=why, fix=near and f"did you mean {folder / near}?")


def _text(raw: bytes, source: str) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError("this file is in UTF-16", where=source, fix="save it as UTF-8")
    if b"\0" in raw:
        raise ConfigError("this is a binary file, not YAML", where=source, why="it holds NUL bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            "this file is not UTF-8 text",
            where=f"{source}:{line}",
            why=f"byte 0x{raw[error.start]:02x} on this line does not decode",
            fix="save it as UTF-8; a checkpoint or an archive is not a job file",
        ) from None
