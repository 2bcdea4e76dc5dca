"""The name and path of a run: from the job alone, so that every rank and every requeue computes the same."""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairlead.config import RunConfig
from fairlead.errors import ConfigError, did_you_mean
from fairlead.interfaces import Job
from fairlead.secret_names import is_secret_name

MAX_BYTES = 200
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_PUNCTUATION = frozenset("._+=,@%-")


def run_directory(job: Mapping[str, Any], run: RunConfig, scheduled: Job | None, cwd: Path) -> Path:
    """The run directory, by the job and the task of the scheduler's array; without a name that of the program."""
    name = render_name(run.name or Path(sys.argv[0]).stem or "run", job)
    return run_path((cwd / run.dir).absolute(), name, scheduled)


def render_name(template: str, job: Mapping[str, Any]) -> str:
    """Fills a template such as `gpt-lr{model.args.lr}` from the job, and makes a safe folder name of it.

    `{dotted.path}` leads into the job, list items by index; `{{` is a brace.  `ConfigError`: a path leads nowhere, or
    to a mapping or a secret; the name is empty.
    """

    def fill(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None:
            raise ConfigError(
                f"a single {match[0]!r} in {template!r}", where="run.name", fix=f"double it: {match[0] * 2}"
            )
        return _text(_lookup(job, match[1].strip(), template), match[1])

    name = safe_name(_FIELD.sub(fill, template))
    if not name:
        raise ConfigError(f"the run's name {template!r} is empty", where="run.name", fix="use letters or digits in it")
    return name


def safe_name(text: str) -> str:
    """A folder name that no shell or file system trips over: no slashes, spaces, control characters, leading dots.

    Letters of all scripts stay; at most 200 bytes, a longer name ends in a hash of the full one.
    """
    text = unicodedata.normalize("NFC", text)
    name = "".join(char if _is_safe(char) else "_" for char in text)
    name = re.sub(r"_{2,}", "_", name).lstrip("._-").rstrip("._")
    raw = name.encode()
    if len(raw) > MAX_BYTES:
        digest = hashlib.sha256(raw).hexdigest()[:8]
        name = f"{raw[: MAX_BYTES - 9].decode(errors='ignore')}-{digest}"
    return name


def run_path(directory: str | Path, name: str, job: Job | None = None) -> Path:
    """The run directory: `<run.dir>/<run.name>`, for a task of an array `<run.dir>/<run.name>-task-<task>`."""
    task = job.array_task if job is not None else None
    return Path(directory) / (name if task is None else f"{name}-task-{safe_name(task)}")


def _is_safe(char: str) -> bool:
    if char.isascii():
        return char.isalnum() or char in _PUNCTUATION
    return char.isprintable() and not char.isspace()


def _lookup(job: Mapping[str, Any], path: str, template: str) -> Any:
    value: Any = job
    walked: list[str] = []
    for part in path.split("."):
        inside: dict[str, Any] = {}
        if isinstance(value, Mapping):
            inside = {str(key): item for key, item in value.items()}
        elif isinstance(value, Sequence) and not isinstance(value, str):
            inside = {str(index): item for index, item in enumerate(value)}
        if part in inside:
            value = inside[part]
            walked.append(part)
            continue
        known = list(inside)
        at = ".".join(walked) or "the job"
        near = did_you_mean(part, known)
        raise ConfigError(
            f"the run's name needs {path!r}, which the job does not have",
            where=f"run.name: {template}",
            why=f"{at} has no {part!r}" + (f", only {', '.join(known[:20])}" if known else ", it is a single value"),
            fix=f"write {'.'.join([*walked, near])!r}" if near else "use a path that the job has",
        )
    return value


def _text(value: Any, path: str) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        inside = ", ".join(str(key) for key in value) if isinstance(value, Mapping) else "a list"
        raise ConfigError(
            f"the run's name needs one value, but {path!r} has several", where="run.name", why=f"it holds {inside}"
        )
    if isinstance(value, str) and is_secret_name(path.rpartition(".")[2]):
        raise ConfigError(
            f"the run's name would show the secret {path!r}", where="run.name", fix="leave it out of the name"
        )
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
