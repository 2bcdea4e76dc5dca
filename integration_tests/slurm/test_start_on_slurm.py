"""How the ranks of real steps find each other, without a port from anyone, and what they say when they do not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import submit

pytestmark = pytest.mark.slow

RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from fairlead_distributed import RendezvousError, all_reduce, get_rank, process_group

folder, rank = Path(sys.argv[1]), os.environ["SLURM_PROCID"]
for word in sys.argv[2:]:
    name, _, value = word.partition("=")
    if name == "absent" and rank in value.split(","):
        sys.exit(0)
    if name == "late" and rank == "0":
        time.sleep(float(value))
    if name == "old" and rank == value:
        torch.__version__ = "2.12.1"
    if name == "host":
        os.environ["MASTER_ADDR"] = value
patience = timedelta(seconds=float(os.environ.get("PATIENCE", "120")))
try:
    sums = []
    for _ in range(2):
        with process_group("gloo", preflight_timeout=patience):
            sums.append(int(all_reduce(torch.tensor(1 + get_rank())).item()))
    (folder / f"{os.environ['SLURM_STEP_ID']}.{rank}").write_text(str(sums))
except RendezvousError as error:
    (folder / f"{os.environ['SLURM_STEP_ID']}.{rank}").write_text(str(error))
"""

# Somebody else's services on the first three ports of step 1: a silent one, a talkative one, a store.
OCCUPANT = """
import os, socket, sys, threading, time
from pathlib import Path
from fairlead_environments.variables import candidate_ports
from fairlead_distributed import bind_listener, tcp_store

ports = candidate_ports(f"job {os.environ['SLURM_JOB_ID']}, step 1, restart 0")
silent, talkative = (bind_listener([port]) for port in ports[:2])
store = tcp_store(bind_listener([ports[2]]))

def talk():
    while True:
        visitor, _ = talkative.accept()
        visitor.sendall(b"SSH-2.0-OpenSSH_9.2p1")
        visitor.close()

threading.Thread(target=talk, daemon=True).start()
Path(sys.argv[1], "occupied").write_text(str(ports))
time.sleep(300)
"""


@pytest.fixture
def rank(tmp_path: Path) -> str:
    """The command of one rank; it writes what it met into `<step>.<rank>`."""
    for name, text in (("rank.py", RANK), ("occupant.py", OCCUPANT)):
        (tmp_path / name).write_text(text)
    return f"{sys.executable} -P {tmp_path}/rank.py {tmp_path}"


def said(folder: Path, step: int) -> dict[int, str]:
    """What each rank of a step wrote."""
    return {int(path.suffix[1:]): path.read_text() for path in sorted(folder.glob(f"{step}.*"))}


def test_two_steps_at_once_on_the_same_nodes(cluster: Cluster, tmp_path: Path, rank: str) -> None:
    """Of one job, two nodes, two starts each; nobody chose a port."""
    steps = "\n".join(f"srun --overlap -N2 --ntasks-per-node=2 {rank} &" for _ in range(2))
    job = submit(cluster, f"{steps}\nwait\n", tmp_path, "-N2", "--ntasks-per-node=2")
    assert job.wait() == "COMPLETED", job.text()
    for step in range(2):
        assert said(tmp_path, step) == dict.fromkeys(range(4), "[10, 10]"), job.text()


@pytest.mark.full
def test_the_first_ports_are_taken(cluster: Cluster, tmp_path: Path, rank: str) -> None:
    """By services that are silent, talk, or are a store of somebody else; and rank 0 comes last."""
    script = f"""
    srun --overlap -N1 -n1 {sys.executable} -P {tmp_path}/occupant.py {tmp_path} &
    until [ -e {tmp_path}/occupied ]; do sleep 0.2; done
    srun --overlap -N2 --ntasks-per-node=2 {rank} late=5
    kill %1
    """
    job = submit(cluster, script, tmp_path, "-N2", "--ntasks-per-node=2")
    job.wait(seconds=240)
    assert (tmp_path / "occupied").exists(), job.text()
    assert said(tmp_path, 1) == dict.fromkeys(range(4), "[10, 10]"), job.text()


def test_missing_ranks_are_named_with_their_nodes(cluster: Cluster, tmp_path: Path, rank: str) -> None:
    """The same text on all that came; with the nodes from which nobody did."""
    step = f"srun -N2 --ntasks-per-node=2 {rank} absent=2,3"
    job = submit(cluster, step, tmp_path, "-N2", "--ntasks-per-node=2", environ={"PATIENCE": "20"})
    job.wait()
    found = said(tmp_path, 0)
    nodes = cluster.run("scontrol", "show", "hostnames", job.shown()["NodeList"]).split()
    assert set(found) == {0, 1}, job.text()
    assert found[0] == found[1]
    assert "2 of 4 ranks came" in found[0]
    assert f"missing: ranks 2, 3 on {nodes[1]}" in found[0]
    assert f"no rank came from {nodes[1]}" in found[0]


@pytest.mark.full
def test_ranks_dealt_out_in_turn_are_named_with_their_nodes(cluster: Cluster, tmp_path: Path, rank: str) -> None:
    """`srun -m cyclic`: ranks 1 and 3 are on the second node."""
    step = f"srun -N2 --ntasks-per-node=2 -m cyclic {rank} absent=1,2"
    job = submit(cluster, step, tmp_path, "-N2", "--ntasks-per-node=2", environ={"PATIENCE": "20"})
    job.wait()
    nodes = cluster.run("scontrol", "show", "hostnames", job.shown()["NodeList"]).split()
    found = said(tmp_path, 0)
    assert f"missing: rank 1 on {nodes[1]}" in found[0], job.text()
    assert f"missing: rank 2 on {nodes[0]}" in found[0]
    assert "no rank came" not in found[0]


@pytest.mark.full
def test_a_rank_with_another_torch_is_named(cluster: Cluster, tmp_path: Path, rank: str) -> None:
    """Rank, host and both values, on every rank."""
    job = submit(cluster, f"srun -N2 --ntasks-per-node=2 {rank} old=3", tmp_path, "-N2", "--ntasks-per-node=2")
    job.wait()
    nodes = cluster.run("scontrol", "show", "hostnames", job.shown()["NodeList"]).split()
    found = said(tmp_path, 0)
    assert set(found) == {0, 1, 2, 3}, job.text()
    assert len(set(found.values())) == 1
    assert f"torch: rank 3 on {nodes[1]} has 2.12.1; the other 3 ranks have 2." in found[0]


@pytest.mark.full
def test_a_name_that_does_not_resolve(cluster: Cluster, tmp_path: Path, rank: str) -> None:
    """Said by the ranks that look for it."""
    step = f"srun -N2 -n2 --ntasks-per-node=1 {rank} host=no-such-node.invalid"
    job = submit(cluster, step, tmp_path, "-N2", "--ntasks-per-node=1", environ={"PATIENCE": "20"})
    job.wait()
    found = said(tmp_path, 0)
    assert "the name 'no-such-node.invalid' does not resolve" in found[1], job.text()
    assert "1 of 2 ranks came" in found[0]


SCRIPT = """
import lightning.pytorch as L
from lightning.pytorch.demos.boring_classes import BoringModel
from fairlead import Fairlead, RunConfig
run = RunConfig(name="r", resume="no-such.ckpt")
trainer = L.Trainer(accelerator="cpu", num_nodes=2, devices=1, callbacks=[Fairlead(run)])
trainer.fit(BoringModel())
"""


def test_what_all_ranks_meet_is_said_once(cluster: Cluster, tmp_path: Path) -> None:
    """A wrong setting, whatever tells it: the whole error once, by rank 0, and a line of another rank at most."""
    (tmp_path / "job.yaml").write_text("model: {class: no_such_module:Model}\ntrainer: {accelerator: cpu}\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    for tasks, words, what in (
        ("--ntasks-per-node=2", ["-m", "fairlead", "fit", "job.yaml"], "no_such_module"),
        ("--ntasks-per-node=1", ["train.py"], "no-such.ckpt"),
    ):
        command = ["srun", "-N2", tasks, sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=cluster.environ(), capture_output=True, text=True, timeout=120)
        assert done.returncode != 0
        assert what in done.stderr, done.stderr
        assert len(re.findall(r"^(?:\[rank0\]:)? +do: ", done.stderr, re.MULTILINE)) == 1, done.stderr
        assert len(re.findall(r"^rank \d on \S+: .*; rank 0 says more$", done.stderr, re.MULTILINE)) <= 3
        assert done.stderr.count("Traceback") <= 1
