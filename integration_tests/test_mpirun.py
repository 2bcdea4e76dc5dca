"""A real `mpirun` over two and four nodes of CPUs; what would reach a host over ssh starts it on this machine."""

from __future__ import annotations

import os
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
        shutil.which("mpirun") is None and not os.environ.get("CI"), reason="needs Open MPI's mpirun (openmpi-bin)"
    ),
]

AGENT = """#!/bin/sh
# In place of `ssh HOST COMMAND`; each host has a /tmp of its own.
TMPDIR="${0%/*}/tmp-$1"
export TMPDIR
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_cpus(nodes: int, tmp_path: Path) -> None:
    """One process a node with two threads, over gloo: the weights of one process with the same batch in all."""
    job = write_job(tmp_path, nodes)
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    hosts = ",".join(f"node{number}:1" for number in range(nodes))
    words = [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("--mca", "plm_rsh_agent", str(agent), "--host", hosts, "-n", str(nodes)),
        *("-x", "PYTHONPATH", "-x", "PATH", "-x", "MASTER_ADDR"),
        *(sys.executable, "-P", "-m", "fairlead", "fit", str(job), "--set", "trainer.threads=2"),
    ]
    environ = {**os.environ, "MASTER_ADDR": socket.gethostname()}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{nodes} ranks on {nodes} nodes, ddp on cpu, 32-true, 2 threads each, gloo" in done.stdout + done.stderr
    trained_alike(tmp_path, nodes, threads=2)
