"""Ranks of a launcher join each other before Lightning does anything."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from fairlead import PluginManager, TrainerConfig
from fairlead.resolve import Resolution, resolve
from fairlead_distributed import PreflightError
from fairlead_distributed.run.joining import apply_network_settings, join_process_group
from fairlead_distributed.testing import run_ranks


def resolved(environment: dict[str, Any] | str, environ: dict[str, str], **trainer: Any) -> Resolution:
    config = TrainerConfig.model_validate({"accelerator": "cpu", "environment": environment, **trainer})
    return resolve(config, environ=environ, plugins=PluginManager(), purpose="run")


def joined(rank: int, hashes: tuple[str, str]) -> str:
    """What came of joining with a config of one's own."""
    resolution = resolved({"name": "manual", "preflight_timeout": 60, "gloo": {"test": rank}}, dict(os.environ))
    try:
        join_process_group(resolution, os.environ, config_hash=hashes[rank])
    except PreflightError as error:
        return str(error)
    assert os.environ["GLOO_TEST"] == str(rank)
    return f"{dist.get_rank()} of {dist.get_world_size()} over {dist.get_backend()}"


def test_ranks_of_one_config_join() -> None:
    assert run_ranks(joined, 2, ("abc", "abc"), init=False) == ["0 of 2 over gloo", "1 of 2 over gloo"]


def test_ranks_of_two_configs_do_not() -> None:
    """A node with an old copy of the job would train another model, or hang."""
    zero, one = run_ranks(joined, 2, ("abc", "def"), init=False)
    assert zero == one
    assert "config: rank 1 on" in zero
    assert "has def; rank 0 has abc" in zero


def test_settings_of_the_network_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process and those that it starts; what is set already stays."""
    for name in ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    settings = {"nccl": {"debug": "INFO", "socket_ifname": "ib0"}, "gloo": {"socket_ifname": "eth0"}}
    resolution = resolved({"name": "lightning", **settings}, dict(os.environ))
    try:
        apply_network_settings(resolution, os.environ)
        assert os.environ["NCCL_DEBUG"] == "WARN"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    finally:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            os.environ.pop(name, None)


def test_one_process_joins_nobody() -> None:
    join_process_group(resolved("lightning", {}, devices=1), {})
    assert not dist.is_initialized()
