"""`fairlead bench gemm` on this machine's CPU, and the calibration file that it and `bench comm` write together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.cli import main
from fairlead_diagnostics.bench import gemm

pytestmark = pytest.mark.slow

COMM = [
    "bench",
    "comm",
    "--processes",
    "2",
    "--sizes",
    "1KiB,1MiB",
    "--collectives",
    "all_reduce,broadcast",
    "--rounds",
    "1",
]


@pytest.mark.full
def test_one_calibration_holds_what_two_commands_have_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = ["--calibration", "here.json"]
    assert main(["bench", "gemm", "--rounds", "1", *calibration], environ=dict(os.environ), cwd=tmp_path) == 0
    shown = capsys.readouterr().out
    assert "matrix products" in shown
    assert "the host launches an operator in" in shown
    for _ in range(2):  # what is measured again replaces what was there
        assert main([*COMM, *calibration], environ=dict(os.environ), cwd=tmp_path) == 0
    found = json.loads((tmp_path / "here.json").read_text())
    assert found["device"] == "cpu"
    assert {"float32", "bfloat16"} == {row["dtype"] for row in found["matmul"]}
    for row in found["matmul"]:
        assert row["tflops"] * row["seconds"] * 1e12 == pytest.approx(2 * row["m"] * row["n"] * row["k"])
    assert {row["pass"] for row in found["attention"]} == {"forward", "backward"}
    assert all(0.01 < row["gb_s"] < 10_000 for row in found["memory"])
    assert found["launch_us"] > 0.1
    rows = {(row["op"], row["bytes"]): row for row in found["communication"]}
    assert len(rows) == len(found["communication"]) == 4
    small, large = rows["all_reduce", 1024], rows["all_reduce", 2**20]
    assert (small["ranks"], small["nodes"]) == (2, 1)
    assert small["latency_us"] == large["latency_us"] == pytest.approx(1024 / (small["bus_gb_s"] * 1e3), rel=1e-6)
    assert "bench gemm" in found["source"]
    assert found["source"].count("bench comm") == 1


def test_it_needs_nothing_but_torch(tmp_path: Path) -> None:
    """On a machine where only torch is installed, the one file does."""
    blocked = "import sys, runpy; sys.modules['fairlead'] = sys.modules['pydantic'] = None"
    code = f"{blocked}; runpy.run_path({gemm.__file__!r}, run_name='__main__')"
    words = [sys.executable, "-c", code, "--json", "x.json", "--rounds", "1"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "x.json").read_text())["matmul"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no folder"),
        ("{", "is no calibration"),
        ('{"loss": 1}', "is no calibration"),
        ('{"device": "h100", "source": "elsewhere"}', "is a calibration of h100, and this device is cpu"),
    ],
)
def test_a_file_that_is_no_calibration_of_this_device_is_not_overwritten(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("none/x.json" if content is None else "x.json")
    if content is not None:
        file.write_text(content)
    words = ["--sizes", "8", "--collectives", "broadcast", "--calibration", str(file)]
    assert main([*COMM, *words], environ=dict(os.environ), cwd=tmp_path) == 2
    assert said in capsys.readouterr().err
    assert content is None or file.read_text() == content
