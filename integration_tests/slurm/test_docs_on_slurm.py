"""The job scripts of docs/how-to/slurm.md, as they stand there: submitted, stopped, and ended as the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from integration_tests.cpu_nodes import trained_alike, write_job
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job
from integration_tests.slurm.system import wait_until
from integration_tests.slurm.training import history, until_saved

pytestmark = [pytest.mark.slow, pytest.mark.full]

PAGE = Path(__file__).parents[2] / "docs/how-to/slurm.md"
STEPS = 48
SITE = {
    # Lines that are a site's own, with what stands for them here: an environment from which `scontrol` is not seen.
    r"^container=.*$": f'container="env PATH={Path(sys.executable).parent}"',
}

NET = """
import time
from pathlib import Path

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        time.sleep(0.3 if Path("slow").exists() else 0.0)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Points(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.linspace(-1, 1, 64).unsqueeze(1), batch_size=2, shuffle=True)
"""
JOB: dict[str, Any] = {
    "run": {"name": "sine", "seed": 1},
    "model": {"class": "net:Net"},
    "data": {"class": "net:Points"},
    "trainer": {"max_steps": STEPS, "enable_model_summary": False, "checkpoint": {"every_n_steps": 3}},
}
TRAIN = f"""
import lightning.pytorch as L

from fairlead import Fairlead
from fairlead.config import CheckpointConfig
from net import Net, Points

L.seed_everything(1)
callback = Fairlead(run="runs/sine", checkpoint=CheckpointConfig(every_n_steps=3))
trainer = L.Trainer(max_steps={STEPS}, accelerator="cpu", devices=1, logger=False, callbacks=[callback])
trainer.fit(Net(), datamodule=Points())
"""


def blocks() -> dict[str, str]:
    """The titled shell blocks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r'^```(?:bash|sh) title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))


SCRIPTS = blocks()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a user has in the working directory: the code, the job, `train.py` and the page's scripts."""
    for name, text in (("net.py", NET), ("train.py", TRAIN), ("job.yaml", json.dumps(JOB)), *SCRIPTS.items()):
        for line, ours in SITE.items():
            text = re.sub(line, ours, text, flags=re.MULTILINE)
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
    (tmp_path / "slow").touch()  # until it is stopped, so that there is time for it
    return tmp_path


def sbatch(cluster: Cluster, folder: Path, *words: str) -> Job:
    """`sbatch`, with the environment that a user has activated."""
    activated = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    number = cluster.run("sbatch", "--parsable", *words, cwd=folder, environ={"PATH": activated}).strip()
    name = f"slurm-{number}_0.out" if any("array" in word for word in words) else f"slurm-{number}.out"
    return Job(cluster, number, folder / name)


def at_work(job: Job, folder: Path, run: str = "sine") -> Path:
    """The directory of its run, once a step is saved."""
    directory = folder / "runs" / run
    until_saved(job, folder, 3, run=directory)
    return directory


def goes_on(job: Job, folder: Path, reason: str, run: str = "sine", restarts: str = "1") -> None:
    """It was stopped once, and ended in its second start with each step done once."""
    directory = folder / "runs" / run
    wait_until("it has stopped", lambda: bool(history(folder, "stop", run=directory)), 60)
    (folder / "slow").unlink(missing_ok=True)
    assert job.wait(seconds=180) == "COMPLETED", job.text()
    assert job.shown()["Restarts"] == restarts
    (stop,) = history(folder, "stop", run=directory)
    assert stop["reason"] == reason, job.text()
    assert len(history(folder, "start", run=directory)) == 2
    assert [event["step"] for event in history(folder, "training", run=directory)] == [0, stop["step"]]
    (finished,) = history(folder, "finished", run=directory)
    assert finished["step"] == STEPS
    assert 3 <= stop["step"] < STEPS


def test_one_process_per_gpu(cluster: Cluster, folder: Path) -> None:
    """The warning comes to the tasks; the output of both starts is there, and says what the page shows."""
    job = sbatch(cluster, folder, "gpus.sh")
    directory = at_work(job, folder)
    assert history(folder, "start", run=directory)[0]["world_size"] == 4
    job.signal("USR1")
    goes_on(job, folder, "unknown")
    step = history(folder, "stop", run=directory)[0]["step"]
    assert f"stopped at step {step}, on request; everything is saved" in job.text()
    assert f"resumes from {directory}/checkpoints/step-{step:08}" in job.text()


@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_threads_of_a_task_on_cpus(cluster: Cluster, folder: Path, nodes: int) -> None:
    """One task for each node, a thread for each of its CPUs, the weights of one process with the same batch in all."""
    write_job(folder, nodes)
    job = sbatch(cluster, folder, f"--nodes={nodes}", "cpus.sh")
    assert job.wait() == "COMPLETED", job.text()
    (start,) = history(folder, "start", run=folder / "runs/sine")
    assert start["world_size"] == nodes
    provenance = json.loads((folder / "runs/sine/starts/1/provenance.json").read_text())
    assert '"OMP_NUM_THREADS": "4"' in json.dumps(provenance)  # torch takes no more than the machine has cores
    trained_alike(folder, nodes)


def test_an_array(cluster: Cluster, folder: Path) -> None:
    """A run for each task, warned and started again by itself."""
    job = sbatch(cluster, folder, "array.sh")
    for task in range(2):
        at_work(job, folder, f"sine-task-{task}")
    job.signal("USR1")
    for task in range(2):
        one = Job(cluster, f"{job.id}_{task}", folder / f"slurm-{job.id}_{task}.out")
        goes_on(one, folder, "unknown", run=f"sine-task-{task}")


@pytest.mark.full
def test_the_rehearsal(cluster: Cluster, folder: Path) -> None:
    """The commands of the page's last section, with its preemptible script."""
    first, urgent = (shlex.split(line)[1:] for line in SCRIPTS["rehearsal"].splitlines())
    job = sbatch(cluster, folder, *first, "--nodelist=n[1-2]")  # the page's cluster has no others
    at_work(job, folder)
    other = sbatch(cluster, folder, *urgent, "--nodelist=n[1-2]")
    goes_on(job, folder, "preempted")
    assert other.state() == "COMPLETED"
    assert "as another job needs the nodes" in job.text()


@pytest.mark.full
def test_a_script_that_passes_its_warning_on(cluster: Cluster, folder: Path) -> None:
    """`--signal=B:USR1@120`."""
    job = sbatch(cluster, folder, "forward.sh")
    at_work(job, folder)
    job.signal("USR1", "-b")
    goes_on(job, folder, "unknown")


@pytest.mark.full
def test_a_train_py_without_srun(cluster: Cluster, folder: Path) -> None:
    """Where the process comes from, and who starts the job again, are two questions."""
    job = sbatch(cluster, folder, "train-py.sh")
    at_work(job, folder)
    job.signal("USR1", "-b")
    goes_on(job, folder, "unknown")


def test_torchrun_in_a_batch_script(cluster: Cluster, folder: Path) -> None:
    """The agents pass the warning on, and wait for their workers."""
    job = sbatch(cluster, folder, "torchrun.sh")
    directory = at_work(job, folder)
    assert history(folder, "start", run=directory)[0]["world_size"] == 2
    job.signal("USR1")
    goes_on(job, folder, "unknown")


def test_a_container_without_scontrol(cluster: Cluster, folder: Path) -> None:
    """The job script runs what the ranks have left; the ranks themselves reach no command of SLURM's."""
    job = sbatch(cluster, folder, "container.sh")
    directory = at_work(job, folder)
    job.signal("USR1")
    goes_on(job, folder, "unknown")
    (stop,) = history(folder, "stop", run=directory)
    assert "scontrol" in stop["evidence"]
    assert history(folder, "requeue", run=directory)[0]["by"] == "script"
    assert list((folder / "requeue" / job.id).iterdir()) == []


@pytest.mark.full
def test_a_job_that_is_not_started_again(cluster: Cluster, folder: Path) -> None:
    """Saved, and no word of a requeue; submitted again it goes on."""
    job = sbatch(cluster, folder, "once.sh")
    at_work(job, folder)
    job.signal("USR1")
    assert job.wait() == "FAILED"
    assert job.shown()["ExitCode"] == "143:0", job.text()
    assert "requeue-refused" not in job.text()
    again = sbatch(cluster, folder, "once.sh")
    goes_on(again, folder, "unknown", restarts="0")


def test_every_script_of_the_page_is_tried() -> None:
    """A script that is added to the page needs a test here."""
    tests = Path(__file__).read_text(encoding="utf-8")
    assert len(SCRIPTS) == 10
    scripts = [name for name in SCRIPTS if name.endswith(".sh")]
    assert [name for name in scripts if f'"{name}"' not in tests and name not in SCRIPTS["rehearsal"]] == []
