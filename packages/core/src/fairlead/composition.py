"""One job out of several files: later files over earlier ones, and each over those that its `extends` names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Final

from fairlead import yaml
from fairlead.config.job import EXTENDS
from fairlead.errors import ConfigError
from fairlead.interpolation import interpolate
from fairlead.overrides import merge

Path = tuple[str | int, ...]

_DEEPEST: Final = 100


class NotAJobError(ConfigError):
    """A file was read and is no mapping: nothing in it can be a setting."""

    code = "wrong-type"


@dataclass(frozen=True)
class JobFile:
    """One file: where it is, and what it says without its `extends`."""

    path: FilePath
    document: yaml.Document
    settings: Mapping[Any, Any]

    @property
    def real(self) -> str:
        """Its path without links: what makes it the same file."""
        return os.path.realpath(self.path)


@dataclass
class Origins:
    """Which file has set what.

    Args:
        files: All of them, a later one over those before it; the last one was named on the command line.
    """

    files: Sequence[JobFile]
    _owners: dict[Path, JobFile] = field(default_factory=dict)

    def take(self, file: JobFile, path: Path) -> None:
        """A setting, with all in it, is now what this file says."""
        for known in [known for known in self._owners if known[: len(path)] == path]:
            del self._owners[known]
        self._owners[path] = file

    def file(self, path: Path) -> JobFile:
        """The file that says a setting, or else what it is in; the last one where none says anything of it."""
        owners = (self._owners.get(path[:end]) for end in range(len(path), 0, -1))
        return next((owner for owner in owners if owner is not None), self.files[-1])

    def location(self, path: Path) -> str:
        """Where that is: `base.yaml:7`."""
        document = self.file(path).document
        return f"{document.source}:{document.line(path) or 1}"


def compose(sources: Sequence[str], cwd: FilePath, environ: Mapping[str, str]) -> tuple[dict[Any, Any], Origins]:
    """The data of all files together, variables not yet replaced, and which file has set what.

    A file counts once, where the first one needs it: of two files that extend the same base the second takes nothing
    of the first back. A file that is named here counts at its position all the same.

    Raises:
        NotAJobError: A file is no mapping.
        ConfigError: A file cannot be read, or extends itself.
    """
    files: list[JobFile] = []
    for source in sources:
        named = JobFile(FilePath(cwd, source), *_read(FilePath(cwd, source), source))
        if named.real in {file.real for file in files}:
            files.append(named)
        else:
            _collect((named,), files, environ)
    data: dict[Any, Any] = {}
    origins = Origins(files)
    for file in files:
        merge(data, file.settings, partial(origins.take, file))
    return data, origins


def _read(path: FilePath, source: str) -> tuple[yaml.Document, Mapping[Any, Any]]:
    document = dataclasses.replace(yaml.load_file(path), source=source)
    if not isinstance(document.data, dict):
        kind = "empty" if document.data is None else f"a {type(document.data).__name__}"
        raise NotAJobError(
            f"{source} is {kind}, not a job",
            where=f"{source}:1",
            fix="a job is a mapping with `model`, `data` and `trainer`",
        )
    return document, {key: value for key, value in document.data.items() if key != EXTENDS}


def _collect(chain: tuple[JobFile, ...], files: list[JobFile], environ: Mapping[str, str]) -> None:
    """Adds the last file of a chain, in which each extends the next one, behind those that it extends itself."""
    for location, given in _bases(chain[-1], environ):
        path = chain[-1].path.parent / os.path.expanduser(given)
        real = os.path.realpath(path)
        if real in (before := [file.real for file in chain]):
            names = [file.document.source for file in chain[before.index(real) :]]
            raise ConfigError(
                f"{names[0]} extends itself",
                where=location,
                why=" extends ".join([*names, names[0]]),
                fix=f"remove one `{EXTENDS}` of these",
            )
        if len(chain) >= _DEEPEST:
            raise ConfigError(f"more than {_DEEPEST} files extend each other", where=location, fix="extend fewer")
        if real not in {file.real for file in files}:
            _collect((*chain, _base(chain[-1], location, given, path)), files, environ)
    files.append(chain[-1])


def _bases(file: JobFile, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The paths in `extends`, each with its location."""
    document = file.document
    assert isinstance(document.data, dict)
    requested = document.data.get(EXTENDS, [])
    found = interpolate({EXTENDS: requested if isinstance(requested, list) else [requested]}, environ)
    for index, one in enumerate(found.data[EXTENDS]):
        location = f"{document.source}:{document.line((EXTENDS, index))}, {EXTENDS}"
        if (mistake := found.mistakes.get((EXTENDS, index))) is not None:
            raise ConfigError(mistake.what, where=location, why=mistake.why, fix=mistake.fix)
        if not isinstance(one, str) or not one:
            shown = "null" if one is None else repr(one)
            raise ConfigError(
                f"{EXTENDS} is {shown}, not a file",
                where=location,
                fix=f"write {EXTENDS}: base.yaml, or a list of files",
            )
        yield location, one


def _base(file: JobFile, location: str, given: str, path: FilePath) -> JobFile:
    """The file that another one extends."""
    source = os.path.normpath(os.path.join(os.path.dirname(file.document.source), os.path.expanduser(given)))
    try:
        return JobFile(path, *_read(path, source))
    except ConfigError as error:
        if error.where == os.fspath(path):  # it cannot be read at all
            raise ConfigError(
                f"{EXTENDS}: {given}: {error.what}", where=location, why=error.why or str(path), fix=error.fix
            ) from None
        error.why = f"{error.why}\n{location} names it" if error.why else f"{location} names it"
        raise
