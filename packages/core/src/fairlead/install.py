"""Which extra brings a plugin of our own, and the pip line that brings an extra, as this copy was installed.

pip records where a distribution came from, if it was not an index (PEP 610, `direct_url.json`). Nobody writes the list
of the plugins: a build collects it from the packages beside this one, a checkout when it is needed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

WORKSPACE: Final = "fairlead-workspace"
"""The distribution that a clone installs as, `pip install '.[slurm]'` in it: it has the extras of the core."""


def install_line(extra: str, *more: str) -> str:
    """The command that brings an extra of Fairlead, and `more` requirements from an index.

    Example:
        >>> install_line("slurm", "gcsfs")  # doctest: +SKIP
        "pip install 'fairlead[slurm]' gcsfs"
    """
    clone, core = _origin(WORKSPACE), _origin("fairlead")
    return " ".join(["pip install", *_arguments(extra, clone, core), *(shlex.quote(one) for one in more)])


def _arguments(extra: str, clone: dict[str, Any] | None, core: dict[str, Any] | None) -> list[str]:
    """The arguments of pip, from where the clone and the core were installed; None: from an index, or not at all."""
    for name, origin in ((WORKSPACE, clone), ("fairlead", core)):
        if origin is not None and "vcs_info" in origin:
            return [_from_repository(extra, origin)]
        if origin is not None and "dir_info" in origin:
            folder = _folder(origin["url"])
            root = folder if name == WORKSPACE else folder.parent.parent
            return _from_clone(extra, root, editable=bool(origin["dir_info"].get("editable")))
    if core is not None:  # an archive: the other wheels lie beside it
        url = str(core["url"]).rpartition("/")[0]
        source = str(_folder(url)) if url.startswith("file:") else url
        return ["--find-links", shlex.quote(source), f"'fairlead[{extra}]'"]
    return [f"'fairlead[{extra}]'"]


def _from_repository(extra: str, origin: dict[str, Any]) -> str:
    vcs = origin["vcs_info"]
    revision = vcs.get("requested_revision") or vcs["commit_id"]
    return shlex.quote(f"{WORKSPACE}[{extra}] @ {vcs['vcs']}+{origin['url']}@{revision}")


def _from_clone(extra: str, root: Path, *, editable: bool) -> list[str]:
    """Editable again where all packages are; a clone that has been moved is to be found by the user."""
    if not (root / "packages" / "core").is_dir():
        return [f"'PATH-OF-A-CLONE[{extra}]'"]
    packages = {file.parent.name for file in root.glob("packages/*/pyproject.toml")}
    names = {"fairlead" if name == "core" else f"fairlead-{name}" for name in packages}
    if editable and all(_is_installed(name) for name in names):
        return ["-e", shlex.quote(f"{root / 'packages' / 'core'}[{extra}]")]
    return [shlex.quote(f"{root}[{extra}]")]


def _is_installed(dist: str) -> bool:
    try:
        importlib.metadata.distribution(dist)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _origin(dist: str) -> dict[str, Any] | None:
    """What `direct_url.json` of a distribution says; None: it came from an index, or is not installed."""
    try:
        text = importlib.metadata.distribution(dist).read_text("direct_url.json")
        found = json.loads(text) if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None


def _folder(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


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
