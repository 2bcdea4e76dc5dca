"""User code: found by a rule, checked by reading its source, built with errors that show only the user's frames."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.user_code import (
    CallableInfo,
    CodeRoot,
    Problem,
    check_spec,
    code_root,
    find_callable,
)

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="reads torch's source")
needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="reads Lightning's source")

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


def kinds(problems: list[Problem]) -> list[tuple[str, tuple[str | int, ...]]]:
    return [(problem.code, problem.path) for problem in problems]


def one(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


MODEL = """
    class Base:
        def __init__(self, layers: int, width: int = 8, *, lr: float = 1e-3, name: str = "x", tied: bool = False): ...
    class GPT(Base): ...
    def build(a, b=1, /, c=2): ...
    make = lambda depth: depth
    alias = GPT
    number = 3
    class Outer:
        class Inner:
            def __init__(self, size): ...
        @classmethod
        def small(cls, size=1): ...
"""


def test_a_misspelt_argument_is_named_with_what_was_meant(write: Write) -> None:
    """`layres` should be `layers`, said without importing anything."""
    root = write(app__init="raise RuntimeError", app__model=MODEL)
    assert check_spec("app.model:GPT", {"layers": 2, "lr": 1}, root) == []
    problem = one(check_spec("app.model:GPT", {"layres": 2}, root))
    assert (problem.code, problem.path, problem.fix) == ("argument-unknown", ("args", "layres"), "write 'layers'")
    missing = one(check_spec("app.model:GPT", {"width": 2}, root))
    assert (missing.code, missing.path) == ("argument-missing", ("args", "layers"))


@pytest.mark.parametrize(
    ("spec", "args", "expected"),
    [
        (
            "app.model:build",
            {"a": 1, "c": 2},
            [("argument-unknown", ("args", "a")), ("argument-missing", ("args", "a"))],
        ),
        ("app.model:make", {}, [("argument-missing", ("args", "depth"))]),
        ("app.model:alias", {"layers": 1}, []),
        ("app.model:number", {}, [("class-not-callable", ("class",))]),
        ("app.model", {}, [("class-not-callable", ("class",))]),
        ("app.model.GPT", {"layers": 1}, []),
        ("app.model:Outer.Inner", {"sise": 1}, [("argument-unknown", ("args", "sise"))]),
        ("app.model:Outer.small", {}, []),
        ("app.model:Outer.smal", {}, [("class-not-found", ("class",))]),
        ("app.model:GTP", {}, [("class-not-found", ("class",))]),
        ("app.modle:GPT", {}, [("module-not-found", ("class",))]),
        ("app/model.py:GPT", {}, [("module-not-found", ("class",))]),
        ("GPT", {}, [("module-not-found", ("class",))]),
        ("", {}, [("module-not-found", ("class",))]),
        ("a:b:c", {}, [("module-not-found", ("class",))]),
        ("math:sqrt", {"x": 1}, [("class-unchecked", ("class",))]),
        ("app.model:GPT", {"layers": "4"}, [("wrong-type", ("args", "layers"))]),
        ("app.model:GPT", {"layers": 4.0}, [("wrong-type", ("args", "layers"))]),
        ("app.model:GPT", {"layers": 1, "tied": "off"}, [("wrong-type", ("args", "tied"))]),
        ("app.model:GPT", {"layers": 1, "name": 1.0}, [("wrong-type", ("args", "name"))]),
        ("app.model:GPT", {"layers": 1, "lr": 1, "width": True, "name": None}, []),
    ],
)
def test_what_is_said_of_a_spec(write: Write, spec: str, args: dict[str, object], expected: object) -> None:
    root = write(app__init="raise RuntimeError", app__model=MODEL)
    assert kinds(check_spec(spec, args, root)) == expected


def test_what_was_meant_and_where_was_looked(write: Write, tmp_path: Path) -> None:
    root = write(app__init="", app__model=MODEL)
    assert one(check_spec("app.model:GTP", {}, root)).fix == "did you mean app.model:GPT?"
    problem = one(check_spec("app.modle:GPT", {}, root))
    assert problem.fix == "did you mean app.model?"
    assert f"{tmp_path} (the working directory)" in str(problem.why)
    assert "app.model:GPT" in str(one(check_spec("app/model.py:GPT", {}, root)).fix)


def test_nested_specs_are_checked_with_their_paths(write: Write) -> None:
    root = write(
        m="""
        class Block:
            def __init__(self, size): ...
        class Net:
            def __init__(self, blocks, table=None, args=None): ...
        """
    )
    block = {"class": "m:Block", "args": {"sise": 1}}
    args = {
        "blocks": [{"class": "m:Block", "args": {"size": {"class": "m:Blok"}}}, block],
        "table": {"k": {"deep": [block]}, "own": {"class": "dog", "weight": 2}, "odd": {"class": "m:Block", "arg": {}}},
        "args": {"class": "m:Block", "args": {"size": 1, "x": 2}},
    }
    assert kinds(check_spec("m:Net", args, root)) == [
        ("class-not-found", ("args", "blocks", 0, "args", "size", "class")),
        ("argument-unknown", ("args", "blocks", 1, "args", "sise")),
        ("argument-unknown", ("args", "table", "k", "deep", 0, "args", "sise")),
        ("argument-unknown", ("args", "table", "odd", "arg")),
        ("argument-missing", ("args", "table", "odd", "args", "size")),
        ("argument-unknown", ("args", "args", "args", "x")),
    ]
    assert kinds(check_spec("m:Block", {"size": {"class": "m:Net", "args": [1]}}, root))[0] == (
        "wrong-type",
        ("args", "size", "args"),
    )


def test_re_exports_are_followed(write: Write) -> None:
    root = write(
        app__init="from .nets import GPT as Model\nfrom .star import *\nfrom . import nets",
        app__nets="from app.deep.model import GPT",
        app__deep__init="raise SystemExit",
        app__deep__model=MODEL,
        app__star="from .deep.model import Outer",
        typed="""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from app.deep.model import GPT
        try:
            from app.deep.model import Base
        except ImportError:
            Base = None
        def __getattr__(name): ...
        """,
        circle="from circle2 import X",
        circle2="from circle import X",
        app__lazy="def __getattr__(name): ...",
        app__computed="GPT = object()\nglobals()['X'] = 1",
    )
    for spec in ("app:Model", "app:nets.GPT", "typed:GPT", "typed:Base"):
        assert kinds(check_spec(spec, {"layres": 1}, root)) == [("argument-unknown", ("args", "layres"))], spec
    assert kinds(check_spec("app:Outer.Inner", {"size": 1}, root)) == []
    for spec in ("circle:X", "typed:Anything", "app.lazy:Any", "app.computed:GPT", "app.computed:Y"):
        assert kinds(check_spec(spec, {"layres": 1}, root)) == [("class-unchecked", ("class",))], spec


def test_namespace_packages_and_symlinks(write: Write, tmp_path: Path) -> None:
    root = write(ns__inner__model=MODEL)
    (tmp_path / "linked").symlink_to(tmp_path / "ns")
    for spec in ("ns.inner.model:GPT", "linked.inner.model:GPT"):
        assert one(check_spec(spec, {"layres": 1}, root)).code == "argument-unknown"


def test_the_code_beside_the_job_file_is_found(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    for one in (folder, elsewhere):
        one.mkdir()
    (folder / "net.py").write_text("class Net: ...\n")
    job = folder / "job.yaml"
    for cwd, file in ((tmp_path, Path("jobs/job.yaml")), (folder, Path("job.yaml")), (elsewhere, job)):
        assert check_spec("net:Net", {}, code_root(file, code=None, cwd=cwd)) == []
    assert check_spec("net:Net", {}, code_root(job, code="../elsewhere", cwd=tmp_path)) == []
    (unfound,) = check_spec("net:Net", {}, code_root(job, code=["../elsewhere"], cwd=tmp_path))
    assert unfound.code == "module-not-found"
    assert unfound.fix is not None
    assert "netrc" not in unfound.fix  # a module of Python's own is no model


def test_archives_and_compiled_modules_are_not_known(write: Write, tmp_path: Path) -> None:
    write(m=MODEL)
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("zipped.py", "class C: ...")
    (tmp_path / "fast.so").touch()
    root = CodeRoot(((tmp_path, "the working directory"),), (tmp_path / "lib.zip",))
    assert kinds(check_spec("zipped:C", {}, root)) == [("class-unchecked", ("class",))]
    assert kinds(check_spec("fast:C", {}, root)) == [("class-unchecked", ("class",))]
    assert kinds(check_spec("m:GPT", {"layers": 1}, root)) == []


@pytest.mark.parametrize(
    "text",
    [
        "@wrapped\nclass C:\n  def __init__(self, a): ...",
        "class M(type): ...\nclass C(metaclass=M):\n  def __init__(self, a): ...",
        "class M(type): ...\nclass B(metaclass=M): ...\nclass C(B):\n  def __init__(self, a): ...",
        "try:\n  from nowhere_at_all import Base\nexcept ImportError: ...\nclass C(Base): ...",
        "class C(make()): ...",
        "class C(C): ...",
        "class A: ...\nclass C(A, A): ...",
        "class C:\n  @wrapped\n  def __init__(self, a): ...",
        "class C:\n  __init__ = make()",
        "class C:\n  def __new__(cls, *a): ...",
        "class C:\n  def __new__(cls, b): ...\n  def __init__(self, a): ...",
        "class B:\n  def __init_subclass__(cls): cls.__init__ = None\nclass C(B):\n  def __init__(self, a): ...",
        "class C(Exception): ...",
        "from enum import Enum\nclass C(Enum): ...",
        "import functools\nC = functools.partial(print)",
        "@wrapped\ndef C(a): ...",
        "if x:\n  class C:\n    def __init__(self, a): ...\nelse:\n  class C:\n    def __init__(self, b): ...",
        "class C: ...\ndel C",
        "for C in ():\n  pass",
        "def f():\n  global C\n  C = 1",
        "C: object",
        "def C(a): ...\nfrom _operator import *",
        "from pydantic import BaseModel\nclass B(BaseModel):\n  a: int\nclass C(B):\n  b: int = 3",
        "from typing import NamedTuple\nclass C(NamedTuple):\n  a: int\n  b: int = 1",
        "import attrs\n@attrs.define\nclass C:\n  a: int",
        "from dataclasses import dataclass\n@dataclass(init=False)\nclass C:\n  a: int",
        "from dataclasses import dataclass\n@dataclass\nclass B:\n  a: int\n@dataclass\nclass C(B):\n  b: int",
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n  a: int = field(init=False)",
        "from dataclasses import *\n@dataclass\nclass C:\n  a: InitVar[str]",
        "C = " + "(" * 300 + ")" * 300,
        "C = " + "-" * 50000 + "1",
        "import _operator as x\nC = " + ".a".join(["x"] * 3000),
    ],
)
def test_what_may_change_a_signature_makes_it_unknown_never_an_error(write: Write, text: str) -> None:
    """A job that is right is never refused."""
    problems = check_spec("m:C", {"anything": 1}, write(m=text))
    assert {problem.code for problem in problems} <= {"class-unchecked", "class-syntax"}
    assert problems


@pytest.mark.parametrize(
    ("text", "names", "required"),
    [
        ("class C: ...", "", ""),
        ("class C(made()):\n  def __init__(self, a, *, b=1): ...", "a b", "a"),
        (
            "import dataclasses as d\n@d.dataclass(frozen=True)\nclass C:\n  a: int\n  b: 'int' = 1\n"
            "  c: list = d.field(default_factory=list)\n  def f(self): ...",
            "a b c",
            "a",
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass C:\n  a: int\n  def __init__(self, z): ...", "z", "z"),
        (
            "import abc\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\nclass A(Generic[T], abc.ABC):\n"
            "  def __init__(self, a): ...\nclass B:\n  def __init__(self, b): ...\nclass C(A[int], B): ...",
            "a",
            "a",
        ),
        ("from typing import overload\n@overload\ndef C(a): ...\n@overload\ndef C(b): ...\ndef C(c): ...", "c", "c"),
    ],
)
def test_parameters(write: Write, text: str, names: str, required: str) -> None:
    info = find_callable("m:C", write(m=text))
    assert isinstance(info, CallableInfo), info
    assert info.signature is not None, info.unknown
    assert [*info.signature.parameters] == names.split()
    parameters = info.signature.parameters.values()
    assert [p.name for p in parameters if p.default is p.empty] == required.split()


def test_kwargs_accept_but_hint(write: Write) -> None:
    root = write(m="def f(layers, **kwargs): ...")
    assert check_spec("m:f", {"layers": 1, "colour": 2}, root) == []
    assert [(p.code, p.fix) for p in check_spec("m:f", {"layres": 1}, root)] == [
        ("class-unchecked", "did you mean 'layers'?")
    ]


@pytest.mark.parametrize("text", [b"def f(:\n", b"x = '\xff'\n", b"\0", b"# coding: nonsense\n"])
def test_a_file_that_does_not_parse_is_a_problem_with_its_place(write: Write, tmp_path: Path, text: bytes) -> None:
    root = write(bad=text, good="from bad import Base\nclass C(Base): ...")
    problem = one(check_spec("bad:f", {}, root))
    assert problem.code == "class-syntax"
    assert str(tmp_path / "bad.py") in problem.what
    assert one(check_spec("good:C", {"a": 1}, root)).code == "class-unchecked"


def test_a_very_large_file_and_a_long_chain(write: Write) -> None:
    branches = "".join(f"elif x == {i}:\n    y = {i}\n" for i in range(900))
    root = write(
        m="class C:\n    def __init__(self, a): ...\nif x:\n    pass\n" + branches, huge="# " + "x" * 7_000_000
    )
    assert one(check_spec("m:C", {"a": 1, "b": 2}, root)).code in ("argument-unknown", "class-unchecked")
    assert one(check_spec("huge:C", {}, root)).code == "class-unchecked"


@needs_torch
@needs_lightning
def test_torch_and_lightning_are_read_not_imported(write: Write, tmp_path: Path) -> None:
    """What torch's and Lightning's classes take is known without importing either."""
    write(
        app__init="import torch\nraise RuntimeError",
        app__model="""
        import lightning.pytorch as pl
        import torch
        from torch import nn
        class GPT(pl.LightningModule):
            def __init__(self, layers: int, width: int = 8): super().__init__()
        class Open(pl.LightningModule): ...
        class Head(nn.Linear): ...
        class Tuned(torch.optim.AdamW): ...
        """,
    )
    code = f"""
    import sys
    from pathlib import Path
    from fairlead.user_code import *
    root = code_root(None, code=None, cwd=Path({str(tmp_path)!r}))
    for spec, args in [
        ("app.model:GPT", {{"layres": 1}}),
        ("app.model:Open", {{"x": 1}}),
        ("app.model:Head", {{"in_feature": 1, "out_features": 2}}),
        ("torch.nn:Linear", {{"in_features": 1, "out_features": 2, "bais": True}}),
        ("torch.nn:Linaer", {{}}),
        ("torch.nn.modules.linear.Linear", {{"in_features": 1}}),
        ("app.model:Tuned", {{"params": 1, "lrr": 2}}),
        ("lightning.pytorch:LightningModule", {{}}),
        ("torch.utils.data:DataLoader", {{"dataset": 1, "batchsize": 2}}),
    ]:
        print([(p.code, p.path[-1], p.fix) for p in check_spec(spec, args, root)])
    assert not {{"torch", "lightning", "numpy", "app"}} & set(sys.modules), "imported"
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "[('argument-unknown', 'layres', \"write 'layers'\")]",
        "[]",
        "[('argument-unknown', 'in_feature', \"write 'in_features'\")]",
        "[('argument-unknown', 'bais', \"write 'bias'\")]",
        "[('class-not-found', 'class', 'did you mean torch.nn:Linear?')]",
        "[('argument-missing', 'out_features', 'give out_features (int) in args')]",
        "[('argument-unknown', 'lrr', \"write 'lr'\")]",
        "[]",
        "[('argument-unknown', 'batchsize', \"write 'batch_size'\")]",
    ]


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["app.model:GPT", "m:C"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["class", "args", "layers", "x"]) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec=st.sampled_from(["app.model:GPT", "app.model:build"]) | st.text(max_size=12),
    args=st.dictionaries(st.text(max_size=5), json),
)
def test_any_arguments_give_problems_never_a_traceback(write: Write, spec: str, args: dict[str, object]) -> None:
    """Random structures."""
    root = write(app__init="raise RuntimeError", app__model=MODEL)
    for problem in check_spec(spec, args, root):
        assert problem.path[:1] in [("class",), ("args",)]


def test_deep_and_endless_arguments(write: Write) -> None:
    root = write(app__model=MODEL)
    loop: dict[str, object] = {}
    loop["x"] = loop
    assert ("class-unchecked") in {p.code for p in check_spec("app.model:GPT", {"layers": 1, "width": loop}, root)}


def test_a_file_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    root = write(m=MODEL)
    (tmp_path / "m.py").chmod(0)
    user = os.geteuid()
    with contextlib.ExitStack() as stack:
        if user == 0:
            tmp_path.chmod(0o755)
            os.seteuid(65534)
            stack.callback(os.seteuid, 0)
        assert one(check_spec("m:GPT", {}, root)).code in ("class-unchecked", "module-not-found")


def test_engines_that_are_absent_by_design_are_not_known(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node with `fairlead[check]`; a module of the user's own that is not there is still an error."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lightning", "torch")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have imported it, or made one up
    root = dataclasses.replace(write(m="class C: ..."), installed=())
    for spec in ("lightning.pytorch.callbacks:EarlyStopping", "torch.nn:Linear"):
        problem = one(check_spec(spec, {}, root))
        assert problem.code == "class-unchecked", problem
        assert "not installed here" in str(problem.why), problem
    assert one(check_spec("n:C", {}, root)).code == "module-not-found"
