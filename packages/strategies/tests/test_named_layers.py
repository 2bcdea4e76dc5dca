"""What `fairlead check` says of a plan whose patterns name layers that the model does not have, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli.main import main

LAYERS = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))

class Block(nn.Module):
    def __init__(self, width, act=nn.GELU):
        super().__init__()
        self.mlp, self.norm = Mlp(width), nn.LayerNorm(width)
        table = torch.zeros(8, width)
        table[:, 0::2] = 1.0
        self.register_buffer("table", table)
"""
MODEL = """
import lightning.pytorch as L
import torch
import torch.nn as nn

from layers import *
import layers

class Model(L.LightningModule):
    def __init__(self, depth=2):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList([layers.Block(8) for _ in range(depth)])
        self.heads = nn.ModuleDict({"first": nn.Linear(8, 2), "second": nn.Linear(8, 2)})
        self.add_module("final", nn.LayerNorm(8))

    def train_dataloader(self): ...

class Wide(Model):
    def __init__(self):
        super().__init__(depth=4)
        self.wide = Mlp(32)

class Torchs(L.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2)
        self.net = nn.TransformerEncoder(layer, 2)

    def train_dataloader(self): ...

class Given(L.LightningModule):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def train_dataloader(self): ...

def make():
    return Wide()
"""
UNKNOWN = {
    "of a library": "self.net = timm.create_model('vit')",
    "with a library's base": "self.net = Based()",
    "by a variable": "self.net = kind(8)",
    "from a table": "self.net = TABLE['mlp'](8)",
    "under a computed name": "self.add_module(f'u{8}', nn.Linear(8, 8))",
    "by setattr": "setattr(self, name, nn.Linear(8, 8))",
    "under computed keys": "self.net = nn.ModuleDict({f'u{i}': nn.Linear(8, 8) for i in range(2)})",
    "under keys of a variable": "self.net = nn.ModuleDict(kind)",
    "loaded": "self.net = torch.load('net.pt')",
    "from torch.hub": "self.net = torch.hub.load('repository', 'net')",
    "looked up": "self.net = getattr(layers, name)(8)",
    "by a name that nothing defines": "self.net = Somewhere(8)",
}


def check(folder: Path, plan: dict[str, str], capsys: pytest.CaptureFixture[str], **job: Any) -> tuple[int, str]:
    (folder / "pyproject.toml").touch()
    (folder / "layers.py").write_text(LAYERS)
    (folder / "mine.py").write_text(MODEL)
    strategy = {"name": "tensor_parallel", "tensor": 2, "plan": plan}
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    job = {"model": {"class": "mine:Model"}, "trainer": trainer} | job
    (folder / "job.yaml").write_text(json.dumps(job, indent=1))
    code = main(["check", "job.yaml"], environ={}, cwd=folder)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("model", "pattern", "meant"),
    [
        ("mine:Model", "blocks.*.mlp.uq", "blocks.*.mlp.up"),
        ("mine:Model", "blocks.*.mpl.up", "blocks.*.mlp.up"),
        ("mine:Model", "block.*.mlp.dwon", "blocks.*.mlp.down"),
        ("mine:Model", "*.upp", "*.up"),
        ("mine:Model", "heads.frist", "heads.first"),
        ("mine:Model", "finall", "final"),
        ("mine:Wide", "wide.dowm", "wide.down"),
        ("mine:make", "wde.up", "wide.up"),
        ("mine:Torchs", "net.layers.*.liner1", "net.layers.*.linear1"),
    ],
)
def test_a_pattern_with_a_typo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, pattern: str, meant: str
) -> None:
    """The error names the pattern that was meant, and its own line."""
    code, said = check(tmp_path, {"*.down": "rowwise", pattern: "colwise"}, capsys, model={"class": model})
    assert code == 2, said
    assert f"the pattern {pattern!r} matches no layer of the model" in said
    assert f"did you mean {meant!r}?" in said
    line = 1 + [pattern in text for text in (tmp_path / "job.yaml").read_text().splitlines()].index(True)
    assert f"job.yaml:{line}, trainer.strategy.plan.{pattern}" in said
    assert "plan-matches-nothing" in said


def test_strategies_with_other_parts_and_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--set`, `hybrid`, and a part that the job gives to the model."""
    body = {"class": "layers:Mlp", "args": {"width": 8}}
    job = {"model": {"class": "mine:Given", "args": {"body": body}}}
    code, said = check(tmp_path, {"body.uq": "colwise"}, capsys, **job)
    assert code == 2
    assert "did you mean 'body.up'?" in said
    words = ["--set", "trainer.strategy.name=hybrid", "--set", "trainer.strategy.tensor=2"]
    words += ["--set", "trainer.strategy.plan={body.uq: colwise}"]
    assert main(["check", "job.yaml", *words], environ={}, cwd=tmp_path) == 2
    said = capsys.readouterr().err
    assert "--set trainer.strategy.plan" in said
    assert "did you mean 'body.up'?" in said


@pytest.mark.parametrize("pattern", ["blocks.*.mlp.up", "*", "blocks.0.norm", "heads.*", "final", "*.ups*", "other"])
def test_a_pattern_that_may_match_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    """Nor is one that is near to nothing: what it means is not known."""
    code, said = check(tmp_path, {pattern: "colwise"}, capsys)
    assert code == 0, said
    assert "plan-matches-nothing" not in said


@pytest.mark.parametrize("line", UNKNOWN.values(), ids=UNKNOWN)
def test_layers_whose_names_reading_does_not_see(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    """There, what looks like a typo may be a name."""
    source = f"""
import timm
import torch
from torch import nn
import lightning.pytorch as L
import layers

class Based(timm.Based):
    pass

TABLE = {{"mlp": layers.Mlp}}

class Net(L.LightningModule):
    def __init__(self, kind=None, name="mlp"):
        super().__init__()
        self.mlp = layers.Mlp(8)
        {line}

    def train_dataloader(self): ...
"""
    (tmp_path / "timm").mkdir()
    (tmp_path / "net.py").write_text(source)
    _, said = check(tmp_path, {"net.uq": "colwise"}, capsys, model={"class": "net:Net"})
    assert "plan-matches-nothing" not in said
    (tmp_path / "net.py").write_text(source.replace(line, "self.net = layers.Mlp(8)"))
    _, said = check(tmp_path, {"net.uq": "colwise"}, capsys, model={"class": "net:Net"})
    assert "did you mean 'net.up'?" in said
