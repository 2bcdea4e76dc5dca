"""Where user code is found, and building it: the part that imports, with errors that show only the user's frames."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.errors import ConfigError, UserCodeError
from fairlead.user_code import (
    CodeRoot,
    activate,
    check_spec,
    code_root,
    import_callable,
    instantiate,
)

Write = Callable[..., CodeRoot]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files and returns the root that finds them."""

    def _write(**files: str | bytes) -> CodeRoot:
        for name, text in files.items():
            file = tmp_path / (name.replace("__", "/") + ".py").replace("/init.py", "/__init__.py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return code_root(None, code=None, cwd=tmp_path)

    return _write


@pytest.fixture
def fresh_imports() -> Iterator[None]:
    """Real imports, undone afterwards."""
    path, modules = [*sys.path], set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


# Where code is found


def test_the_project_of_the_job_file_comes_first_then_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "p" / "jobs").mkdir(parents=True)
    (tmp_path / "p" / "src").mkdir()
    (tmp_path / "p" / ".git").touch()  # a worktree has a file
    (tmp_path / "cwd").mkdir()
    root = code_root(Path("../p/jobs/job.yaml"), code=None, cwd=tmp_path / "cwd")
    assert [(str(f.relative_to(tmp_path)), reason) for f, reason in root.searched] == [
        ("p", "the .git above the job file"),
        ("p/src", "src/ of the .git above the job file"),
        ("cwd", "the working directory"),
        ("p/jobs", "the job file's folder"),
    ]
    (tmp_path / "p" / "jobs" / "pyproject.toml").touch()
    assert code_root(tmp_path / "p/jobs/job.yaml", code=None, cwd=tmp_path / "cwd").folders[0] == tmp_path / "p/jobs"


def test_run_code_is_relative_to_the_job_file_and_replaces_the_project(tmp_path: Path) -> None:
    (tmp_path / "p" / "lib").mkdir(parents=True)
    (tmp_path / "p" / "pyproject.toml").touch()
    job = tmp_path / "p" / "job.yaml"
    assert code_root(job, code="lib", cwd=tmp_path).folders == (tmp_path / "p" / "lib", tmp_path, tmp_path / "p")
    listed = code_root(job, code=["lib", str(tmp_path / "p")], cwd=tmp_path / "cwd")  # all of them, and nothing else
    assert listed.folders == (tmp_path / "p" / "lib", tmp_path / "p")
    with pytest.raises(ConfigError, match="does not exist") as info:
        code_root(job, code="libb", cwd=tmp_path)
    assert (info.value.where, info.value.fix) == ("run.code", "did you mean lib?")
    with pytest.raises(ConfigError, match="not a folder"):
        code_root(job, code="pyproject.toml", cwd=tmp_path)


def test_the_folder_of_a_console_script_is_never_user_code(
    tmp_path: Path, fresh_imports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = sysconfig.get_path("scripts")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [scripts, "", sysconfig.get_path("stdlib")])
        root = code_root(None, code=None, cwd=tmp_path)
    assert root.folders == (tmp_path,)
    assert root.installed == (Path(sysconfig.get_path("stdlib")),)
    sys.path.insert(0, scripts)
    activate(root)
    assert sys.path[0] == str(tmp_path)
    assert scripts not in sys.path
    before = [*sys.path]
    activate(root)
    assert sys.path == before


# Building it


def failure(call: Callable[[], object]) -> UserCodeError:
    with pytest.raises(UserCodeError) as info:
        call()
    return info.value


def test_nested_specs_are_built(write: Write, fresh_imports: None) -> None:
    root = write(
        built__init="",
        built__model="""
        class Block:
            def __init__(self, size=1): self.size = size
        class Net:
            def __init__(self, blocks, table): self.blocks, self.table = blocks, table; table.clear()
        """,
    )
    node = {
        "class": "built:model.Net",
        "args": {
            "blocks": [{"class": "built.model.Block", "args": {"size": 3}}],
            "table": {"a": {"class": "dog", "b": 1}},
        },
    }
    net = instantiate(node, root)
    assert [block.size for block in net.blocks] == [3]  # type: ignore[attr-defined]
    assert node["args"]["table"] == {"a": {"class": "dog", "b": 1}}  # type: ignore[index]
    loop: dict[str, object] = {}
    loop["x"] = loop
    with pytest.raises(ConfigError, match="nested"):
        instantiate({"class": "built.model:Block", "args": {"size": loop}}, root)
    with pytest.raises(ConfigError, match="args"):
        instantiate({"class": "built.model:Block", "arg": {}}, root)


def test_errors_show_only_the_frames_of_the_user(write: Write, tmp_path: Path, fresh_imports: None) -> None:
    root = write(
        raises="def helper():\n    raise ValueError('no data here')\nhelper()",
        needs="import a_package_that_is_not_there",
        wrong="def f(:",
        leaves="raise SystemExit(3)",
        fine="""
        class C:
            def __init__(self, a=1):
                if a != 1:
                    raise RuntimeError("a is bad")
        value = 3
        """,
    )
    error = failure(lambda: import_callable("raises:X", root, where="model.class"))
    assert isinstance(error.__cause__, ValueError)
    assert error.where == "model.class"
    assert "no data here" in str(error.why)
    files = [line for line in str(error.why).splitlines() if line.strip().startswith("File ")]
    assert len(files) == 2
    assert all(str(tmp_path / "raises.py") in line for line in files)

    error = failure(lambda: import_callable("needs:X", root))
    assert "importing needs failed" in error.what
    assert "a_package_that_is_not_there" in str(error.why)
    assert "wrong.py" in str(failure(lambda: import_callable("wrong:f", root)).why)
    assert isinstance(failure(lambda: import_callable("leaves:f", root)).__cause__, SystemExit)
    assert failure(lambda: import_callable("fien:C", root)).fix == "did you mean fine?"
    assert failure(lambda: import_callable("fine:c", root)).fix == "did you mean 'C'?"
    assert "module:object" in str(failure(lambda: import_callable("fine", root)).fix)

    error = failure(lambda: instantiate({"class": "fine:C", "args": {"a": 2}}, root, path=("trainer", "callbacks", 0)))
    assert error.where == "trainer.callbacks.0"
    assert "a is bad" in str(error.why)
    assert "build.py" not in str(error.why)
    assert "unexpected keyword" in str(failure(lambda: instantiate({"class": "fine:C", "args": {"b": 2}}, root)).why)
    assert "int" in str(failure(lambda: instantiate({"class": "fine:value"}, root)).why)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    args=st.dictionaries(st.sampled_from(["layers", "width", "lr", "zz"]), st.integers() | st.booleans(), max_size=4)
)
def test_check_agrees_with_python(write: Write, fresh_imports: None, args: Mapping[str, object]) -> None:
    """A certain problem exactly when the constructor refuses."""
    root = write(agree__model="class GPT:\n    def __init__(self, layers, width=8, *, lr=1e-3): ...")
    failed = False
    try:
        instantiate({"class": "agree.model:GPT", "args": args}, root)
    except UserCodeError:
        failed = True
    assert bool(check_spec("agree.model:GPT", args, root)) == failed
