"""`fairlead doctor` as a person types it: on one machine, with a job, and where it cannot screen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fairlead.cli import main

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
    "NNODES": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29433",
}


def doctor(cwd: Path, *words: str, **environ: str) -> int:
    return main(["doctor", *words], environ={**os.environ, "OMP_NUM_THREADS": "1", **environ}, cwd=cwd)


def job(folder: Path, **sections: Any) -> Path:
    file = folder / "job.yaml"
    file.write_text(json.dumps({"model": "net:Net", **sections}))
    return file


def test_this_machine_is_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fit"] is True
    checks = ["python", "torch", "devices", "cpus", "memory", "disk", "write", "name", "clock", "matmul"]
    assert list(said["checks"]) == checks
    assert "every bit right" in said["checks"]["matmul"]["detail"]
    assert f"GiB free in {tmp_path}" in said["checks"]["disk"]["detail"]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


def test_a_machine_without_what_the_job_asks_is_unfit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory and GPUs that are not there."""
    file = job(tmp_path, resources={"device": "h100", "devices_per_node": 8, "host_memory_gib": 1e6})
    assert doctor(tmp_path, str(file), CUDA_VISIBLE_DEVICES="") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("devices") and "UNFIT: 0 of 8 cuda" in line for line in lines), lines
    assert any("UNFIT" in line and "the job asks for 1e+06 GiB" in line for line in lines), lines
    assert lines[-1].startswith("unfit: devices, memory")


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({}, "not one of several that a launcher has started"),
        ({**LAUNCHED, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "2 doctors were started on this node"),
    ],
)
def test_a_screen_that_was_started_otherwise_says_how_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environ: dict[str, str], what: str
) -> None:
    assert doctor(tmp_path, "--nodes", **environ) == 2
    said = capsys.readouterr().err
    assert what in said
    assert "srun --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1" in said


def test_a_screen_of_one_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its run directory cannot be written: nobody can tell whose fault that is, and nothing is excluded."""
    (tmp_path / "run").write_text("a file is in the way")
    assert doctor(tmp_path, "--nodes", "--run", "run", "--json", **LAUNCHED) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["bad"], said["outcome"]["excluded"]) == ([], [])
    assert said["unclear"][0].startswith("write fails on the only node")
    assert doctor(tmp_path, "--nodes", **LAUNCHED) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": all fit")
    assert lines[1:] == ["  not made: write: no run was named, so that there is no folder to look at"]
