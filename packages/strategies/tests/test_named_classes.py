"""What `fairlead check` says of the classes that a strategy's fields name, on a machine without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli.main import main

MODEL = """
import lightning.pytorch as L
import torch

class Block(torch.nn.Module): ...
class Model(L.LightningModule):
    def train_dataloader(self): ...
"""


def check(folder: Path, strategy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (folder / "pyproject.toml").touch()
    (folder / "mine.py").write_text(MODEL)
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    (folder / "job.yaml").write_text(json.dumps({"model": {"class": "mine:Model"}, "trainer": trainer}))
    code = main(["check", "job.yaml"], environ={}, cwd=folder)
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ({"name": "fsdp2", "auto_wrap_policy": "mine:Blok"}, "mine has no 'Blok'"),
        ({"name": "fsdp2", "activation_checkpointing": ["mine:Block", "mien:Block"]}, "module 'mien'"),
        ({"name": "fsdp", "activation_checkpointing": ["mine:Layer"]}, "mine has no 'Layer'"),
        ({"name": "hybrid", "shard": 2, "auto_wrap_policy": ["mine:Layer"]}, "mine has no 'Layer'"),
    ],
)
def test_a_class_that_is_not_there_is_an_error(
    tmp_path: Path, strategy: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(tmp_path, strategy, capsys)
    assert code == 2
    assert says in said
    assert f"trainer.strategy.{[*strategy][-1]}" in said


@pytest.mark.parametrize("policy", ["mine:Block", ["mine:Block", "torch.nn:TransformerEncoderLayer"], 1000, "auto"])
def test_what_is_there_or_cannot_be_read_is_no_finding(
    tmp_path: Path, policy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(tmp_path, {"name": "fsdp2", "auto_wrap_policy": policy}, capsys)
    assert code == 0
    assert "auto_wrap_policy" not in said
