"""The configs and plugins: torch-free, checked when they are read."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from pydantic import ValidationError

import fairlead_checkpoint_io
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead_checkpoint_io import (
    AsyncCheckpointIOConfig,
    DistributedCheckpointIOConfig,
    TorchCheckpointIOConfig,
    XLACheckpointIOConfig,
)


def test_every_backend_of_the_package_loads_and_bears_document_as_name() -> None:
    """One each for torch, async and xla, and one for shards."""
    manager = PluginManager()
    plugins = manager.loaded("checkpoint_io")
    assert {name: plugins[name].config for name in ("torch", "async", "distributed", "xla")} == {
        "torch": TorchCheckpointIOConfig,
        "async": AsyncCheckpointIOConfig,
        "distributed": DistributedCheckpointIOConfig,
        "xla": XLACheckpointIOConfig,
    }
    assert {alias for plugin in plugins.values() for alias in plugin.aliases} >= {
        "TorchCheckpointIOPlugin",
        "AsyncCheckpointIOPlugin",
        "XLACheckpointIOPlugin",
    }
    assert manager.record("checkpoint_io", "torch").available
    assert manager.record("checkpoint_io", "async").available


def test_face_is_sorted_and_complete() -> None:
    assert fairlead_checkpoint_io.__all__ == sorted(fairlead_checkpoint_io.__all__)
    assert all(hasattr(fairlead_checkpoint_io, name) for name in fairlead_checkpoint_io.__all__)


def test_configs_and_plugins_import_neither_torch_nor_lightning() -> None:
    modules = [
        point.value.partition(":")[0]
        for point in importlib.metadata.entry_points(group="fairlead")
        if point.value.startswith("fairlead_checkpoint_io.")
    ]
    assert len(modules) == 7
    code = f"import sys, {', '.join(modules)}\n"
    code += "print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_async_writes_through_any_backend_but_itself() -> None:
    config = parse_backend("checkpoint_io", {"name": "async", "inner": "xla"}, PluginManager())
    assert isinstance(config, AsyncCheckpointIOConfig)
    assert config.inner == XLACheckpointIOConfig()
    assert config.model_dump()["inner"] == {"name": "xla", "safe_globals": (), "verify": True}
    with pytest.raises(ValidationError, match="cannot write through itself"):
        parse_backend("checkpoint_io", {"name": "async", "inner": "async"}, PluginManager())
    with pytest.raises(ValidationError, match="name: distributed, background: true"):
        parse_backend("checkpoint_io", {"name": "async", "inner": "distributed"}, PluginManager())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "async", "max_in_flight": 0}, "greater than or equal to 1"),
        ({"name": "torch", "safe_globals": ["Namespace"]}, "not a name like argparse.Namespace"),
        ({"name": "distributed", "max_in_flight": 0}, "greater than or equal to 1"),
        ({"name": "distributed", "timeout": 0}, "greater than 0"),
        ({"name": "torch", "max_in_flight": 1}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse_backend("checkpoint_io", fields, PluginManager())


def test_a_yaml_list_of_names_is_accepted() -> None:
    config = parse_backend("checkpoint_io", {"name": "torch", "safe_globals": ["argparse.Namespace"]}, PluginManager())
    assert config == TorchCheckpointIOConfig(safe_globals=("argparse.Namespace",))
