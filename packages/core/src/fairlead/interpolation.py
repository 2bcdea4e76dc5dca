"""`${env:NAME}` in the texts of a job: the value of an environment variable, with a default where one is given.

`${env:NAME,DEFAULT}` is written as in Hydra, `${env:NAME:-DEFAULT}` as in a shell; a default may hold further ones. An
empty variable counts as absent. `$${env:` is the text `${env:`; every other `$` is only a dollar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fairlead.errors import did_you_mean
from fairlead.secret_names import is_secret_name
from fairlead.yaml import Unquoted
from fairlead.yaml.reader import resolve_plain

Path = tuple[str | int, ...]

START: Final = "${env:"
_INSIDE: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:(?:,|:-)(.*))?", re.DOTALL)
_EXAMPLE: Final = "${env:SCRATCH} or, with a default, ${env:SCRATCH,/tmp}"


class MistakeError(Exception):
    """What is wrong with one text; `missing`: a variable is not set."""

    def __init__(self, what: str, *, why: str | None = None, fix: str, missing: bool = False) -> None:
        super().__init__(what)
        self.what, self.why, self.fix, self.missing = what, why, fix, missing


@dataclass
class Interpolated:
    """Data with its variables replaced, the names of those at each path, and what is wrong, path by path."""

    data: Any
    variables: dict[Path, list[str]] = field(default_factory=dict)
    mistakes: dict[Path, MistakeError] = field(default_factory=dict)


def interpolate(data: Any, environ: Mapping[str, str]) -> Interpolated:
    """A copy of nested data with each `${env:NAME}` replaced.

    A text that stood in no quotes is read as YAML once more: `devices: ${env:N}` is a number where N is one.
    """
    found = Interpolated(None)
    found.data = _walk(data, (), environ, found)
    return found


def escape(data: Any) -> Any:
    """A copy of nested data that means itself when it is read as a job: every `${env:` is written `$${env:`."""
    if isinstance(data, Mapping):
        return {key: escape(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [escape(value) for value in data]
    return data.replace(START, f"${START}") if isinstance(data, str) else data


def _walk(value: Any, path: Path, environ: Mapping[str, str], found: Interpolated) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str) and START in key:
                found.mistakes[(*path, key)] = MistakeError(
                    f"the key {key!r} holds a variable", why="a variable is a value", fix="write the key itself"
                )
        return {key: _walk(child, (*path, key), environ, found) for key, child in value.items()}
    if isinstance(value, list):
        return [_walk(child, (*path, index), environ, found) for index, child in enumerate(value)]
    if not isinstance(value, str) or START not in value:
        return value
    text = _Text(environ, recorded=not any(is_secret_name(str(part)) for part in path))
    try:
        expanded = text.expand(value)
        scalar = resolve_plain(expanded) if isinstance(value, Unquoted) else expanded
    except MistakeError as mistake:
        found.mistakes[path] = mistake
        return str(value)
    except ValueError as error:  # a number that Python cannot hold
        found.mistakes[path] = MistakeError(f"{str(value)!r} is {error}", fix="quote it if it is meant as text")
        return str(value)
    found.variables[path] = text.used
    return scalar


class _Text:
    """Expands one text; `used` are the names of its variables. What is `recorded` with the run must hold no secret."""

    def __init__(self, environ: Mapping[str, str], *, recorded: bool) -> None:
        self.environ, self.recorded = environ, recorded
        self.used: list[str] = []

    def expand(self, text: str) -> str:
        """The text with its variables replaced; `MistakeError` where that cannot be."""
        done: list[str] = []
        rest = str(text)
        while True:
            before, start, rest = rest.partition(START)
            if not start:
                return "".join([*done, before])
            if before.endswith("$"):
                done += [before[:-1], START]
                continue
            inside, rest = _to_its_brace(rest, text)
            done += [before, self.value(inside)]

    def value(self, inside: str) -> str:
        """What `${env:INSIDE}` stands for."""
        match = _INSIDE.fullmatch(inside)
        if match is None:
            raise MistakeError(f"{START}{inside}}} names no environment variable", fix=f"write {_EXAMPLE}")
        name, default = match[1], match[2]
        self.used.append(name)
        value = self.environ.get(name, "")
        if value.strip():
            if self.recorded and is_secret_name(name):
                raise MistakeError(
                    f"the secret {name} would be written to the run directory",
                    why="a run keeps its settings, but for those whose own name is that of a secret",
                    fix=f"let the code that needs {name} read it from the environment",
                )
            return value
        if default is not None:
            return self.expand(default.strip())
        near = did_you_mean(name, self.environ)
        raise MistakeError(
            f"the environment variable {name} is {'empty' if name in self.environ else 'not set'}",
            why=f"did you mean {near}?" if near and near != name else None,
            fix=f"export {name}=..., or write a default: {START}{name},...}}",
            missing=True,
        )


def _to_its_brace(rest: str, text: str) -> tuple[str, str]:
    """What stands before the brace that closes one which is open, and what follows it."""
    depth = 1
    for index, char in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return rest[:index], rest[index + 1 :]
    raise MistakeError(
        f"a brace of {str(text)!r} is not closed",
        fix=f"write {_EXAMPLE}; $${{env:...}} is the text ${{env:...}}",
    )
