"""The public face: what `import fairlead` gives, and what it costs."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

import fairlead
from fairlead.errors import MissingDependencyError
from fairlead.install import install_line


def modules_after(code: str) -> set[str]:
    """The modules that a fresh process has after running the code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_public_names_are_sorted_and_there() -> None:
    assert fairlead.__all__ == sorted(fairlead.__all__)
    assert dir(fairlead) == fairlead.__all__
    for name in set(fairlead.__all__) - {"Fairlead", "Run", "Stopped", "Trainer", "fabric"}:
        assert getattr(fairlead, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        _ = fairlead.Trianer


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(fairlead.__path__, "fairlead.")])
def test_every_module_declares_its_public_names_sorted(name: str) -> None:
    module = importlib.import_module(name)
    if name.rpartition(".")[2] == "__main__" or not hasattr(module, "__all__"):
        return
    assert list(module.__all__) == sorted(module.__all__, key=isort_order), name
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.{public}"


def isort_order(name: str) -> tuple[int, str]:
    """Constants, classes, functions: the order that the linter keeps."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def test_import_is_slim() -> None:
    """Rule 1: `import fairlead` needs nothing but the standard library; every module of the core no torch."""
    assert not modules_after("import fairlead") & {"torch", "lightning", "numpy", "pydantic", "yaml", "pluggy"}


def test_no_module_of_the_core_imports_an_engine() -> None:
    """Rule 1, for all modules together; the fixtures may import pytest, nothing else may."""
    names = [m.name for m in pkgutil.walk_packages(fairlead.__path__, "fairlead.") if "__main__" not in m.name]
    loaded = modules_after("import importlib\n" + "".join(f"importlib.import_module({n!r})\n" for n in names))
    assert not loaded & {"torch", "lightning", "numpy", "fairlead_lightning", "fairlead_distributed"}
    others = [n for n in names if n != "fairlead.testing.fixtures"]
    assert "pytest" not in modules_after(
        "import importlib\n" + "".join(f"importlib.import_module({n!r})\n" for n in others)
    )


def test_pytest_pays_little_for_the_fixtures() -> None:
    """Every project with fairlead and pytest loads them."""
    assert "pydantic" not in modules_after("import fairlead.testing.fixtures")


def test_trainer_without_lightning_gives_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fairlead_lightning", None)
    with pytest.raises(MissingDependencyError) as caught:
        _ = fairlead.Trainer
    assert caught.value.fix == install_line("lightning")


def test_a_defect_in_the_lightning_package_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'somebody_else'", name="somebody_else")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="somebody_else"):
        _ = fairlead.Trainer
