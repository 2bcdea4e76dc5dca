from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairlead.errors import ConfigError, FairleadError
from fairlead_distributed import (
    AlreadyInitializedError,
    PortError,
    RendezvousError,
    all_reduce,
    bind_listener,
    destroy_process_group,
    get_distributed_info,
    get_local_rank,
    init_process_group,
    is_initialized,
    process_group,
    rank_device,
    setup_distributed,
    startup_lines,
    tcp_store,
)
from fairlead_distributed.testing import run_ranks

STEP = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"SLURM_PROCID": "3", "SLURM_NPROCS": "8"}, (3, 8)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, (3, 8)),
        (STEP, (3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({**STEP, "RANK": "0", "WORLD_SIZE": "1"}, (3, 4)),
        # torchrun started by srun, one task a node: SLURM counts the launchers.
        ({**STEP, "TORCHELASTIC_RUN_ID": "x", "RANK": "9", "WORLD_SIZE": "32"}, (9, 32)),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        # A batch script and an salloc shell are one process in an allocation of four tasks.
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}, (0, 1)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, (0, 1)),
    ],
)
def test_setup_distributed(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert setup_distributed(environ) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "$SLURM_PROCID", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 does not fit"),
        ({"SLURM_PROCID": "0", "SLURM_NPROCS": "0"}, "SLURM_PROCID"),
    ],
)
def test_a_wrong_environment_is_an_error_that_names_the_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        setup_distributed(environ)
    assert named in str(caught.value)


def test_local_rank_is_not_the_global_rank() -> None:
    assert get_local_rank({}) == 0
    assert get_local_rank({"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}) == 0
    assert get_local_rank(STEP) == 1


def fake_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_the_device_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "9", "WORLD_SIZE": "16"}
    assert rank_device(world) == torch.device("cpu")
    fake_cuda(monkeypatch, 8)
    assert rank_device({**world, "LOCAL_RANK": "1"}) == torch.device("cuda", 1)
    assert rank_device({}) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="does not know which GPU"):
        rank_device(world)
    with pytest.raises(ConfigError, match="no GPU for local rank 8"):
        rank_device({**world, "LOCAL_RANK": "8"})
    # srun --gpus-per-task=1 shows each task its own GPU as the only one.
    fake_cuda(monkeypatch, 1)
    assert rank_device({**STEP, "CUDA_VISIBLE_DEVICES": "1"}) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="no GPU for local rank 1"):
        rank_device(STEP)


def test_the_device_is_set_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, and nccl for CUDA. No GPU is here: torch's two calls are recorded."""
    fake_cuda(monkeypatch, 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kw: calls.append((backend, kw["device_id"])))
    init_process_group(rank=0, world_size=1, environ={"LOCAL_RANK": "2"})
    device = torch.device("cuda", 2)
    assert calls == [device, ("nccl", device)]


def test_one_process() -> None:
    """Before, in and after a group of one; a second group is refused; leaving twice is not."""
    alone = {"available": True, "initialized": False, "world_size": 1, "rank": 0, "backend": None}
    assert get_distributed_info() == alone
    assert startup_lines({}) == [
        "Distributed training initialized: no backend, 1 processes",
        "[Rank 0] local rank 0, world size 1",
    ]
    with process_group(environ={}) as info:
        assert info == {**alone, "initialized": True, "backend": "gloo"}
        with pytest.raises(AlreadyInitializedError, match="initialised already") as caught:
            init_process_group(environ={})
        assert "rank 0 of 1, backend gloo" in str(caught.value)
        assert all_reduce(torch.tensor(3)).item() == 3
    assert get_distributed_info() == alone
    destroy_process_group()
    destroy_process_group()


def test_the_group_is_left_when_the_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), process_group(environ={}):
        _ = 1 / 0
    assert not is_initialized()


def test_file_rendezvous(tmp_path: Path) -> None:
    with process_group("gloo", f"file://{tmp_path}/meet", 1, 0, environ={}):
        assert all_reduce(torch.tensor(3)).item() == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backend": "glo"}, "unknown backend 'glo'"),
        ({"backend": "cpu:gloo,cuda:nnccl"}, "unknown backend 'nnccl'"),
        ({"backend": "nccl"}, "'nccl' cannot be used here"),
        ({"backend": "xla"}, r"\[xla\]"),
        ({"init_method": "http://x"}, "init_method"),
        ({"init_method": "tcp://host"}, "tcp://host:port"),
        ({"rank": 0}, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not fit"),
        ({"rank": -1, "world_size": 2}, "rank -1 does not fit"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR is not set"),
        ({"timeout": timedelta(0)}, "timeout must be positive"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FairleadError) as caught:
        init_process_group(environ={}, **kwargs)
    assert re.search(message, str(caught.value))
    assert not is_initialized()


def test_a_port_in_use_is_said_with_the_next_one() -> None:
    with bind_listener([0], "") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortError) as caught:
            init_process_group("gloo", f"tcp://127.0.0.1:{port}", 2, 0, environ={}, timeout=timedelta(seconds=5))
    assert f"MASTER_PORT={port + 1}" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1", "no process listens"), ("no-such-host.invalid", "not resolve")]
)
def test_an_unreachable_master_is_said_with_its_address_and_the_reason(host: str, why: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, but not listening
        address = f"{host}:{unused.getsockname()[1]}"
        with pytest.raises(RendezvousError) as caught:
            init_process_group("gloo", f"tcp://{address}", 2, 1, environ={}, timeout=timedelta(seconds=0.5))
    assert f"rank 1 could not reach rank 0 at {address}" in str(caught.value)
    assert why in str(caught.value)


def test_a_lone_rank_0_names_the_ranks_that_did_not_come() -> None:
    store = tcp_store(bind_listener([0], "127.0.0.1"))
    with pytest.raises(RendezvousError) as caught:
        init_process_group("gloo", rank=0, world_size=4, store=store, environ={}, timeout=timedelta(seconds=0.3))
    assert caught.value.missing == (1, 2, 3)
    assert "1 of 4 ranks came" in str(caught.value)
    assert not is_initialized()


def meetings(rank: int) -> dict[str, object]:
    """Several starts in one process, over one and the same store."""
    got: dict[str, object] = {}
    sums = []
    for _ in range(3):  # each finds the others of its own attempt, though the keys of the last are still there
        with process_group("gloo"):
            sums.append(all_reduce(torch.tensor(rank + 1)).item())
    got["sums"] = sums

    def failure(**environ: str) -> RendezvousError:
        with pytest.raises(RendezvousError) as caught:
            init_process_group("gloo", environ={**os.environ, **environ}, timeout=timedelta(seconds=3))
        return caught.value

    # Restart counts keep these starts apart, as torchrun's do.
    got["missing"] = failure(WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="1").missing
    got["no leader"] = failure(RANK=str(rank + 1), WORLD_SIZE="3", TORCHELASTIC_RESTART_COUNT="2").missing
    got["world"] = str(failure(WORLD_SIZE=str(2 + rank), TORCHELASTIC_RESTART_COUNT="3"))
    with process_group("gloo"):
        got["after"] = all_reduce(torch.tensor(rank + 1)).item()
    return got


def test_starts_over_one_store() -> None:
    """The missing are named on every rank that came; a group can be made anew."""
    for got in run_ranks(meetings, 2, init=False):
        assert got["sums"] == [3, 3, 3]
        assert got["missing"] == (2, 3)
        assert got["no leader"] == (0,)
        assert "the world size is 3 on rank 1 and 2 on rank 0" in str(got["world"])
        assert got["after"] == 3


def same_rank(rank: int) -> str:
    # As with a template that gives every task the same rank.
    environ = {**os.environ, "RANK": str(min(rank, 1))}
    with pytest.raises(RendezvousError) as caught:
        init_process_group("gloo", environ=environ, timeout=timedelta(seconds=30))
    return str(caught.value)


def test_two_processes_of_one_rank_are_told_so() -> None:
    for message in run_ranks(same_rank, 3, init=False):
        assert "two processes say that they are rank 1" in message
        assert message.count("pid") == 2
