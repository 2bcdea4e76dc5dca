"""What a clone requires when it is installed as a whole: its own packages, each from its folder.

pip would look for `fairlead-runs==0.1.0` on an index; a requirement that names the folder is taken instead.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

Projects = dict[str, tuple[Path, dict[str, Any]]]
"""Each package by name: its folder, and the table `project` of its pyproject.toml."""

_NAME = re.compile(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?")


class Clone(MetadataHookInterface):
    """Gives the clone the extras of the core."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the dependencies and the extras."""
        files = sorted(Path(self.root).glob("packages/*/pyproject.toml"))
        projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
        packages = {project["name"]: (file.parent, project) for file, project in zip(files, projects, strict=True)}
        metadata["dependencies"] = requirements(packages, "")
        extras = packages["fairlead"][1]["optional-dependencies"]
        metadata["optional-dependencies"] = {extra: requirements(packages, extra) for extra in extras}


def requirements(packages: Projects, extra: str) -> list[str]:
    """The core with this extra, and every package that it leads to, as requirements on their folders."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    wanted = [("fairlead", ""), ("fairlead", extra)]
    while wanted:
        name, asked = one = wanted.pop()
        if one in seen:
            continue
        seen.add(one)
        found.add(name)
        project = packages[name][1]
        for line in project["optional-dependencies"][asked] if asked else project["dependencies"]:
            match = _NAME.match(line)
            if match is not None and match[1] in packages:
                extras = [part.strip() for part in (match[2] or "").split(",") if part.strip()]
                wanted += [(match[1], ""), *((match[1], part) for part in extras)]
    core = f"fairlead[{extra}]" if extra else "fairlead"
    return [f"{core if name == 'fairlead' else name} @ {address(packages[name][0])}" for name in sorted(found)]


def address(folder: Path) -> str:
    """The folder as a URL; with what is in it, where pip would keep what it has built of it.

    pip 23.2, which comes with Python 3.11, takes a folder with a dash in its name for a release: `checkpoint-io` for
    version `io`. It keeps the wheel under this URL, and installs the same one after a `git pull`.
    """
    if "-" not in folder.name:
        return folder.as_uri()
    files = sorted(path for path in folder.glob("src/**/*") if path.is_file() and path.suffix != ".pyc")
    found = hashlib.sha256()
    for path in [folder / "pyproject.toml", *files]:
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{folder.as_uri()}?{found.hexdigest()[:16]}"
