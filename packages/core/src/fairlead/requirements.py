"""Requirements such as `deepspeed>=0.19`, against the metadata of what is installed."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from fairlead.engines import requirement as full_requirement
from fairlead.errors import PluginError
from fairlead.records import EntryPoint

if TYPE_CHECKING:
    from packaging.requirements import Requirement


class Installed:
    """The distributions of this Python environment; each version is looked up once."""

    def __init__(self) -> None:
        self._versions: dict[str, str | None] = {}

    def version(self, dist: str) -> str | None:
        """The version of a distribution; None: it is not installed."""
        if dist not in self._versions:
            try:
                self._versions[dist] = importlib.metadata.version(dist)
            except importlib.metadata.PackageNotFoundError:
                self._versions[dist] = None
        return self._versions[dist]

    def meets(self, requirement: str) -> bool:
        """Whether an entry of `engines` is met; `PluginError` where the text is neither an engine nor a requirement."""
        parsed = _requirement(full_requirement(requirement))
        if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
            return True  # not needed on this system
        version = self.version(parsed.name)
        return version is not None and parsed.specifier.contains(version, prereleases=True)

    def check_dist(self, point: EntryPoint) -> None:
        """Raises `PluginError` where a plugin's dist needs another fairlead, before it is imported."""
        version = self.version("fairlead")
        for text in (point.dist.requires if point.dist and version else None) or []:
            if not text.lower().startswith("fairlead") or text == f"fairlead=={version}":
                continue  # nothing to parse, which would cost half of what `fairlead --help` takes
            requirement = _requirement(text)
            if requirement.name.lower() == "fairlead" and not self.meets(text):
                raise PluginError(
                    f"needs {requirement.name}{requirement.specifier}, but fairlead {version} is installed"
                )


def _requirement(text: str) -> Requirement:
    # Imported late: `import fairlead` and `fairlead --help` need no requirement read.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise PluginError(f"{text!r} is not a requirement such as 'horovod>=0.28'") from error
