from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fairlead_distributed
from fairlead_distributed.testing import without_gloo

README = Path(__file__).parents[1] / "README.md"
MODULES = [importlib.import_module(f"fairlead_distributed.{m.name}") for m in
           pkgutil.iter_modules(fairlead_distributed.__path__)]  # fmt: skip


def test_the_face_shows_every_error() -> None:
    from fairlead_distributed import errors

    ours = {name for name, value in vars(errors).items() if getattr(value, "__module__", None) == errors.__name__}
    assert ours <= set(fairlead_distributed.__all__)
    assert len(ours) == 11


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstring_examples(module: ModuleType) -> None:
    from fairlead_distributed import all_reduce

    assert doctest.testmod(module, extraglobs={"all_reduce": all_reduce}).failed == 0


def test_the_import_brings_no_lightning_and_no_fsdp() -> None:
    code = "import sys, fairlead_distributed; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"lightning", "pytorch_lightning", "torch.distributed.fsdp", "torch.distributed.tensor"} & set(loaded)


def test_the_readme_example_runs_alone_and_under_torchrun(tmp_path: Path) -> None:
    """The same unchanged script."""
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    script = tmp_path / "train.py"
    script.write_text(example[1])
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert without_gloo(alone) == f"rank 0 of 1: loss {losses(1):.3f}, weights differ: None\n"
    # A file for each rank: torchrun's workers are unbuffered (python -u), and two lines in one pipe mix.
    to_files = ["--log-dir", str(tmp_path / "logs"), "--redirects", "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *to_files]
    subprocess.run([*torchrun, str(script)], capture_output=True, text=True, check=True)
    both = sorted(without_gloo(log.read_text()) for log in (tmp_path / "logs").rglob("stdout.log"))
    assert both == [f"rank {r} of 2: loss {losses(2):.3f}, weights differ: None\n" for r in (0, 1)]


def losses(world_size: int) -> float:
    """The mean of the ranks' losses, computed in one process."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        return sum(float(model(torch.full((8, 4), 1.0 + r)).square().mean()) for r in range(world_size)) / world_size
