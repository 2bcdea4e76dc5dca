"""`--sweep PATH=VALUES`: every combination of the values is a member, a run of its own."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

from fairlead import yaml
from fairlead.errors import ConfigError
from fairlead.overrides import parse_override

MOST: Final = 10_000
_RANGE: Final = re.compile(r"\s*range\(\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?)?\)\s*")


def members(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each member, as `--set` takes them; the last sweep varies fastest.

    Raises:
        ConfigError: Something is no `PATH=V1,V2` or `PATH=range(N)`, has no value, or is there twice.

    Example:
        >>> members(["run.seed=range(2)", "trainer.max_steps=10,20"])[1]
        ('run.seed=0', 'trainer.max_steps=20')
    """
    parsed = [_parse(text) for text in sweeps]
    paths = [path for path, _ in parsed]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"--sweep {twice} is there twice", where="--sweep", fix="write all of its values in one")
    count = 1
    for _, values in parsed:
        count *= len(values)
    if count > MOST:
        raise ConfigError(f"the sweep has {count} members, more than {MOST}", where="--sweep", fix="sweep over less")
    grid = itertools.product(*(values for _, values in parsed))
    return [tuple(f"{path}={_flow(value)}" for path, value in zip(paths, chosen, strict=True)) for chosen in grid]


def _parse(text: str) -> tuple[str, Sequence[Any]]:
    path, equals, values = text.partition("=")
    path = path.strip()
    if not equals or not values.strip():
        raise ConfigError(
            f"--sweep {text!r} is not PATH=VALUES",
            where="--sweep",
            fix="write for example --sweep trainer.max_steps=100,200 or --sweep 'run.seed=range(3)'",
        )
    first = parse_override(f"{path}=0")[0][0]  # says what is wrong with the path
    if first in ("submit", "resources"):
        raise ConfigError(
            f"all members of a sweep share their `{first}`",
            where=f"--sweep {path}",
            why="they are tasks of one array",
            fix="submit a job for each",
        )
    found: Sequence[Any]
    if match := _RANGE.fullmatch(values):
        numbers = [int(one) for one in match.groups() if one is not None]
        if len(numbers) == 3 and numbers[2] == 0:
            raise ConfigError(f"--sweep {path}: the step of a range cannot be 0", where="--sweep")
        found = range(*numbers)
    else:
        read = yaml.parse_scalar_or_flow(f"[{values}]", source=f"--sweep {path}")
        assert isinstance(read, list)  # the brackets are ours
        found = read
    if not found:
        raise ConfigError(f"--sweep {path} has no value: {values.strip()}", where="--sweep")
    return path, found


def _flow(value: Any) -> str:
    """A value as `--set` reads it back: JSON is YAML, but for what is no number."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    return json.dumps(value, ensure_ascii=False)
