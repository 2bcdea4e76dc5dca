"""`fairlead capabilities`: the table, one device, one strategy, and wrong names."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli.main import main
from fairlead.cli.session import Session
from fairlead.plugins import PluginManager


def ask(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["capabilities", *words])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_strategies_on_the_devices_of_each_vendor(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask("--json", capsys=capsys)
    assert code == 0
    document = json.loads(said)
    assert [one["name"] for one in document["vendors"]] == ["NVIDIA", "AMD", "Intel", "Google TPU", "Apple", "CPU"]
    assert [one["backend"] for one in document["vendors"]][:4] == ["nccl", "nccl (RCCL)", "xccl", "xla"]
    cells = {(one["choice"], one["with"]): one for one in document["table"]}
    assert cells["strategy.ddp", "CPU"]["support"] == "yes"
    assert cells["strategy.ddp", "CPU"]["run_here"] is True
    assert cells["strategy.ddp", "AMD"]["run_here"] is False
    assert cells["strategy.fsdp2", "Intel"]["support"] == "partial"
    assert cells["strategy.xla", "Google TPU"]["support"] == "yes"
    assert cells["strategy.fsdp2", "Google TPU"]["support"] == "no"
    tags = PluginManager().distinct("strategy")
    assert len(cells) == 6 * len(tags)
    assert all(one["reason"] for one in document["table"] if one["support"] != "yes")


def test_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask("--for", "v100", capsys=capsys)
    assert code == 0
    assert "v100: NVIDIA, 7.0, 16 GB (also 32 GB); neither bfloat16 nor 8 bits\n" in said
    assert "precision.bf16-mixed with NVIDIA: partial\n  why:   a v100 has no native bfloat16" in said
    assert "precision.fp8-torchao with NVIDIA: no" in said
    assert "AMD" not in said
    _, h100 = ask("--for", "NVIDIA H100 80GB HBM3", "--json", capsys=capsys)
    document = json.loads(h100)
    assert document["device"]["memory_gb"] == 80
    precisions = {one["choice"]: one["support"] for one in document["more"]}
    assert precisions["precision.fp8-torchao"] == precisions["precision.transformer-engine"] == "yes"
    assert precisions["precision.xla"] == "yes"  # what refuses it is a strategy, not the device


def test_one_strategy_and_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask("--strategy", "deepspeed_stage_3", capsys=capsys)
    assert code == 0
    assert "deepspeed_stage_3 with clipping.value: no\n" in said
    assert "accelerator." not in said.replace("the accelerator", "")
    code, said = ask("--for", "mi300x", "--strategy", "ddp", capsys=capsys)
    assert code == 0
    assert "mi300x: AMD, gfx942, 192 GB; bfloat16, 8-bit floating point" in said
    assert "ddp       yes *" in said


def test_the_devices_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = ask("--devices", capsys=capsys)
    assert "h200             NVIDIA          141         9.0     yes   yes  cuda\n" in said
    assert "gaudi3           another vendor  128                 yes   yes  -\n" in said
    _, listed = ask("--devices", "--json", capsys=capsys)
    assert len(json.loads(listed)) == len(said.splitlines()) - 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--for", "h200x"], "did you mean 'h200'"),
        (["--for", ""], "no device '' is known"),
        (["--for", "gaudi3"], "no accelerator of Fairlead drives a gaudi3"),
        (["--strategy", "dpp"], "did you mean 'ddp'?"),
        (["--strategy", "strategy.ddp"], "no strategy 'strategy.ddp' is installed"),
    ],
)
def test_wrong_names(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(*words, capsys=capsys)
    assert code == 2
    assert says in said


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fairlead.cli.main import main; main(['capabilities', '--for', 'h100']); "
        "print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_session_without_plugins_says_that_nothing_is_installed() -> None:
    import argparse

    from fairlead_diagnostics.commands.capabilities import run

    asked: Any = argparse.Namespace(device="h100", strategy=None, devices=False, json=True)
    out = io.StringIO()
    session = Session(PluginManager([]), {}, Path(), stdout=out)
    assert run(asked, session) == 0
    assert json.loads(out.getvalue())["table"] == []
