"""What every package of the workspace has in common, and what its metadata promises."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fairlead.engines import ENGINES

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
EXTRAS = (
    "check torch huggingface lightning slurm lsf kubeflow mpi xla deepspeed bitsandbytes torchao transformer-engine "
    "remote wandb tensorboard mlflow onnx plan prometheus otel new report all"
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
    versions = {project(package)["version"] for package in (ROOT, *PACKAGES)}
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
            assert not any(requirement.specifier.contains(bad) for bad in ("2.6.2", "2.6.3", "2.6.5"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_versions_of_engines_are_those_of_the_one_table(package: Path) -> None:
    """`fairlead.engines` says which versions a plugin accepts; what pip installs is declared alike."""
    table = project(package)
    extras: list[list[str]] = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
    ours = {canonicalize_name(project(one)["name"]) for one in PACKAGES}
    own = {"pydantic", "pluggy", "pyyaml", "packaging", "jinja2"}  # what the torch-free packages are made of
    for extra in extras:
        found = {canonicalize_name(line.name): line for line in map(Requirement, extra)}
        paired = {ENGINES[name].paired for name in found if name in ENGINES}
        for name, line in found.items():
            if name not in ours | own and name not in paired:  # which has the range of the other, see below
                assert line.specifier == Requirement(ENGINES[name].requirement).specifier, line


def test_an_engine_comes_with_the_torch_that_it_is_built_for() -> None:
    """torch-xla declares no torch, and cannot be imported with another minor version."""
    lines = project(ROOT / "packages" / "strategies")["optional-dependencies"]["xla"]
    found = {line.name: line for line in map(Requirement, lines)}
    assert found["torch"].specifier == found["torch-xla"].specifier


def test_the_pins_are_tested_versions() -> None:
    """What the tests of every day run with is in the table; so is the torch of `oldest` and `newest`."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    for engine in ENGINES.values():
        assert pinned[canonicalize_name(engine.name)] in engine.tested, engine.name
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert f'OLDEST = "{ENGINES["torch"].tested[0]}"' in noxfile
    assert f'NEWEST = "{ENGINES["torch"].tested[-1]}"' in noxfile


def test_all_holds_what_can_be_installed_together() -> None:
    """Not the extras that need an older torch, CUDA or an MPI library."""
    core = project(ROOT / "packages" / "core")["optional-dependencies"]
    [line] = [Requirement(one) for one in core["all"]]
    apart = {"check", "torch", "lightning", "all", "mpi", "xla", "transformer-engine"}
    assert line.extras == set(core) - apart


@pytest.mark.parametrize("extra", ["", *EXTRAS.split()])
def test_a_clone_installs_its_own_packages(extra: str) -> None:
    """Every package that an extra leads to is named with its folder: pip asks no index for it."""
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    packages = {project(package)["name"]: (package, project(package)) for package in PACKAGES}
    found = {line.name: line for line in map(Requirement, hook["requirements"](packages, extra))}
    assert all(str(line.url).partition("?")[0] == packages[name][0].as_uri() for name, line in found.items())
    assert found["fairlead"].extras == ({extra} if extra else set())
    assert ("fairlead-runs" in found) == bool(extra)
    assert ("fairlead-distributed" in found) == (extra not in {"", "check", "new", "report"})  # it requires torch


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    """The README's second command is what CI runs, after it has installed what a bare machine lacks."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [command] = re.findall(r"^ *(python3\.11 -m venv \.venv && .*?)(?: *#.*)?$", script, re.MULTILINE)
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_what_pip_keeps_of_a_package_is_of_its_content(tmp_path: Path) -> None:
    """pip 23.2 takes `checkpoint-io` for a release, and would install what it has built before a `git pull`."""
    address = runpy.run_path(str(ROOT / "hatch_build.py"))["address"]
    for name in ("runs", "checkpoint-io"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").touch()
    code = tmp_path / "checkpoint-io" / "src" / "module.py"
    code.write_text("one = 1\n")
    before = address(code.parents[1])
    assert address(code.parents[1]) == before
    code.write_text("one = 2\n")
    assert address(code.parents[1]) != before
    assert address(tmp_path / "runs") == (tmp_path / "runs").as_uri()  # which pip never keeps
