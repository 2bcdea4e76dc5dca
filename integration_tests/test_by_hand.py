"""Two machines without a launcher: the command of each node starts the ranks of that node."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from integration_tests.jobs import events, repository, start

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize(("devices", "counted"), [(1, "NNODES=2"), (2, "NNODES=2"), (1, "WORLD_SIZE=2")])
def test_a_command_on_each_node(tmp_path: Path, free_port: int, devices: int, counted: str) -> None:
    """Also with one rank a node, where the command itself could be taken for the only rank; nodes or ranks counted."""
    job = str(repository(tmp_path / "repo"))
    words = ("fit", job, "--set", f"trainer.devices={devices}", "--set", "trainer.max_steps=4")
    variable, _, number = counted.partition("=")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), variable: number}
    nodes = [start(*words, cwd=tmp_path, environ={**common, "NODE_RANK": str(node)}) for node in range(2)]
    for node in nodes:
        ended = node.end()
        assert ended.code == 0, ended.text
    happened = events(tmp_path / "runs" / "small")
    (begun,) = [event for event in happened if event["event"] == "start"]
    assert begun["world_size"] == 2 * devices
    assert happened[-1]["event"] == "finished"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
