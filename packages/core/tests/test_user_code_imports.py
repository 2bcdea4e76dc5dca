"""What a check says of the user's imports, of numbers without annotation, and where it looks for code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from fairlead.user_code import check_spec, code_root

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="nothing is known without torch")

NET = "class Net:\n    def __init__(self, width=8): ...\n"


def said(tmp_path: Path, files: dict[str, str], spec: str = "net:Net", **args: object) -> list[tuple[str, str]]:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
    root = code_root(None, code=None, cwd=tmp_path)
    return [(one.code, f"{one.what}; {one.why}; {one.fix}") for one in check_spec(spec, args, root)]


@needs_torch
@pytest.mark.parametrize(
    ("files", "spec", "code", "words"),
    [
        ({"net.py": f"import os\nimport nowhere_at_all\n{NET}"}, "net:Net", "module-not-found", "net.py:2; install it"),
        ({"net.py": f"from torchh import nn\n{NET}"}, "net:Net", "module-not-found", "did you mean torch?"),
        # By a module of the user's that it imports, by its package, relatively, and a name of it.
        (
            {"net.py": f"import layers\n{NET}", "layers.py": "\nimport nowhere_at_all"},
            "net:Net",
            "module-not-found",
            "layers.py:2",
        ),
        (
            {"app/__init__.py": "import nowhere_at_all", "app/net.py": NET},
            "app.net:Net",
            "module-not-found",
            "__init__.py:1",
        ),
        (
            {"app/__init__.py": "", "app/layers.py": "", "app/net.py": f"from .layerz import Block\n{NET}"},
            "app.net:Net",
            "module-not-found",
            "did you mean app.layers?",
        ),
        (
            {"net.py": f"from layers import Blok\n{NET}", "layers.py": "class Block: ..."},
            "net:Net",
            "class-not-found",
            "did you mean 'Block'?",
        ),
    ],
)
def test_an_import_that_fails_has_file_and_line(
    tmp_path: Path, files: dict[str, str], spec: str, code: str, words: str
) -> None:
    ((found, text),) = said(tmp_path, files, spec)
    assert found == code
    assert words in text


@needs_torch
@pytest.mark.parametrize(
    "head",
    [
        "try:\n    import nowhere_at_all\nexcept ImportError:\n    pass\n",
        "def later():\n    import nowhere_at_all\n",
        "import sys\nsys.path.append('elsewhere')\nimport nowhere_at_all\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nowhere_at_all\n",
        "from layers import made\n",
        "import torch.nn.functional as F, os.path\nfrom torch._C import Size\nfrom xml import dom\nimport app.part\n",
        "import net\nfrom app import part, something\n",
    ],
)
def test_what_may_work_is_no_error(tmp_path: Path, head: str) -> None:
    files = {"layers.py": "globals()['made'] = 1", "app/__init__.py": "something = 1", "app/part.py": "import app\n"}
    assert said(tmp_path, {**files, "net.py": head + NET}) == []


BODY = """
    class Net:
        def __init__(self, lr=1e-3, width=8, padding=0, scale=2.0, depth=3, warm=0.1):
            self.lr, self.scale = lr, scale
            self.inner = width // 2
            self.padding = padding
            if warm == "auto":
                warm = 0.2

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=self.lr / 2, depth=float(self.depth))
"""


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        ({"lr": "fast"}, "write a number, as lr: 0.001"),
        ({"width": "wide"}, "write a number, as width: 8"),
        ({"scale": "large"}, "write a number, as scale: 2.0"),
        ({"padding": "same"}, None),
        ({"warm": "auto"}, None),
        ({"depth": "7"}, None),
        ({"lr": 1, "width": 2.5}, None),
    ],
)
def test_text_where_the_source_computes(tmp_path: Path, args: dict[str, Any], fix: str | None) -> None:
    found = said(tmp_path, {"net.py": BODY}, **args)
    assert [code for code, _ in found] == (["wrong-type"] if fix else [])
    assert all(text.endswith(str(fix)) for _, text in found)


def test_the_code_beside_the_job_file_is_found(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    for one in (folder, elsewhere):
        one.mkdir()
    (folder / "net.py").write_text(NET)
    job = folder / "job.yaml"
    for cwd, file in ((tmp_path, Path("jobs/job.yaml")), (folder, Path("job.yaml")), (elsewhere, job)):
        assert check_spec("net:Net", {}, code_root(file, code=None, cwd=cwd)) == []
    assert check_spec("net:Net", {}, code_root(job, code="../elsewhere", cwd=tmp_path)) == []
    (unfound,) = check_spec("net:Net", {}, code_root(job, code=["../elsewhere"], cwd=tmp_path))
    assert unfound.code == "module-not-found"
    assert unfound.fix is not None
    assert "netrc" not in unfound.fix  # a module of Python's own is no model
