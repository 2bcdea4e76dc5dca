"""W&B with a server: a run that was killed goes on as one run, whatever had arrived; so does an upload afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wandb_server import serving

pytestmark = pytest.mark.full

# One process imports everything once and forks a start for each part of a run.
JOB = """
import json, os, signal, sys, time, urllib.request
from pathlib import Path

import wandb
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager
from fairlead_runs.logger_positions import logger_positions
from fairlead_lightning.loggers.preempting import mark_preempting
from fairlead_lightning.loggers.wandb_runtime import build

sys.path.insert(0, sys.argv[-1])
from tiny_job import end_wandb

plugins = PluginManager()
root = Path(sys.argv[1])


def start(name, begin, end, *, save=None, kill=None, offline=False, stop=False, fails=False):
    \"\"\"Logs steps; keeps the positions after step `save`; `kill` says how it dies behind the last one.\"\"\"
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    run = root / name
    run.mkdir(exist_ok=True)
    saved = run / "positions"
    extras = {"resume_step": begin or None, "logger_positions": json.loads(saved.read_text()) if begin else {}}
    config = parse_backend("logger", {"name": "wandb", "project": "p", "offline": offline}, plugins)
    logger = build(config, BuildContext(None, os.environ, plugins, run_dir=run, extras=extras))
    if kill == "at once":
        logger._wandb_init["settings"] = wandb.Settings(x_transaction_log_flush_interval=0)
    if kill == "arrived":  # sooner than W&B writes its own record
        logger._wandb_init["settings"] = wandb.Settings(x_file_stream_transmit_interval=0.2)
    for step in range(begin, end):
        logger.log_metrics({"loss": step / 10, "epoch": 0}, step)
        if step % 2:
            logger.log_metrics({"val": step / 10, "epoch": 0}, step)
        if step == save:
            if kill == "written":
                time.sleep(2.5)  # what is older than that is in W&B's record
            saved.write_text(json.dumps(logger_positions([logger])))
    if kill == "arrived":
        (run / "logged").touch()
        while not (run / "arrived").exists():
            time.sleep(0.05)
    if kill == "written":
        time.sleep(2.5)
    if fails:
        logger.finalize("failed")
        logger._experiment.finish()
        os._exit(1)
    if kill:
        end_wandb(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if stop:
        mark_preempting([logger])
    logger.finalize("success")
    logger.experiment.finish()
    os._exit(0)


assert start("lost", 0, 6, save=3, kill="at once") == -signal.SIGKILL
assert start("lost", 4, 8) == 0
assert start("arrived", 0, 6, save=3, kill="arrived") == -signal.SIGKILL
assert start("arrived", 4, 8, stop=True) == 0
assert start("offline", 0, 6, save=3, fails=True, offline=True) == 1
time.sleep(1.1)  # W&B names the folder of a start by the second
assert start("offline", 4, 8, offline=True) == 0
assert start("torn", 0, 6, save=3, kill="written", offline=True) == -signal.SIGKILL
(torn,) = (root / "torn/wandb").glob("offline-run-*/run-*.wandb")
with torn.open("ab") as file:
    file.write(b"half a record")
assert start("torn", 4, 8, offline=True) == 0
"""

WHOLE = [
    (number, step, {name: step / 10, "epoch": 0})
    for number, (step, name) in enumerate(
        (step, name) for step in range(8) for name in (("loss", "val") if step % 2 else ("loss",))
    )
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_run_is_one_run_at_the_server(tmp_path: Path) -> None:
    """Rows that never arrived, rows that arrived and are trained again, and records that are uploaded later."""
    with serving() as server:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environ |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "WANDB_SILENT": "true"}
        environ |= {"WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true", "WANDB_CONSOLE": "off"}
        environ |= {"WANDB_X_SAVE_REQUIREMENTS": "false", "HOME": str(tmp_path)}
        environ |= {"PYTHONWARNINGS": "ignore::DeprecationWarning"}
        command = [sys.executable, "-c", JOB, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
            there = tmp_path / "arrived"
            while job.poll() is None:
                if (there / "logged").exists() and not (there / "arrived").exists():
                    identity = identity_of(there)
                    if len(server.history(identity)) == 9:
                        (there / "arrived").touch()
                try:
                    job.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
            assert job.stdout is not None
            assert job.stderr is not None
            said, errors = job.stdout.read(), job.stderr.read()
        assert job.returncode == 0, errors[-3000:]
        assert server.history(identity_of(tmp_path / "lost")) == WHOLE
        assert server.history(identity_of(there)) == WHOLE
        assert server.preempting == {identity_of(there)}

        assert server.history(identity_of(tmp_path / "offline")) == []
        uploads = [line.strip() for line in said.splitlines() if "wandb sync" in line]
        assert [("/offline/" in upload, "/torn/" in upload) for upload in uploads] == [(True, False), (False, True)]
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
        told = ""
        for upload in uploads:
            done = subprocess.run(upload, shell=True, env=environ, capture_output=True, text=True, check=False)
            told += done.stdout + done.stderr
        assert server.history(identity_of(tmp_path / "offline")) == WHOLE, f"its first start failed\n{told}"
        torn = [row for _, *row in server.history(identity_of(tmp_path / "torn"))]
        twice = [[step, values] for _, step, values in [*WHOLE[:9], *WHOLE[6:]]]
        assert torn == twice, f"steps 4 and 5 are there twice, and nothing is missing: {told}"
        assert errors.count("killed while it recorded offline") == 1


def identity_of(run: Path) -> str:
    return str(json.loads((run / "wandb-run.json").read_text())["id"])
