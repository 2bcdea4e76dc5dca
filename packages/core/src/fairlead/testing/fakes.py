"""Stand-ins for what a plugin meets: an installed distribution, an entry point, the environment."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.plugins import Dist


class FakeEnviron(Mapping[str, str]):
    """Environment variables that cannot be written, and that know which were read.

    Example:
        >>> environ = FakeEnviron(SLURM_PROCID="0")
        >>> environ.get("SLURM_PROCID"), environ.get("RANK"), sorted(environ.requested)
        ('0', None, ['RANK', 'SLURM_PROCID'])
    """

    def __init__(self, variables: Mapping[str, str] | None = None, /, **more: str) -> None:
        self._variables = {**(variables or {}), **more}
        for name, value in self._variables.items():
            if not isinstance(value, str):
                raise TypeError(f"{name}={value!r}: the value of an environment variable is text")
        self.requested: set[str] = set()
        """The names that were looked up one by one."""

    def __getitem__(self, name: str) -> str:
        self.requested.add(name)
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def __repr__(self) -> str:
        return f"FakeEnviron({self._variables!r})"


@dataclass(frozen=True)
class FakeEntryPoint:
    """An entry point, `<axis>.<tag>`, that loads an object of the test; an exception as `target` is raised instead.

    Example:
        >>> from fairlead import PluginManager
        >>> PluginManager([FakeEntryPoint("strategy.ring", ImportError("no ring"))]).records(load=True)[0].error
        'ImportError: no ring'
    """

    name: str
    target: Any
    dist: Dist | None = None
    value: str = "a_test:plugin"

    def load(self) -> Any:
        """The object."""
        if isinstance(self.target, BaseException):
            raise self.target
        return self.target


@dataclass(frozen=True)
class FakeDist:
    """An importable distribution that `write_dist` wrote; `path` is the folder to put on `sys.path`."""

    name: str
    version: str
    path: Path

    @property
    def entry_points(self) -> list[importlib.metadata.EntryPoint]:
        """Its entry points in the group `fairlead`, read from its metadata as an installed package's are."""
        found = importlib.metadata.distributions(path=[str(self.path)])
        return [point for dist in found for point in dist.entry_points if point.group == "fairlead"]


def write_dist(
    folder: Path,
    name: str,
    *,
    entry_points: Mapping[str, str],
    files: Mapping[str, str],
    version: str = "1.0",
    requires: Sequence[str] = (),
) -> FakeDist:
    """Writes a distribution as pip would leave it: its modules and their metadata.

    Args:
        folder: Where; made when missing.
        name: The distribution's name.
        entry_points: Those of the group `fairlead`, such as `{"strategy.ring": "ring.plugin:ring"}`.
        files: Source text by path, such as `{"ring/plugin.py": "..."}`; common indentation is removed,
            and a folder without `__init__.py` gets an empty one.
        version: Its version.
        requires: Its requirements, such as `["fairlead>=0.1"]`.
    """
    for relative, text in files.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                (folder / parent / "__init__.py").touch()
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    listed = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[fairlead]\n{listed}", encoding="utf-8")
    return FakeDist(name, version, folder)
