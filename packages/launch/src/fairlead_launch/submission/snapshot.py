"""The code as it was submitted: a copy of the user's repository, which is what runs, also after each requeue."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.errors import ConfigError
from fairlead.user_code import CodeRoot
from fairlead_runs import git_state

CODE: Final = "code"
"""The folder of the copy in that of the submission; `code.json` beside it says where it is from."""
MOST_BYTES: Final = 256 << 20
MOST_FILES: Final = 20_000
_TIMEOUT: Final = 60.0
_NEVER: Final = frozenset(
    {"__pycache__", ".git", ".venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)


@dataclass(frozen=True)
class Sources:
    """Which files are copied.

    Args:
        root: The top of the repository, or without git the folder of the code.
        files: Paths below it, sorted.
        git: What `git_state` says of it; None without git.
        left_out: Files that git does not track and that no pattern of `submit.snapshot` names.
    """

    root: Path
    files: Sequence[str]
    git: Mapping[str, Any] | None
    left_out: int = 0

    def described(self) -> str:
        """In a line what is copied."""
        count = f"{len(self.files)} files of {self.root}"
        if self.git is None:
            return f"{count}, which is no git repository"
        commit = str(self.git["commit"])[:12] if self.git["commit"] else "no commit yet"
        dirty = ", with the changes that are not committed" if self.git["dirty"] else ""
        left = f"; {self.left_out} untracked files are left out" if self.left_out else ""
        return f"{count} at {commit}{dirty}{left}"


def find_sources(
    root: CodeRoot, wanted: bool | Sequence[str], environ: Mapping[str, str], *, without: Path
) -> Sources | None:
    """Which files are to be copied; None: `submit.snapshot` is false.

    With git what it tracks, as it is in the working tree, and of the rest what it does not ignore, or what a list of
    patterns names; without git all files of the folder, or those that the patterns name. Never what is in `without`,
    the folder of the runs.

    Raises:
        ConfigError: It is too much, or git does not answer.
    """
    if wanted is False:
        return None
    patterns = None if wanted is True else list(wanted)
    folder = root.folders[0]
    state = git_state(folder, environ)
    if state is not None:
        top = Path(state["root"])
        tracked = set(_git(top, environ, "ls-files", "--recurse-submodules"))
        others = set(_git(top, environ, "ls-files", "--others", "--exclude-standard"))
        # A pattern may name what git ignores: that is the one reason to write it.
        ignored = _git(top, environ, "ls-files", "--others") if patterns is not None else ()
        named = {name for name in ignored if _matches(name, patterns or ())}
        chosen = tracked | (others if patterns is None else named)
        left_out = len(others - chosen)
    else:
        top, left_out = folder, 0
        named_here = (name for name in _walk(folder, without) if patterns is None or _matches(name, patterns))
        chosen = set(itertools.islice(named_here, MOST_FILES + 1))  # a home directory may have millions
    present = (name for name in sorted(chosen) if os.path.lexists(top / name) and not _inside(top / name, without))
    files = [name for name in present if not (top / name).is_dir() or (top / name).is_symlink()]
    _not_too_much(top, files)
    return Sources(top, files, state, left_out)


def take_snapshot(sources: Sources, folder: Path) -> Path:
    """Copies the files to `folder/code`, and writes `folder/code.json`, what provenance says of them; returns that.

    Raises:
        ConfigError: A file cannot be copied.
    """
    digest, target = hashlib.sha256(), folder / CODE
    try:
        target.mkdir(parents=True)
        for name in sources.files:
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(sources.root / name, copy, follow_symlinks=False)
            content = os.readlink(copy).encode() if copy.is_symlink() else copy.read_bytes()
            digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    except OSError as error:
        raise ConfigError(
            "the code cannot be copied", where=str(error.filename or target), why=error.strerror
        ) from error
    reported = {
        **(sources.git or dict.fromkeys(("commit", "branch", "diff"), None)),
        "root": str(sources.root),
        "snapshot": {"path": str(target), "files": len(sources.files), "digest": digest.hexdigest()},
    }
    file = folder / f"{CODE}.json"
    file.write_text(json.dumps(reported, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def moved(root: CodeRoot, sources: Sources | None, folder: Path) -> list[str]:
    """The folders of user code as `run.code` of the job names them: those in the repository in the copy of it."""
    found = []
    for place in root.folders:
        if sources is not None and _inside(place, sources.root):
            place = folder / CODE / os.path.relpath(os.path.realpath(place), os.path.realpath(sources.root))
        found.append(os.path.normpath(place))
    return list(dict.fromkeys(found))


def _git(top: Path, environ: Mapping[str, str], *words: str) -> list[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(top), *words, "-z"],
            capture_output=True,
            timeout=_TIMEOUT,
            env={**environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reported = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigError(
            f"git cannot list the files of {top}",
            where="submit.snapshot",
            why=reported.decode(errors="replace").strip(),
            fix="repair the repository, or set `submit.snapshot: false`: then the job runs what is in the folder",
        ) from error
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _walk(folder: Path, without: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        copied = (name for name in folders if name not in _NEVER and not name.endswith(".egg-info"))
        folders[:] = sorted(
            name
            for name in copied
            if not os.path.exists(os.path.join(place, name, "pyvenv.cfg")) and not _inside(Path(place, name), without)
        )
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in sorted(files))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    # `*` of fnmatch also stands for slashes: `data/*.json` takes what is deeper, too.
    return any(fnmatch.fnmatchcase(name, pattern.removeprefix("./")) for pattern in patterns)


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)) or Path(
        os.path.realpath(path)
    ).is_relative_to(os.path.realpath(folder))


def _not_too_much(top: Path, files: Sequence[str]) -> None:
    sizes = {name: (top / name).lstat().st_size for name in files}
    total = sum(sizes.values())
    if total > MOST_BYTES or len(files) > MOST_FILES:
        largest = sorted(files, key=lambda name: -sizes[name])[:5]
        raise ConfigError(
            f"the code is too large to be copied with each submission: {len(files)} files, {total >> 20} MiB",
            where=f"submit.snapshot: {top}",
            why="\n".join(["the largest:", *(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)]),
            fix="let git ignore what is no code; or name what is needed, `submit.snapshot: ['*.py', 'configs/*']`;\n"
            "or `submit.snapshot: false`: then the job runs what is in the folder when it starts",
        )
