"""A script with a loop of its own, killed at any place and started again: as if nothing had happened."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loop_job
import pytest
import torch
from tiny_job import events
from torch import Tensor

FORKS = multiprocessing.get_context("forkserver")  # the imports are most of the time of a short job
FORKS.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "fairlead_lightning.custom_loop.run",
        "fairlead_lightning.custom_loop.fabric",
        "lightning.pytorch",
    ]
)
LIMIT_S = 120.0  # only against a start that would hang for ever
PEERS_S = 30.0  # and against ranks that do not notice that another is gone


def start(root: Path, kill: str = "", *, ranks: int = 1, **settings: object) -> list[int]:
    """Starts the job as `torchrun` would; its ranks' exit codes, once nothing of it is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, log = [], root.with_suffix(".log")
    for rank in range(ranks):
        elastic = {
            "TORCHELASTIC_RUN_ID": "kills",
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        variables = {"RANKS": ranks, "KILL": kill or "-1::0", **settings, **(elastic if ranks > 1 else {})}
        environ = {name: str(value) for name, value in variables.items()}
        processes.append(FORKS.Process(target=loop_job.become_rank, args=(environ, root, log)))
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(one.exitcode is None for one in processes):
            assert time.monotonic() < deadline, f"hangs: {log.read_text()}"
            multiprocessing.connection.wait([one.sentinel for one in processes if one.exitcode is None], timeout=1)
            if any(one.exitcode for one in processes):
                if not kill.startswith("!"):
                    break
                deadline = min(deadline, time.monotonic() + PEERS_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [one.exitcode for one in processes]
    assert kill or codes == [0] * ranks, log.read_text()
    return [code if code is not None else 1 for code in codes]


def start_script(words: list[str], cwd: Path, kill: str = "", **settings: object) -> tuple[int, str]:
    """Starts a script as its user would; Lightning starts its second rank. The exit code, and what it said."""
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "KILL": kill or "-1::0", **{k: str(v) for k, v in settings.items()}},
        cwd=cwd,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert kill or process.returncode == 0, said
    return process.returncode, said


def differences(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, Tensor):
        if not torch.equal(one, other):
            yield path
    elif isinstance(one, dict):
        for key in one.keys() | other.keys():
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{path}.{index}")
    elif one != other:
        yield f"{path}: {one} is not {other}"


def assert_same(whole: Path, parts: Path, ranks: int) -> None:
    """Weights, buffers, momentum, schedule, position, per-rank sums, the next random numbers, and every metric."""
    for rank in range(ranks):
        one, other = (torch.load(p / "out" / f"{rank}.pt", weights_only=True) for p in (whole, parts))
        assert list(differences(one, other, f"rank {rank}")) == []
    assert (parts / "run/metrics.csv").read_bytes() == (whole / "run/metrics.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kills"),
    [
        # Each place of a save: the rank's part, the shared part, the manifest, the rename, `latest`, retention.
        (
            {"ranks": 1},
            ["0:write:1", "0:fsync:2", "0:fsync:3", "0:rename:1", "0:rename:2", "0:unlink:2", "0:epoch:1"],
        ),
        pytest.param({"ranks": 1, "WORKERS": 2}, ["0:backward:6", "0:step:8", "0:restore:1"], marks=pytest.mark.full),
        pytest.param({"ranks": 2}, ["!1:backward:6", "1:write:1", "0:rename:6"], marks=pytest.mark.full),
        pytest.param({"ranks": 2, "WORKERS": 2}, ["!0:batch:6", "1:write:1"], marks=pytest.mark.full),
        pytest.param({"ranks": 2, "STRATEGY": "sharded"}, ["1:backward:6", "!1:batch:3"], marks=pytest.mark.full),
        pytest.param(
            {"ranks": 2, "STRATEGY": "sharded-folder"},
            ["0:rename:1", "1:backward:6", "!0:batch:3"],
            marks=pytest.mark.full,
        ),
    ],
    ids=["1-rank", "1-rank-2-workers", "2-ranks", "2-ranks-2-workers", "2-ranks-sharded", "2-ranks-sharded-folder"],
)
def test_killed_and_started_again(tmp_path: Path, settings: dict[str, Any], kills: list[str]) -> None:
    """Also several times in a row, of one rank or of all."""
    start(tmp_path / "whole", **settings)
    parts = tmp_path / "parts"
    for kill in kills:
        codes = start(parts, kill, **settings)
        assert codes[int(kill.lstrip("!")[0])] == -signal.SIGKILL, kill
        assert 0 not in codes
    start(parts, **settings)
    assert events(parts / "run")[-1]["event"] == "finished"
    assert_same(tmp_path / "whole", parts, settings["ranks"])


@pytest.mark.full
@pytest.mark.slow
def test_a_script_whose_ranks_lightning_starts(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "loop_job.py")
    start_script([script, "whole", "whole/out"], tmp_path, RANKS=2)
    code, _ = start_script([script, "parts", "parts/out"], tmp_path, "1:backward:6", RANKS=2)
    assert code == -signal.SIGKILL
    start_script([script, "parts", "parts/out"], tmp_path, RANKS=2)
    assert_same(tmp_path / "whole", tmp_path / "parts", 2)


@pytest.mark.slow
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs/how-to/own-loop.md"
    shown = re.findall(r"^```python title=\"train.py\"\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(shown[0].replace('accelerator="auto"', 'accelerator="cpu"'))
    start_script(["train.py"], tmp_path)
    run = tmp_path / "runs/own-loop"
    assert [e["step"] for e in events(run, "checkpoint")] == [20, 40, 60, 80, 96]
    _, said = start_script(["train.py"], tmp_path)
    assert "runs/own-loop is finished: step 96" in said
