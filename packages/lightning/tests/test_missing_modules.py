"""A runtime that cannot be imported: the error names what is missing, and how to get it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead.backends import imported
from fairlead.errors import MissingDependencyError, PluginError


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The name of a runtime in a module with this source."""

    def write(source: str) -> str:
        (tmp_path / "a_runtime.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "a_runtime", raising=False)
        return "a_runtime:build"

    return write


def test_a_missing_package_is_named_with_its_pip_line(runtime: Callable[[str], str]) -> None:
    """As `zlib_ng`, without which no checkpoint is written."""
    with pytest.raises(MissingDependencyError) as raised:
        imported(runtime("import zlib_ng_of_another_name"), "the runtime of the checkpoint_io 'torch'")
    assert raised.value.what == (
        "the runtime of the checkpoint_io 'torch' needs the package zlib-ng-of-another-name, which is not installed"
    )
    assert raised.value.fix == "pip install zlib-ng-of-another-name"


def test_an_engine_is_asked_for_in_a_version_that_works(
    runtime: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zlib_ng", None)  # the import fails as if it were not there
    with pytest.raises(MissingDependencyError, match="needs the package zlib-ng, ") as raised:
        imported(runtime("import zlib_ng"), "the runtime")
    assert raised.value.fix == "pip install 'zlib-ng>=1.0,<2'"


def test_what_an_installed_package_lacks_is_a_matter_of_versions(runtime: Callable[[str], str]) -> None:
    with pytest.raises(PluginError) as raised:
        imported(runtime("from torch.distributed import of_a_later_torch"), "the runtime")
    assert not isinstance(raised.value, MissingDependencyError)
    assert "of_a_later_torch" in str(raised.value.why)
    assert "may have a version" in str(raised.value.fix)
