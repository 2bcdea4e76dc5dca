"""A format that a plugin from outside brings works with every command; one that is broken is in nobody's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Command, command

from fairlead_checkpoint_io.torch_file import TorchFile

ROOT = Path(__file__).parents[3]
NPY = ROOT / "examples" / "plugins" / "npy" / "src"


ODD = """
from fairlead_checkpoint_io import CheckpointFormat

def breaks(path, trust):
    raise IndexError("no such entry")

mine = CheckpointFormat("mine", lambda path: path.suffix == ".mine", read="odd_formats:breaks")
another_torch = CheckpointFormat("torch", lambda path: False, read="odd_formats:breaks")
"""


@pytest.fixture(autouse=True)
def odd_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that plugins of the tests name."""
    (tmp_path / "odd_formats.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_formats", raising=False)


@pytest.fixture
def fairlead(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, where `fairlead-npy` of the examples is installed."""
    monkeypatch.syspath_prepend(NPY)
    from fairlead_npy.npy import npy

    return command(tmp_path, capsys, {"checkpoint_io.npy": npy})


def state() -> dict[str, Any]:
    weights = {"a": torch.arange(3.0), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "n": torch.tensor(7)}
    return {"state_dict": weights, "epoch": 1, "optimizer_states": [{"state": {0: {"betas": (0.9, 0.99)}}}]}


def test_there_and_back(fairlead: Command, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.ckpt")
    assert fairlead("convert", "a.ckpt", "folder", "--to", "npy").code == 0
    said = fairlead("convert", "folder", "b.ckpt", "--to", "torch", "--json").document
    assert (said["from_format"], said["to_format"]) == ("npy", "torch")
    assert fairlead("diff", "a.ckpt", "b.ckpt").code == 0
    assert fairlead("diff", "a.ckpt", "folder").code == 0
    assert fairlead("consolidate", "folder", "-o", "c.ckpt").code == 0
    assert fairlead("convert", "folder", "w.safetensors", "--to", "safetensors").code == 0
    # It is known as a checkpoint, so that it may be overwritten when that is asked for.
    assert fairlead("convert", "a.ckpt", "folder", "--to", "npy", "--overwrite").code == 0


def test_verify_asks_the_format(fairlead: Command, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.ckpt")
    fairlead("convert", "a.ckpt", "folder", "--to", "npy")
    sound = fairlead("verify", "folder")
    assert (sound.code, "the checksums in npy.json" in sound.out) == (0, True)
    (tmp_path / "folder" / "0.npy").write_bytes(b"x")
    (tmp_path / "folder" / "1.npy").unlink()
    damaged = fairlead("verify", "folder", "--json")
    assert damaged.code == 1
    assert [one["file"] for one in damaged.document["checkpoints"][0]["damage"]] == ["0.npy", "1.npy"]
    assert "damaged" in fairlead("diff", "folder", "a.ckpt").err


def test_verify_of_it_imports_no_torch(fairlead: Command, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.ckpt")
    fairlead("convert", "a.ckpt", "folder", "--to", "npy")
    program = (
        "import sys; from pathlib import Path; from fairlead_npy.npy_format import npy\n"
        "print(npy.fits(Path('folder')), npy.call(npy.verify, Path('folder')).damage, 'torch' in sys.modules)"
    )
    environ = {"PYTHONPATH": ":".join([str(NPY), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "True {} False", done.stderr


def test_a_format_that_is_not_known(fairlead: Command, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.ckpt")
    for wrong, hint in (("nyp", "did you mean 'npy'?"), ("deepspeed", "distributed, npy, safetensors, torch")):
        said = fairlead("convert", "a.ckpt", "b", "--to", wrong)
        assert (said.code, hint in said.err) == (2, True), said.err


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("no_such_module:format", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("odd_formats:breaks", "not a CheckpointFormat"),
        ("odd_formats:another_torch", "another plugin has one called 'torch'"),
    ],
)
def test_a_broken_format_is_left_out_and_named(
    reference: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state(), tmp_path / "a.ckpt")
    run = command(tmp_path, capsys, {"checkpoint_io.broken": _plugin(reference)})
    said = run("verify", "a.ckpt")
    assert said.code == 0
    assert reference in said.err
    assert why in said.err


def test_an_error_of_its_reader_names_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.mine").write_text("anything")
    run = command(tmp_path, capsys, {"checkpoint_io.mine": _plugin("odd_formats:mine")})
    said = run("consolidate", "a.mine", "-o", "b.ckpt")
    assert said.code == 2
    assert "a.mine" in said.err
    assert "IndexError: no such entry" in said.err
    assert "has nothing to compare with" in run("verify", "a.mine").err


def _plugin(reference: str) -> Any:
    return type("Plugin", (TorchFile,), {"formats": (reference,)})(verify=False)
