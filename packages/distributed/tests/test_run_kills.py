"""A script with a plain loop, killed at any place and started again: as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_job
import torch
from run_records import events
from torch import Tensor

FORKS = multiprocessing.get_context("forkserver")  # the imports are most of the time of a short job
FORKS.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint", "fairlead_distributed.run.run"])
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
        variables = {"KILL": kill or "-1::0", **settings, **(elastic if ranks > 1 else {})}
        environ = {name: str(value) for name, value in variables.items()}
        processes.append(FORKS.Process(target=run_job.become_rank, args=(environ, root, log)))
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
            ["0:write:1", "0:fsync:2", "0:fsync:3", "0:rename:1", "0:rename:2", "0:unlink:2", "0:step:9"],
        ),
        ({"ranks": 1, "STYLE": "epochs"}, ["0:step:11", "0:epoch:1", "0:batch:5"]),
        ({"ranks": 2}, ["!1:backward:6", "1:write:1", "0:rename:6"]),
        pytest.param({"ranks": 1, "WORKERS": 2}, ["0:backward:6", "0:step:8", "0:restore:1"], marks=pytest.mark.full),
        pytest.param(
            {"ranks": 2, "WORKERS": 2, "STYLE": "epochs"}, ["!0:batch:6", "1:write:1"], marks=pytest.mark.full
        ),
        ({"ranks": 2, "KIND": "fsdp"}, ["0:rename:1", "1:backward:6", "!1:batch:3"]),
        pytest.param({"ranks": 2, "KIND": "fsdp-gathered"}, ["1:backward:6", "!0:batch:3"], marks=pytest.mark.full),
        ({"ranks": 2, "KIND": "tensor"}, ["0:rename:1", "!1:backward:6"]),
        pytest.param({"ranks": 4, "KIND": "hsdp"}, ["0:rename:1", "!3:backward:6"], marks=pytest.mark.full),
    ],
    ids=[
        *("1-rank", "epochs", "2-ranks", "1-rank-2-workers", "2-ranks-2-workers", "2-ranks-sharded"),
        *("2-ranks-gathered", "tensor-parallel", "hybrid"),
    ],
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
