"""A strategy whose engine starts the ranks itself, as torch-xla does."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from lightning.fabric.plugins.environments import ClusterEnvironment

from fairlead import BuildContext, PluginManager, StrategyConfigBase, StrategyPlugin
from fairlead.testing import FakeEntryPoint, minimal_resolution
from fairlead_lightning.build import build_plugins


class MeshStrategyConfig(StrategyConfigBase):
    name: Literal["mesh"] = "mesh"


class Mesh(StrategyPlugin):
    config = MeshStrategyConfig
    runtime = f"{__name__}:build"
    starts_processes = True


def build(config: MeshStrategyConfig, context: BuildContext) -> Any:
    return SimpleNamespace()


@pytest.mark.parametrize(("world_size", "built"), [(1, True), (2, False)])
def test_a_strategy_that_starts_processes_gets_no_environment(world_size: int, built: bool) -> None:
    """It brings its own, where there is more than one rank; a third party's strategy says so by an attribute."""
    points = [*importlib.metadata.entry_points(group="fairlead"), FakeEntryPoint("strategy.mesh", Mesh())]
    plugins = PluginManager(points)
    resolution = minimal_resolution(plugins, accelerator="cpu")
    resolution = dataclasses.replace(resolution, strategy=MeshStrategyConfig(), world_size=world_size)
    made = build_plugins(BuildContext(resolution, {}, plugins))["plugins"]
    assert any(isinstance(plugin, ClusterEnvironment) for plugin in made) is built
