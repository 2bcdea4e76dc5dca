"""A job of several nodes, checked before its ranks meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.errors import ConfigError
from fairlead_distributed import MultiNodeTrainingManager
from fairlead_distributed.testing import without_gloo
from fairlead_launch.ports import free_port

SCRIPT = """
from fairlead_distributed import MultiNodeTrainingManager, all_reduce, destroy_process_group
import torch
info = MultiNodeTrainingManager().setup(num_nodes=2, gpus_per_node=1)
print(info["rank"], info["world_size"], info["backend"], all_reduce(torch.ones(1)).item(), flush=True)
destroy_process_group()
"""


@pytest.mark.full
def test_the_ranks_of_two_nodes_meet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    place = ["--nnodes", "2", "--main-address", "localhost", "--main-port", str(free_port()), "--nproc", "1"]
    command = [sys.executable, "-m", "fairlead", "launch", *place, "--max-restarts", "0", "--node-rank"]
    nodes = [
        subprocess.Popen([*command, node, str(script)], cwd=tmp_path, text=True, stdout=subprocess.PIPE)
        for node in ("0", "1")
    ]
    assert [without_gloo(node.communicate()[0]) for node in nodes] == [
        "[rank 0] 0 2 gloo 2.0\n",
        "[rank 1] 1 2 gloo 2.0\n",
    ]
    assert [node.returncode for node in nodes] == [0, 0]


def test_without_a_launcher_the_command_of_each_node_is_told() -> None:
    with pytest.raises(ConfigError, match="nothing has started the 16 ranks") as caught:
        MultiNodeTrainingManager(environ={}).setup(num_nodes=2, gpus_per_node=8)
    commands = (caught.value.fix or "").splitlines()[1:]
    assert [command.split()[4:6] for command in commands] == [["--node-rank", "0"], ["--node-rank", "1"]]
    assert all("--main-port 29500 --nproc 8" in command for command in commands)


def test_another_job_than_the_launchers_is_refused() -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    with pytest.raises(ConfigError, match="another job was launched: 1 nodes, not 2, 4 ranks on this node, not 2"):
        MultiNodeTrainingManager(environ=launched).setup(num_nodes=2, gpus_per_node=2)
    with pytest.raises(ConfigError, match="num_nodes is 0"):
        MultiNodeTrainingManager(environ={}).setup(num_nodes=0, gpus_per_node=2)
