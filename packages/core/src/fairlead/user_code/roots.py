"""Where user code is found: the same answer on the login node, in every rank and after a requeue."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from fairlead.errors import ConfigError, did_you_mean, names_in

_MARKS = ("pyproject.toml", ".git")


@dataclass(frozen=True)
class CodeRoot:
    """The folders in which user code is looked for, each with its reason; the `installed` packages come last."""

    searched: tuple[tuple[Path, str], ...]
    installed: tuple[Path, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The user's folders, without the reasons."""
        return tuple(folder for folder, _ in self.searched)

    def describe(self) -> str:
        """One line per folder, for an error that names where was searched."""
        lines = [f"{folder} ({reason})" for folder, reason in self.searched]
        return "\n".join([*lines, f"installed packages ({sys.prefix})"])


def code_root(
    job_file: Path | None,
    *,
    code: str | list[str] | None,
    cwd: Path,
    beside: Sequence[Path] = (),
    code_base: Path | None = None,
) -> CodeRoot:
    """Decides where user code is found: `run.code` is relative to `code_base`: the folder of the file that says it.

    In this order: `run.code` if it is given, else the nearest parent of the job file with a `pyproject.toml` or `.git`;
    the working directory and the job file's own folder, unless `run.code` is a list; each with its `src` folder if it
    has one; then installed packages. The folder of a console script (`bin`) never counts, although Python puts it at
    the front of `sys.path`.
    """
    cwd = Path(os.path.abspath(cwd))
    files = [Path(os.path.abspath(cwd / file)) for file in (*([job_file] if job_file is not None else []), *beside)]
    base = code_base or (files[0].parent if files else cwd)
    found: list[tuple[Path, str]] = []
    if code is not None:
        found += [(_given(one, base), "run.code") for one in ([code] if isinstance(code, str) else code)]
    else:
        found += [project for file in files if (project := _project(file)) is not None]
    if not isinstance(code, list):
        found.append((cwd, "the working directory"))
        own = "the job file's folder"
        found += [(file.parent, own if file == files[0] else f"beside {file.name}") for file in files]
    searched: dict[Path, str] = {}
    for folder, reason in found:
        searched.setdefault(folder, reason)
        if os.path.isdir(folder / "src"):
            searched.setdefault(folder / "src", f"src/ of {reason}")
    installed = tuple(_installed(sys.path, cwd, searched))
    return CodeRoot(tuple(searched.items()), installed)


def _given(code: str, base: Path) -> Path:
    folder = Path(os.path.abspath(base / Path(code).expanduser()))
    if os.path.isdir(folder):
        return folder
    if os.path.exists(folder):
        raise ConfigError(f"{code!r} is not a folder", where="run.code", fix=f"name its folder: {Path(code).parent}")
    siblings = [name for name in names_in(folder.parent) if os.path.isdir(folder.parent / name)]
    near = did_you_mean(folder.name, siblings)
    raise ConfigError(
        f"the folder {code!r} does not exist",
        where="run.code",
        why=f"looked for {folder}; it is relative to the folder of the file that says it, in --set to the current one",
        fix=near and f"did you mean {Path(code).parent / near}?",
    )


def _project(file: Path) -> tuple[Path, str] | None:
    for folder in file.parents:
        for mark in _MARKS:
            if os.path.exists(folder / mark):  # .git is a file in a worktree
                return folder, f"the {mark} above the job file"
    return None


def script_folders() -> frozenset[str]:
    """Folders of console scripts; nothing in them is meant to be imported."""
    folders = {sysconfig.get_path("scripts"), os.path.dirname(sys.executable)}
    if "posix_user" in sysconfig.get_scheme_names():
        folders.add(sysconfig.get_path("scripts", "posix_user"))
    return frozenset(os.path.abspath(folder) for folder in folders if folder)


def _installed(entries: Sequence[str], cwd: Path, searched: dict[Path, str]) -> Iterator[Path]:
    scripts = script_folders()
    for entry in dict.fromkeys(os.path.abspath(cwd / entry) for entry in entries):
        if entry not in scripts and Path(entry) not in searched and os.path.exists(entry):
            yield Path(entry)


def activate(root: CodeRoot) -> None:
    """Puts the folders of user code at the front of `sys.path`, in their order; a second call changes nothing.

    The folder of a console script is taken off, so that a module is found whichever way the process was started.
    """
    wanted = [str(folder) for folder in root.folders]
    scripts = script_folders()
    rest = [entry for entry in sys.path if entry not in wanted and (not entry or os.path.abspath(entry) not in scripts)]
    if sys.path != wanted + rest:
        sys.path[:] = wanted + rest
        importlib.invalidate_caches()


def user_folders() -> list[Path]:
    """The folders in which this process finds code before Python's own: those of `activate`, or a script's."""
    library, scripts = os.path.dirname(sysconfig.get_path("stdlib")), script_folders()
    own = (os.path.abspath(entry) for entry in takewhile(lambda entry: not entry.startswith(library), sys.path))
    return [Path(entry) for entry in own if entry not in scripts and os.path.isdir(entry)]
