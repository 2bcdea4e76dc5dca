"""What `fairlead new` makes: the code of the worked examples and of the pages, which passes the suites and trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from fairlead.cli import main
from fairlead.plugins import PluginManager
from fairlead_templates.axes import AXES
from integration_tests.isolated.tutorial import write_tutorial
from integration_tests.jobs import fairlead

PLUGINS = Path(__file__).parent.parent / "examples" / "plugins"
EXAMPLES = {  # the names of an axis's worked example, its project, and its files by what their names end with
    "accelerator": ("numa", "Numa", "numerics", {".py": "numa.py", "_runtime.py": "numa_runtime.py"}),
    "strategy": ("localsgd", "LocalSGD", "localsgd", {".py": "localsgd.py", "_runtime.py": "localsgd_runtime.py"}),
    "precision": ("tf32", "TF32", "numerics", {".py": "tf32.py"}),
    "layer_sync": (
        *("frozen_batchnorm", "FrozenBatchNorm", "numerics"),
        {".py": "frozen_batchnorm.py", "_runtime.py": "frozen_batchnorm_runtime.py"},
    ),
    "environment": ("pbs", "PBS", "pbs", {".py": "pbs.py"}),
    "requeue": ("spool", "Spool", "site", {".py": "spool.py"}),
    "checkpoint_io": (
        *("npy", "Npy", "npy"),
        {".py": "npy.py", "_format.py": "npy_format.py", "_runtime.py": "npy_runtime.py"},
    ),
    "submitter": ("sge", "SGE", "sge", {".py": "qsub.py"}),
    "logger": ("jsonl", "JSONL", "site", {".py": "jsonl.py", "_runtime.py": "jsonl_runtime.py"}),
    "command": ("disk", "Disk", "site", {".py": "disk.py"}),
    "check": ("scratch", "Scratch", "site", {".py": "scratch.py"}),
}


def new(folder: Path, *words: str) -> None:
    # Without the examples: their names are taken where they are installed, or another test has imported them.
    places = [place for place in sys.path if str(PLUGINS) not in place]
    modules = {name: one for name, one in sys.modules.items() if str(PLUGINS) not in str(getattr(one, "__file__", ""))}
    with mock.patch.object(sys, "path", places), mock.patch.object(sys, "modules", modules):
        assert main(["new", *words], plugins=PluginManager(), environ={}, cwd=folder) == 0


@pytest.mark.parametrize("axis", AXES)
def test_a_template_is_the_worked_example_of_its_axis(tmp_path: Path, axis: str) -> None:
    """By its name, the same file: who reads an example, or the page, reads what `fairlead new` makes."""
    tag, name, project, files = EXAMPLES[axis]
    new(tmp_path, "plugin", tag, "--axis", axis, "--class-name", name, "-o", "made")
    source = PLUGINS / project / "src" / f"fairlead_{project}"
    for suffix, file in files.items():
        text = (source / file).read_text()
        if axis == "submitter":  # of a project that has an environment besides
            text = text.replace("fairlead_sge.qsub", "fairlead_sge.sge").replace("\nqsub =", "\nsge =")
        made = tmp_path / "made" / "src" / f"fairlead_{tag}"
        assert (made / f"{tag}{suffix}").read_text() == text.replace(f"fairlead_{project}", f"fairlead_{tag}")
    for data in (*made.glob("*.nodefile"), *made.glob("*.j2")):
        assert data.read_text() == (source / data.name).read_text()


def test_the_page_on_plugins_shows_what_its_command_makes(tmp_path: Path) -> None:
    page = (PLUGINS.parents[1] / "docs" / "write-a-plugin.md").read_text()
    [line] = re.findall(r"^fairlead new (.*)$", page, re.MULTILINE)
    new(tmp_path, *line.split())
    shown = re.findall(r"^```(?:python|toml) title=\"(.*?)\"\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    for title, text in shown:
        assert (tmp_path / "fairlead-localsgd" / title).read_text() == text, title


def test_a_new_job_is_the_tutorials(tmp_path: Path) -> None:
    write_tutorial(tmp_path / "page")
    new(tmp_path, "job", "sine")
    assert (tmp_path / "sine" / "net.py").read_text() == (tmp_path / "page" / "net.py").read_text()
    job = (tmp_path / "sine" / "job.yaml").read_text()
    assert job == "run: {name: sine}\n" + (tmp_path / "page" / "job.yaml").read_text()
    assert fairlead("check", "sine/job.yaml", "--strict", cwd=tmp_path).code == 0


@pytest.mark.full
def test_a_new_job_trains(tmp_path: Path) -> None:
    new(tmp_path, "job", "sine")
    done = fairlead("fit", "sine/job.yaml", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "step 200" in done.text
    losses = [float(one) for one in re.findall(r"val/loss (\S+) at step", done.text)]
    assert losses
    assert losses[-1] < 0.2
    for words in ([], ["--set", "run.code=sine", "--overwrite"]):  # net.py is in neither the current folder nor the run
        exported = fairlead("export", "runs/sine", "--to", "torchscript", *words, cwd=tmp_path)
        assert exported.code == 0, exported.text


@pytest.mark.full
def test_plugins_of_every_axis_pass_their_suites(tmp_path: Path) -> None:
    """Under other names than the examples', installed by pip; none is in another's way."""
    for axis in AXES:
        new(tmp_path, "plugin", f"own_{axis}", "--axis", axis)
    folders = sorted(map(str, tmp_path.glob("fairlead-own-*")))
    assert len(folders) == len(AXES)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environ = {name: value for name, value in os.environ.items() if name != "PIP_BUILD_CONSTRAINT"}
    subprocess.run([*pip, "--target", str(site), *folders], env=environ, check=True)
    tests = [str(path) for path in tmp_path.glob("fairlead-own-*/tests/test_*.py")]
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    done = fairlead(*tests, cwd=tmp_path, environ={"PYTHONPATH": str(site)}, command=command)
    assert done.code == 0, done.text
    assert len(tests) == len(AXES)
    assert "passed" in done.out
