"""The plugins of Fairlead's own packages and the extra that brings each: the slim core names the missing pip line.

Nobody writes the list: a build collects it from the packages beside this one, a checkout when it is needed.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Final

FILE: Final = "first_party.json"
"""The collected list, beside this module in a wheel."""

_EXTRA: Final = re.compile(r"\bextra ?= ?\"([a-z0-9-]+)\"")


def first_party() -> dict[str, str]:
    """The extra of the core that brings each plugin: `{"strategy.deepspeed": "deepspeed", ...}`."""
    file = Path(__file__).with_name(FILE)
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return collect(Path(__file__).parents[3])


def collect(packages: Path) -> dict[str, str]:
    """The same from the source of all packages in a folder; an empty one where there are none.

    A plugin says itself which extra brings it (`Plugin.extra`); where it does not, a command comes with `check` and
    a backend with `lightning`.
    """
    files = packages.glob("*/pyproject.toml")
    projects = {file.parent: tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files}
    own = [project for project in projects.values() if project["name"] == "fairlead"]
    extras = {extra for project in own for extra in project["optional-dependencies"]}
    found: dict[str, str] = {}
    for folder, project in projects.items():
        if project in own:
            continue
        for name, value in project.get("entry-points", {}).get("fairlead", {}).items():
            module = folder / "src" / value.partition(":")[0].replace(".", "/")
            source = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__init__.py"
            named = [extra for extra in _EXTRA.findall(source.read_text(encoding="utf-8")) if extra in extras]
            found[name] = named[0] if named else "check" if name.startswith("command.") else "lightning"
    return dict(sorted(found.items()))
