"""Import every module of every installed Fairlead distribution; runs inside the environment of one extra.

Prints one JSON document: how many modules were imported, which wait for an engine that this environment does not have,
and which failed. A module may wait only where the design allows it: the modules of the entry points, the face of a
package, and all of core, runs and launch except `fairlead.testing` must import everywhere.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import PurePosixPath

# What `fairlead.testing` may need: the author of a plugin has it, a user has not.
TEST_TOOLS = {"pytest", "hypothesis", "_pytest"}


MODULES = {
    "mlflow_skinny": "mlflow",
    "vl_convert_python": "vl_convert",
    "opentelemetry_sdk": "opentelemetry",
    "opentelemetry_exporter_otlp_proto_http": "opentelemetry",
}
"""What a distribution of another name has."""
TORCH_FREE = {"fairlead", "fairlead_runs", "fairlead_launch"}


def modules() -> list[str]:
    """The dotted names of every module that a distribution named fairlead* has installed."""
    names = set()
    for dist in importlib.metadata.distributions():
        if re.split(r"[-_.]", dist.name.lower())[0] != "fairlead":
            continue
        for file in dist.files or []:
            path = PurePosixPath(file)
            if path.suffix == ".py" and path.stem != "__main__" and path.parts[0].startswith("fairlead"):
                parts = path.parts[:-1] if path.stem == "__init__" else (*path.parts[:-1], path.stem)
                names.add(".".join(parts))
    return sorted(names)


def absent_engines() -> set[str]:
    """Top-level modules of what the installed Fairlead distributions name in an extra and this environment lacks."""
    named = set()
    for dist in importlib.metadata.distributions():
        if dist.name.lower().startswith("fairlead"):
            named |= {re.split(r"[^\w.-]", line)[0] for line in dist.requires or [] if "extra ==" in line}
    present = {re.sub(r"[-_.]+", "-", dist.name).lower() for dist in importlib.metadata.distributions()}
    absent = {name.lower().replace("-", "_") for name in named if re.sub(r"[-_.]+", "-", name).lower() not in present}
    return {MODULES.get(name, name) for name in absent}


def may_wait(module: str, missing: str, engines: set[str]) -> bool:
    """Whether the design lets `module` need `missing`, a top-level module that is not installed."""
    if module.split(".")[:2] == ["fairlead", "testing"]:
        return missing in TEST_TOOLS
    torch_free = module.split(".")[0] in TORCH_FREE or module in named_by_entry_points()
    return not torch_free and "." in module and missing in engines


def named_by_entry_points() -> set[str]:
    """The modules that are loaded to know the plugins."""
    return {point.value.partition(":")[0] for point in importlib.metadata.entry_points(group="fairlead")}


def main() -> int:
    """Import and report; 1 when a module failed."""
    imported, engines = 0, absent_engines()
    waiting: dict[str, str] = {}
    failed: dict[str, str] = {}
    for module in modules():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(module)
            imported += 1
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            # A missing module of our own is a fault, whoever asks for it.
            known = waiting if not missing.startswith("fairlead") and may_wait(module, missing, engines) else failed
            known[module] = f"{type(error).__name__}: {error}"
        except Exception as error:  # any other failure is reported, with its module, by the caller
            failed[module] = f"{type(error).__name__}: {error}"
    torch = importlib.util.find_spec("torch") is not None
    print(json.dumps({"imported": imported, "waiting": waiting, "failed": failed, "torch": torch}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
