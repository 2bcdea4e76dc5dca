"""Killed between a log and a checkpoint, a run is one run in every logger: each step once, none missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from wandb_server import Server, serving

pytestmark = pytest.mark.full

# One process imports everything once and forks a start for each part of the run.
JOB = """
import os, signal, sys, time, warnings
from pathlib import Path

sys.path.insert(0, sys.argv[2])
import wandb
from tiny_job import Line, end_wandb, fit

warnings.simplefilter("ignore", DeprecationWarning)
root = Path(sys.argv[1])
LOGGERS = ["csv", "tensorboard", {"name": "wandb", "project": "p", "offline": True}, {"name": "mlflow"}]


class Killed(Line):
    resume_attributes = ()
    at, how = -1, ""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == self.at:
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGUSR1)
                return
            if self.how == "alone":  # W&B's process, and nothing else of the job
                end_wandb(signal.SIGTERM)
                time.sleep(0.5)
                return
            if self.how == "terminated":  # as a scheduler does it: all of the job, W&B's process as well
                end_wandb(signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
                return
            time.sleep(0.5)  # until W&B has written what was logged
            end_wandb(signal.SIGKILL)  # the whole job, as a scheduler kills it
            os.kill(os.getpid(), signal.SIGKILL)


def start(run, at=-1, how=""):
    child = os.fork()
    if not child:
        try:
            os.environ["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.1" if how == "" else "0"
            model = Killed()
            model.at, model.how = at, how
            fit(root, {"name": run}, model=model, max_epochs=3, loggers=LOGGERS, checkpoint={"every_n_steps": 4})
            wandb.finish()  # as at the end of a process
        except SystemExit as ended:
            if how != "terminated":  # there is nobody to finish it
                wandb.finish(ended.code)
            os._exit(ended.code)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


assert start("whole") == 0
assert start("alone", 10, "alone") == 0
assert start("killed", 2) == -signal.SIGKILL  # before its first checkpoint
assert start("killed", 11) == -signal.SIGKILL
assert start("killed", 18, "stopped") == 143
assert start("killed", 20, "terminated") == 143
assert start("killed") == 0
"""


def board(run: Path) -> list[Any]:
    """Every record of TensorBoard, whatever it would hide."""
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        LegacyEventFileLoader,
    )

    events = (e for path in run.glob("tensorboard/*tfevents*") for e in LegacyEventFileLoader(str(path)).Load())
    return sorted(
        (v.tag, e.step, v.simple_value) for e in events for v in e.summary.value if v.HasField("simple_value")
    )


def wandb_rows(server: Server, run: Path, environ: dict[str, str]) -> list[Any]:
    """W&B's rows as a server gets them from its files, one start after another: step, values."""
    identity = json.loads((run / "wandb-run.json").read_text())["id"]
    environ = {**environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "WANDB_RESUME": "allow"}
    for folder in sorted(run.glob("wandb/offline-run-*")):
        subprocess.run([Path(sys.executable).parent / "wandb", "sync", folder], env=environ, check=False, timeout=60)
    return [(step, values) for _, step, values in server.history(identity)]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether the same rows are there, however often."""
    return all(row in other for row in one) and all(row in one for row in other)


def mlflow_points(run: Path) -> list[Any]:
    """Every point of every metric of the one run in MLflow's files: name, step, value."""
    (metrics,) = run.glob("mlruns/*/*/metrics")
    files = {str(path.relative_to(metrics)): path.read_text() for path in metrics.rglob("*") if path.is_file()}
    points = ((name, line.split()) for name, text in files.items() for line in text.splitlines())
    return sorted((name, int(step), float(value)) for name, (_, value, step, *_) in points)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_run_is_one_run_in_every_logger(tmp_path: Path) -> None:
    """Before its first checkpoint, behind one with W&B's writer, with what W&B has written; and stopped by a signal."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    environ |= {"PYTHONWARNINGS": "ignore", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    environ |= {
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_X_DISABLE_META": "true",
        "WANDB_X_SAVE_REQUIREMENTS": "false",
        "WANDB_CONSOLE": "off",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", JOB, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (killed / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    points = board(whole)
    assert ("train/loss", 23) in {(tag, step) for tag, step, _ in points}
    assert board(killed) == points
    assert max(Counter((tag, step) for tag, step, _ in points).values()) == 1

    with serving() as server:
        rows = wandb_rows(server, whole, environ)
        assert len(rows) == 24 + 3
        assert [step for step, values in rows if "train/loss" in values] == list(range(24))
        alone = wandb_rows(server, tmp_path / "alone", environ)
        assert same(alone, rows), "what its process had not recorded is logged at the run's end"
        again = wandb_rows(server, killed, environ)
        assert same(again, rows), "after a kill rather twice than not at all"
        assert server.preempting == {json.loads((killed / "wandb-run.json").read_text())["id"]}, "the stop says so"
    assert done.stderr.count("W&B's process has ended before this one") == 2
    assert "Traceback" not in done.stderr

    logged = mlflow_points(whole)
    assert [step for name, step, _ in logged if name == "train/loss"] == list(range(24))
    assert max(Counter((name, step) for name, step, _ in logged).values()) == 1
    assert mlflow_points(killed) == logged
