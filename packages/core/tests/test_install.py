"""The pip line that a message gives is one that works for how this copy was installed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlead.install import WORKSPACE, install_line
from fairlead.testing import write_dist

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes pip's metadata of a distribution say where it came from; None: from an index."""

    def install(dist: str, origin: dict[str, Any] | None) -> None:
        write_dist(tmp_path, dist, version="9.9", entry_points={}, files={})
        if origin is not None:
            file = tmp_path / f"{dist.replace('-', '_')}-9.9.dist-info" / "direct_url.json"
            file.write_text(json.dumps(origin), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.fixture(autouse=True)
def no_clone(installed: Callable[..., None]) -> None:
    """Whatever the environment of the tests is, the clone is not installed as a whole."""
    installed(WORKSPACE, None)


def clone(folder: Path) -> Path:
    for name in ("core", "rings"):
        (folder / "packages" / name).mkdir(parents=True)
        (folder / "packages" / name / "pyproject.toml").touch()
    return folder


def test_from_an_index(installed: Callable[..., None]) -> None:
    installed("fairlead", None)
    assert install_line("slurm") == "pip install 'fairlead[slurm]'"
    assert install_line("remote", "gcsfs") == "pip install 'fairlead[remote]' gcsfs"


def test_from_a_clone_as_a_whole(installed: Callable[..., None], tmp_path: Path) -> None:
    root = clone(tmp_path / "my clone")
    installed("fairlead", {"url": (root / "packages/core").as_uri(), "dir_info": {}})
    installed(WORKSPACE, {"url": root.as_uri(), "dir_info": {}})
    assert shlex.split(install_line("slurm", "gcsfs")) == ["pip", "install", f"{root}[slurm]", "gcsfs"]


def test_from_a_folder_of_a_clone(installed: Callable[..., None], tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    installed("fairlead", {"url": (root / "packages/core").as_uri(), "dir_info": {}})
    assert install_line("check") == f"pip install '{root}[check]'"


@pytest.mark.parametrize("complete", [True, False])
def test_in_place(installed: Callable[..., None], tmp_path: Path, complete: bool) -> None:
    """Where all packages are there, an extra only brings engines; else pip would look for a package on an index."""
    root = clone(tmp_path / "clone")
    installed("fairlead", {"url": (root / "packages/core").as_uri(), "dir_info": {"editable": True}})
    if complete:
        installed("fairlead-rings", None)
    line = f"pip install -e '{root}/packages/core[slurm]'" if complete else f"pip install '{root}[slurm]'"
    assert install_line("slurm") == line


def test_a_clone_that_is_gone(installed: Callable[..., None], tmp_path: Path) -> None:
    installed("fairlead", {"url": (tmp_path / "gone/packages/core").as_uri(), "dir_info": {}})
    assert install_line("slurm") == "pip install 'PATH-OF-A-CLONE[slurm]'"


@pytest.mark.parametrize(("more", "revision"), [({}, "0123abc"), ({"requested_revision": "v0.1"}, "v0.1")])
@pytest.mark.parametrize("dist", ["fairlead", WORKSPACE])
def test_from_a_repository(
    installed: Callable[..., None], dist: str, more: dict[str, str], revision: str, tmp_path: Path
) -> None:
    if dist == WORKSPACE:  # pip has built the packages in a folder that is gone
        installed("fairlead", {"url": (tmp_path / "gone/packages/core").as_uri(), "dir_info": {}})
    url = "https://example.org/fairlead.git"
    installed(dist, {"url": url, "vcs_info": {"vcs": "git", "commit_id": "0123abc", **more}})
    assert install_line("slurm") == f"pip install 'fairlead-workspace[slurm] @ git+{url}@{revision}'"


def test_from_wheels(installed: Callable[..., None]) -> None:
    installed("fairlead", {"url": "file:///opt/my%20wheels/fairlead-9.9-py3-none-any.whl", "archive_info": {}})
    assert install_line("slurm") == "pip install --find-links '/opt/my wheels' 'fairlead[slurm]'"
    installed("fairlead", {"url": "https://example.org/wheels/fairlead-9.9-py3-none-any.whl", "archive_info": {}})
    assert install_line("slurm") == "pip install --find-links https://example.org/wheels 'fairlead[slurm]'"


@pytest.mark.parametrize("text", ["{", "[]", '{"url": 3}'])
def test_an_odd_record_counts_as_none(installed: Callable[..., None], tmp_path: Path, text: str) -> None:
    installed("fairlead", None)
    (tmp_path / "fairlead-9.9.dist-info" / "direct_url.json").write_text(text)
    assert install_line("slurm") == "pip install 'fairlead[slurm]'"


def test_no_message_writes_the_line_itself() -> None:
    """All go through `install_line`."""
    home = ROOT / "packages/core/src/fairlead/install.py"
    sources = [file for file in ROOT.glob("packages/*/src/**/*.py") if file != home]
    assert [str(file) for file in sources if "pip install 'fairlead" in file.read_text(encoding="utf-8")] == []
