"""Puts the list of the plugins of all packages into what is built: the slim core names their pip lines."""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FirstPartyPlugins(BuildHookInterface):  # type: ignore[type-arg]  # its configuration is of no interest here
    """Collects the list from the packages beside this one; an unpacked sdist has it already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the file; an editable install needs none, it is in the checkout itself."""
        module = Path(self.root, "src/fairlead/install.py")
        source = runpy.run_path(str(module))
        if version == "editable" or module.with_name(source["FILE"]).exists():
            return
        plugins = source["collect"](Path(self.root).parent)
        if not plugins:
            raise FileNotFoundError(
                f"{Path(self.root).parent} has none of Fairlead's other packages: build in a checkout"
            )
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name, source["FILE"])
        file.write_text(json.dumps(plugins, indent=1), encoding="utf-8")
        inside = "src/fairlead" if self.target_name == "sdist" else "fairlead"
        build_data["force_include"][str(file)] = f"{inside}/{file.name}"
