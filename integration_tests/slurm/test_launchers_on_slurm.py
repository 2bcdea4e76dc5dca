"""Ranks that something else than `srun` starts in a SLURM job: stopped and started again through SLURM all the same."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from integration_tests.exact.jobs.probe import PAUSE
from integration_tests.exact.references import References
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import submit
from integration_tests.slurm.system import wait_until
from integration_tests.slurm.training import PAIR, QUICK_AGAIN, as_if_nothing_had_happened, fit, history, until_saved

pytestmark = [pytest.mark.slow, pytest.mark.full]

TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-port 29511 -m "


@pytest.mark.full
def test_torchrun_in_a_batch_script_is_preempted(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """No step, so no warning: SIGTERM to all when the time of grace is over. SLURM requeues; we do not."""
    script = f"{QUICK_AGAIN}{TORCHRUN}{shlex.join(['fairlead', *PAIR.words()])}\n"
    job = submit(
        cluster,
        script,
        tmp_path,
        *("-N1", "--exclusive", "-w", "n1"),
        environ={PAUSE: "train_batch_start=1.5", "OMP_NUM_THREADS": "1"},
    )
    until_saved(job, tmp_path, 3)
    submit(cluster, "sleep 2\n", tmp_path, "-p", "urgent", "-N1", "--exclusive", "-w", "n1")
    assert job.wait(seconds=400) == "COMPLETED", job.text()
    (stop,) = history(tmp_path, "stop")
    assert stop["reason"] in ("requeued", "preempted")
    as_if_nothing_had_happened(references, tmp_path, job, stop["reason"], case=PAIR)


@pytest.mark.full
def test_ranks_of_pmix(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """`srun --mpi=pmix`: still a step of SLURM's."""
    job = fit(cluster, tmp_path, case=PAIR, pause=0.3, script="srun --mpi=pmix {command}\n")
    until_saved(job, tmp_path, 3)
    job.signal("USR1")
    as_if_nothing_had_happened(references, tmp_path, job, "unknown", case=PAIR)


def test_ranks_of_mpirun(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """`mpirun` over the nodes of a job; it passes a warning on, and SLURM starts the job again."""
    options = "--allow-run-as-root --oversubscribe -x PYTHONPATH -x OMP_NUM_THREADS"
    script = f"mpirun {options} -n 2 --map-by node {{command}} &\nmpi=$!\ntrap 'kill -USR1 $mpi' USR1\n" + (
        "while kill -0 $mpi 2>/dev/null; do wait $mpi; rc=$?; done\nexit $rc\n"
    )
    job = fit(cluster, tmp_path, case=PAIR, pause=0.3, script=script)
    until_saved(job, tmp_path, 3)
    job.signal("USR1", "-b")
    as_if_nothing_had_happened(references, tmp_path, job, "unknown", case=PAIR)


SCRIPT = """
    import os
    import time

    import lightning.pytorch as L
    import torch

    from fairlead import Fairlead
    from integration_tests.exact.jobs.data import PointsData
    from integration_tests.exact.jobs.mlp.model import MLP


    class Slow(L.Callback):
        def on_train_batch_start(self, *_):
            time.sleep(float(os.environ["SLOW"]))


    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[Slow(), Fairlead("runs/mlp")],
    )
    trainer.fit(MLP(), datamodule=PointsData(noise=0.1))
    torch.save(trainer.model.state_dict(), "final.pt")
"""


def test_a_plain_script_in_a_batch_script(cluster: Cluster, tmp_path: Path) -> None:
    """A Lightning Trainer of the user's own with the callback; no step, no launcher, and no setting."""
    script = textwrap.dedent(SCRIPT)
    weights = []
    for name in ("undisturbed", "stopped"):
        cwd = tmp_path / name
        cwd.mkdir()
        (cwd / "train.py").write_text(script)
        if name == "undisturbed":
            environ = {**cluster.environ(), "SLOW": "0", "PYTHONPATH": _path()}
            subprocess.run([sys.executable, "train.py"], cwd=cwd, env=environ, check=True, capture_output=True)
        else:
            python = f"{sys.executable} train.py &\npid=$!\ntrap 'kill -USR1 $pid' USR1\n"
            waits = "while kill -0 $pid 2>/dev/null; do wait $pid; rc=$?; done\nexit $rc\n"
            job = submit(cluster, python + waits, cwd, "-N1", environ={"SLOW": "0.4", "PYTHONPATH": _path()})
            wait_until("it trains", lambda c=cwd: bool(history(c, "training")), 120)  # type: ignore[misc]
            until_saved(job, cwd, 8)
            job.signal("USR1", "-b")
            assert job.wait(seconds=400) == "COMPLETED", job.text()
            assert [event["by"] for event in history(cwd, "requeue")] == ["slurm"]
            assert job.shown()["Restarts"] == "1"
            assert [e["step"] for e in history(cwd, "training")] == [0, history(cwd, "stop")[0]["step"]]
        weights.append(torch.load(cwd / "final.pt"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def _path() -> str:
    """Where the test's own modules are found."""
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
