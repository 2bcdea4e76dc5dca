"""What is said of a fit whose memory ran out, where no plan can be made."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from fairlead import TrainerConfig
from fairlead.jobs import load_job
from fairlead.plugin_classes import CommandPlugin
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import resolve
from fairlead_lightning.lifecycle.failures import what_helps

broken = CommandPlugin("broken", "fails", arguments="x:y", runtime="x:y", out_of_memory=f"{__name__}:fails")


def fails(*_: Any) -> Any:
    raise ValueError("the model cannot be built again")


def lines(plugins: PluginManager, folder: Path) -> list[str]:
    (folder / "job.yaml").write_text("model: {class: 'm:M'}\n")
    loaded = load_job("job.yaml", plugins=plugins, cwd=folder, environ={})
    return list(what_helps(loaded, resolve(TrainerConfig(), environ={}, plugins=default_plugins()), plugins))


def test_without_the_plan_it_says_how_to_get_it(tmp_path: Path) -> None:
    (line,) = lines(PluginManager(entry_points=[]), tmp_path)
    assert "`fairlead plan` comes with pip install" in line
    assert "[plan]" in line


def test_a_plan_that_fails_does_not_hide_the_error(tmp_path: Path) -> None:
    plugins = PluginManager(entry_points=[EntryPoint("command.broken", f"{__name__}:broken", "fairlead")])
    assert lines(plugins, tmp_path) == [
        "`fairlead broken` cannot say by how much: ValueError: the model cannot be built again"
    ]
