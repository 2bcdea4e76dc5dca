"""The pip line that brings an extra, for the way in which this copy of Fairlead was installed.

pip records where a distribution came from, if it was not an index (PEP 610, `direct_url.json`).
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

WORKSPACE: Final = "fairlead-workspace"
"""The distribution that a whole clone installs as, `pip install '.[slurm]'` in it: it has the extras of the core."""


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
        place = str(_folder(url)) if url.startswith("file:") else url
        return ["--find-links", shlex.quote(place), f"'fairlead[{extra}]'"]
    return [f"'fairlead[{extra}]'"]


def _from_repository(extra: str, origin: dict[str, Any]) -> str:
    vcs = origin["vcs_info"]
    revision = vcs.get("requested_revision") or vcs["commit_id"]
    return shlex.quote(f"{WORKSPACE}[{extra}] @ {vcs['vcs']}+{origin['url']}@{revision}")


def _from_clone(extra: str, root: Path, *, editable: bool) -> list[str]:
    """In place again where all packages are; a clone that has been moved is to be found by the user."""
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
