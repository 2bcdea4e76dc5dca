"""Every registered plugin of every axis keeps the contract; a third party's, installed beside ours, too."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.testing import CONFORMANCE


def _suites() -> dict[str, type]:
    suites: dict[str, type] = {}
    plugins = PluginManager()  # one for all, as `fairlead plugins check` has it
    alone: set[str] = set()

    def imports_no_engine(suite: Any, module: str, do: str) -> None:
        if module not in alone:  # presets share the module of their plugin
            CONFORMANCE[suite.axis].imports_no_engine(suite, module, do)
        alone.add(module)

    for record in plugins.records():
        settings: dict[str, Any] = {
            "plugin_name": record.name,
            "plugins": lambda self: plugins,
            "imports_no_engine": imports_no_engine,
        }
        if record.axis not in ("command", "check") and record.name not in plugins.distinct(record.axis):
            settings["pytestmark"] = [pytest.mark.full]  # a second name for a plugin that is tried under its first
        name = "Test_" + record.key.replace(".", "_").replace("-", "_")
        suites[name] = type(name, (CONFORMANCE[record.axis],), {**settings, "__module__": __name__})
    return suites


globals().update(_suites())


def test_every_axis_has_a_plugin_here() -> None:
    """The tests above are made from what is installed: nothing installed would be nothing tested."""
    assert {record.axis for record in PluginManager().records()} == set(CONFORMANCE)


@pytest.fixture(autouse=True)
def rank_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is built tells Lightning its rank; the tests after it are rank 0 again."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
