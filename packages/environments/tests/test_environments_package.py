"""Every environment has the same shape, is documented, and costs nothing until it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fairlead_environments
from fairlead import EnvironmentConfigBase, EnvironmentPlugin, PluginManager, RequeuePlugin, Topology
from fairlead.interfaces import Setting

NAMES = ("kubeflow", "kubernetes", "lightning", "lsf", "manual", "mpi", "slurm", "torchelastic", "xla")
PACKAGE = Path(fairlead_environments.__file__).parent


def plugin(name: str, plugins: PluginManager) -> EnvironmentPlugin:
    found = plugins.get("environment", name)
    assert isinstance(found, EnvironmentPlugin)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_keeps_the_contract(name: str, plugins: PluginManager) -> None:
    """Each environment has a config, a runtime, and document A's name where that knows it."""
    found = plugin(name, plugins)
    assert issubclass(found.config, EnvironmentConfigBase)
    assert found.config.__name__ in fairlead_environments.__all__
    assert found.config.model_validate({}).name == name
    in_document_a = name != "kubernetes"
    assert found.aliases == ((found.config.__name__.replace("Config", "Plugin"),) if in_document_a else ())
    assert found.requeue in {"slurm", "lsf", "exit_code", "none"}
    assert issubclass(type(found), EnvironmentPlugin)
    assert not isinstance(found, RequeuePlugin)
    assert all(explanation.endswith(".") for explanation in found.codes.values())
    # The hooks are there, and an empty mapping is nothing to fail on.
    assert len(plugins.call(found, "fairlead_detect", environ={})) == (1 if name == "lightning" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_is_documented(name: str, plugins: PluginManager) -> None:
    """Class, hooks, config and every field of its own say what they are; the README names it."""
    found = plugin(name, plugins)
    assert type(found).__doc__
    for attribute, hook in vars(type(found)).items():
        assert attribute.startswith("__") or not callable(hook) or hook.__doc__
    assert found.config.__doc__
    assert ">>>" in found.config.__doc__
    assert all(field.description for field in found.config.model_fields.values() if field.default != name)
    assert f"`{name}`" in (PACKAGE.parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_runtime_can_be_imported_and_called(name: str, plugins: PluginManager) -> None:
    runtime = plugin(name, plugins).runtime
    assert runtime is not None
    module, _, function = runtime.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_face_is_sorted_and_complete() -> None:
    assert fairlead_environments.__all__ == sorted(fairlead_environments.__all__)
    assert all(hasattr(fairlead_environments, name) for name in fairlead_environments.__all__)


def test_detection_imports_neither_torch_nor_lightning_nor_numpy() -> None:
    """ARCHITECTURE rule 1, for all of them: loading, detecting, checking topologies."""
    code = (
        "import sys\n"
        "from fairlead import PluginManager; from fairlead.detect import choose_environment\n"
        "plugins = PluginManager(); choose_environment('auto', {}, plugins)\n"
        "assert all(r.error is None for r in plugins.records('environment', load=True))\n"
        "print(sorted({'torch', 'lightning', 'numpy', 'mpi4py', 'torch_xla'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_small_and_only_runtimes_import_engines(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 350
    if not path.stem.endswith("runtime"):
        assert not any(
            line.startswith(("import torch", "import lightning", "from torch", "from lightning."))
            for line in source.splitlines()
        )
    assert "os.environ[" not in source


def test_every_value_of_a_topology_has_a_reason(plugins: PluginManager) -> None:
    """`explain` shows where each number comes from."""
    found = plugins.call(
        plugin("manual", plugins),
        "fairlead_topology",
        config=fairlead_environments.ManualEnvironmentConfig(),
        environ={"MASTER_ADDR": "a", "NODE_RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "NNODES": "2"},
    )[0]
    assert isinstance(found, Topology)
    for name in Topology.__slots__:
        value = getattr(found, name)
        assert name in {"launched", "start"} or (isinstance(value, Setting) and value.reason), name
