"""A real `mpirun` over two and four nodes of CPUs; what would reach a host over ssh starts it on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.cpu_nodes import trained_alike, write_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("mpirun") is None and (not os.environ.get("CI")), reason="needs Open MPI's mpirun (openmpi-bin)"
    ),
    pytest.mark.full,
]

AGENT = """#!/bin/sh
# In place of `ssh HOST COMMAND`; each host has a /tmp of its own.
TMPDIR="${0%/*}/tmp-$1"
export TMPDIR
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""


SCRIPT = """
import torch

from fairlead_distributed import all_reduce, get_rank, get_world_size, init_process_group

init_process_group()
total = all_reduce(torch.tensor(float(get_rank() + 1)))
print(f"rank {get_rank()} of {get_world_size()}: {total.item():.0f}", flush=True)
"""


def mpirun(folder: Path, hosts: str, tasks: int, *words: str) -> str:
    """What is said by so many tasks of `python -m WORDS` on these hosts."""
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    command = [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("--mca", "plm_rsh_agent", str(agent), "--host", hosts, "-n", str(tasks)),
        *("-x", "PYTHONPATH", "-x", "PATH", "-x", "MASTER_ADDR"),
        *(sys.executable, "-P", "-m", *words),
    ]
    environ = {**os.environ, "MASTER_ADDR": socket.gethostname()}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def ranks(said: str) -> list[str]:
    """What the script printed; a line may have the rank before it, and mpirun may put two into one."""
    return sorted(re.findall(r"rank \d of \d: \d+", said))


def test_launch_in_a_task_for_each_rank(tmp_path: Path) -> None:
    """It sees that it is a rank, says so once, and starts nothing more."""
    (tmp_path / "script.py").write_text(SCRIPT)
    said = mpirun(tmp_path, "node0:2", 2, "fairlead", "launch", "script.py")
    assert said.count("already launched by") == 1
    assert ranks(said) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_launch_in_a_task_for_each_node(tmp_path: Path) -> None:
    """It takes the node's number from mpirun, and starts the ranks of the node."""
    (tmp_path / "script.py").write_text(SCRIPT)
    said = mpirun(tmp_path, "node0:1,node1:1", 2, "fairlead", "launch", "--nproc", "2", "script.py")
    for node in range(2):
        assert f"this is node {node} of 2" in said
    assert ranks(said) == [f"rank {rank} of 4: 10" for rank in range(4)]


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_cpus(nodes: int, tmp_path: Path) -> None:
    """One process a node with two threads, over gloo: the weights of one process with the same batch in all."""
    job = write_job(tmp_path, nodes)
    hosts = ",".join(f"node{number}:1" for number in range(nodes))
    said = mpirun(tmp_path, hosts, nodes, "fairlead", "fit", str(job), "--set", "trainer.threads=2")
    assert f"{nodes} ranks on {nodes} nodes, ddp on cpu, 32-true, 2 threads each, gloo" in said
    trained_alike(tmp_path, nodes, threads=2)
