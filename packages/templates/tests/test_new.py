"""`fairlead new`: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead import yaml
from fairlead.cli import main
from fairlead.config import JobConfig
from fairlead.plugin_classes import AXIS_PLUGINS
from fairlead.plugins import PluginManager
from fairlead_templates.axes import AXES

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in an empty folder; its exit code, and what it says."""

    def run(*words: str) -> tuple[int, str]:
        code = main(["new", *words], plugins=PluginManager(), environ={}, cwd=tmp_path)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_there_is_a_template_for_each_axis() -> None:
    assert AXES.keys() == AXIS_PLUGINS.keys()


@pytest.mark.parametrize("axis", AXES)
def test_a_plugin_has_the_given_names(new: Run, tmp_path: Path, axis: str) -> None:
    """Python that parses, an entry point that names what is there, and no name that was left open."""
    code, said = new("plugin", "my-own", "--axis", axis)
    assert code == 0, said
    folder = tmp_path / "fairlead-my-own"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "fairlead-my-own"
    points = project["entry-points"]["fairlead"]
    assert f"{axis}.my_own" in points
    for value in points.values():
        module, _, name = value.partition(":")
        tree = ast.parse((folder / "src" / (module.replace(".", "/") + ".py")).read_text())
        assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
        assert name in [ast.unparse(target) for targets in assigned for target in targets]
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        text = file.read_text()
        assert file.suffix == ".j2" or "{{" not in text
        if file.suffix == ".py":
            ast.parse(text)
    assert (folder / "tests" / "test_my_own.py").exists()
    assert "pip install -e fairlead-my-own" in said


def test_a_job(new: Run, tmp_path: Path) -> None:
    code, said = new("job", "first", "-o", "here")
    assert (code, said.splitlines()[-1]) == (0, "next: fairlead fit here/job.yaml")
    job = JobConfig.model_validate(yaml.load_file(tmp_path / "here" / "job.yaml").data)
    assert (job.run.name, job.model.class_) == ("first", "net:Net")
    assert {file.name for file in (tmp_path / "here").iterdir()} == {"job.yaml", "net.py"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plugin", "Mine", "--axis", "logger"), "'Mine' is no name"),
        (("plugin", "class", "--axis", "logger"), "'class' is no name"),
        (("plugin", "class", "--axis", "logger"), "it is a Python keyword"),
        (("plugin", "Foo-Bar", "--axis", "logger"), "as `foo_bar`"),
        (("plugin", "../x", "--axis", "logger"), "is no name"),
        (("plugin", "mine", "--axis", "logger", "--class-name", "mine"), "'mine' is no class's name"),
        (("plugin", "slurm", "--axis", "environment"), "there is a plugin environment.slurm"),
        (("plugin", "runs", "--axis", "logger"), "would be in the way of fairlead_runs"),
        (("plugin", "lsf", "--axis", "requeue"), "there is a plugin requeue.lsf"),
        (("plugin", "mine", "--axis", "loger"), "invalid choice: 'loger'"),
        (("job", "there"), "it exists already"),
    ],
)
def test_what_is_refused_leaves_nothing(new: Run, tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    (tmp_path / "there").mkdir()
    code, said = new(*words)
    assert (code, told in said) == (2, True), said
    assert [file.name for file in tmp_path.iterdir()] == ["there"]
