"""What every package of the workspace has in common, and what its metadata promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
EXTRAS = (
    "check lightning slurm lsf kubeflow mpi xla deepspeed bitsandbytes torchao transformer-engine remote wandb "
    "tensorboard mlflow all"
)


def project(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(package: Path) -> list[Requirement]:
    table = project(package)
    lines = [
        *table["dependencies"],
        *(line for extra in table.get("optional-dependencies", {}).values() for line in extra),
    ]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_is_complete(package: Path) -> None:
    """A README, typing, the licence, tests and a changelog fragment or entry."""
    module = project(package)["name"].replace("-", "_")
    for name in ("README.md", "LICENSE", f"src/{module}/py.typed", f"src/{module}/__init__.py"):
        assert (package / name).is_file(), name
    assert (package / "LICENSE").read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert list((package / "tests").glob("test_*.py")), "no tests"
    fragments = list((ROOT / "changes").glob(f"*{package.name}*.md"))
    assert fragments or f"`{project(package)['name']}`" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_versions_are_in_lockstep() -> None:
    """All packages have one version, and require each other in exactly that."""
    versions = {project(package)["version"] for package in PACKAGES}
    assert len(versions) == 1
    [version] = versions
    siblings = {canonicalize_name(project(package)["name"]) for package in PACKAGES}
    for package in PACKAGES:
        for requirement in requirements(package):
            # The core's extras name the core's other extras without a version.
            if canonicalize_name(requirement.name) in siblings - {canonicalize_name(project(package)["name"])}:
                assert str(requirement.specifier) == f"=={version}", f"{package.name}: {requirement}"


def test_the_core_offers_the_documented_extras() -> None:
    """Users install through these names."""
    core = project(ROOT / "packages" / "core")
    assert sorted(core["optional-dependencies"]) == sorted(EXTRAS.split())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_lightning_is_required_in_a_safe_range(package: Path) -> None:
    """2.6.2 and 2.6.3 were malicious releases; 2.6.6 closes GHSA-qqmf-gpg7-g8gw."""
    for requirement in requirements(package):
        if requirement.name == "lightning":
            assert requirement.specifier.contains("2.6.6")
            assert not any(requirement.specifier.contains(bad) for bad in ("2.6.2", "2.6.3", "2.6.5", "2.7.0"))


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    """The README's second command is what CI runs, after it has installed what a bare machine lacks."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [command] = re.findall(r"^ *(python3\.11 -m venv \.venv && .*?)(?: *#.*)?$", script, re.MULTILINE)
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
