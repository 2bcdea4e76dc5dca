"""What the tests of the environments share: recorded environments, and the choice between all of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fairlead import PluginManager, Topology
from fairlead.detect import ChosenEnvironment, choose_environment

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture(scope="session")
def plugins() -> PluginManager:
    """Our plugins, without the examples of third parties that may be installed beside them."""
    points = importlib.metadata.entry_points(group="fairlead")
    needed = ("environments", "strategies", "precision", "checkpoint_io", "hpc_signals", "lightning.accelerators")
    ours = tuple(f"fairlead_{name}." for name in needed)
    return PluginManager(point for point in points if point.value.startswith(ours))


@pytest.fixture(scope="session")
def recorded() -> Callable[[str], dict[str, str]]:
    """Reads a recorded environment, such as `slurm/srun.direct.0`."""

    def read(name: str) -> dict[str, str]:
        lines = (RECORDED / name).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    return read


@pytest.fixture(scope="session")
def choose(plugins: PluginManager) -> Callable[[Mapping[str, str]], ChosenEnvironment]:
    """The environment that is chosen for these variables when the config says `auto`."""
    return lambda environ: choose_environment("auto", environ, plugins)


@pytest.fixture(scope="session")
def ranks() -> Callable[[Topology], tuple[object, ...]]:
    """(nodes, ranks here, ranks in all, node rank, local rank, global rank) without their reasons."""
    names = ("num_nodes", "local_world_size", "world_size", "node_rank", "local_rank", "global_rank")

    def values(topology: Topology) -> tuple[object, ...]:
        settings = (getattr(topology, name) for name in names)
        return tuple(None if setting is None else setting.value for setting in settings)

    return values
