"""The public suite of checkpoint IOs catches a format that the commands of `fairlead checkpoint` cannot take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.testing import CheckpointIOConformance, FakeEntryPoint, stand_ins
from fairlead_checkpoint_io.commands.checkpoint import checkpoint
from fairlead_checkpoint_io.torch_file import torch_file

NPY = Path(__file__).parents[3] / "examples" / "plugins" / "npy" / "src"

FORMATS = """
from dataclasses import replace
from fairlead_checkpoint_io import CheckpointFormat, Verified
from fairlead_npy.npy_format import INDEX, npy

def write_no_epoch(state, path, origin):
    from fairlead_npy.npy_runtime import write
    return write({key: value for key, value in state.items() if key != "epoch"}, path, origin)

def write_text(state, path, origin):
    path.write_text("MINE" + " " * 1000)
    return []

def read_anything(path, trust):
    return {"state_dict": {}}

def sees_nothing(path, count):
    return Verified("nothing", {})

sound = replace(npy, name="sound")
named_as_ours = replace(npy, name="torch")
greedy = replace(npy, name="greedy", fits=lambda path: path.is_dir())
strict = replace(npy, name="strict", fits=lambda path: path.suffix == ".npy" and path.is_dir())
raises = replace(npy, name="raises", fits=lambda path: (path / "npy.json").read_bytes()[:1] == b"{")
forgets = replace(npy, name="forgets", write="my_formats:write_no_epoch")
blind = replace(npy, name="blind", verify="my_formats:sees_nothing")
misspelt = replace(npy, name="misspelt", read="my_formats:raed")
text = "npy"
"""


@pytest.fixture(autouse=True)
def my_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that the plugins of these tests name, and `fairlead-npy` of the examples."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "my_formats.py").write_text(FORMATS)
    for folder in (NPY, tmp_path / "modules"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_formats", raising=False)


def said(reference: str, folder: Path) -> str:
    """What the suite says of a checkpoint IO that names a format; nothing where it passes."""
    from fairlead_npy.npy import Npy

    mine = type("Mine", (Npy,), {"formats": (reference,)})()
    ours = {"command.checkpoint": checkpoint, "checkpoint_io.torch": torch_file, "checkpoint_io.npy": mine}
    points = [FakeEntryPoint(key, one) for key, one in {**stand_ins(), **ours}.items()]
    suite: Any = type("Suite", (CheckpointIOConformance,), {"plugin_name": "npy", "entry_points": points})
    try:
        suite().test_the_commands_take_its_formats(folder / "tried")
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "what", "do"),
    [
        ("named_as_ours", "another format is called 'torch' too", "give yours another name"),
        ("greedy", "`fits` takes a folder that is none", "a name in the folder"),
        ("raises", "`fits` raises FileNotFoundError", "return False"),
        ("strict", "what it wrote is taken for no checkpoint", "a name in the folder"),
        ("forgets", "diff source.ckpt back.ckpt` ended with 1", "`read` give what `write` was given"),
        ("blind", "was cut in half, and `verify` takes it", "compare a size or a checksum in `verify`"),
        ("misspelt", "convert there.ckpt back.ckpt --to torch` ended with", "see to `read`"),
        ("text", "`formats` names 'my_formats:text', a str", "name a CheckpointFormat"),
        ("no_such", "`formats` names 'my_formats:no_such', a NoneType", "name a CheckpointFormat"),
    ],
)
def test_a_format_that_a_command_cannot_take_is_caught(name: str, what: str, do: str, tmp_path: Path) -> None:
    found = said(f"my_formats:{name}", tmp_path)
    assert what in found
    assert do in found.rpartition("do:")[2]


def test_the_example_and_a_format_like_it_pass(tmp_path: Path) -> None:
    assert said("fairlead_npy.npy_format:npy", tmp_path) == ""
    assert said("my_formats:sound", tmp_path / "sound") == ""


def test_a_format_that_is_not_that_of_the_io_is_caught(tmp_path: Path) -> None:
    found = said("fairlead_checkpoint_io.checkpoint_format:safetensors", tmp_path)
    assert "none of its formats fits what it saves" in found
    assert "do: name the one that does" in found


def test_a_format_that_imports_torch_is_caught(tmp_path: Path) -> None:
    found = said("fairlead_npy.npy_runtime:write", tmp_path)
    assert "fairlead_npy.npy_runtime imports torch" in found
    assert "do: name what reads and writes" in found
